"""One question to an endpoint that speaks OpenAI's chat API, and all the ways in which it may fail to answer."""

import http.client
import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from looplm.errors import UserError

MOST_BYTES = 1_000_000
"""Of a reply."""
MAX_TOKENS = 2048
"""Of a judgment: a sentence and a number, and room for a judge that reasons before."""


class TryAgain(Exception):
    """The endpoint did not answer this time; it may the next."""

    def __init__(self, reason: str, wait_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds
        """What the endpoint asked for."""


class NoAnswer(Exception):
    """The endpoint refuses this question, and would again."""


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to wherever it points."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


@dataclass(frozen=True)
class Endpoint:
    """Where a judge is asked. Raises UserError for an address that is none, or a key that cannot be sent.

    url: up to and with the version, such as http://127.0.0.1:8000/v1. seconds: for one whole reply.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    seconds: float = 60.0

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # half of an IPv6 address, a port that is no number
            fits = False
        if not fits:
            raise UserError(f"The judge's address is {self.url!r}; give one such as http://127.0.0.1:8000/v1.")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise UserError("The judge's API key holds characters that no header may carry, such as a line break.")

    def ask(self, messages: list[dict[str, str]]) -> str:
        """The text of one reply, at temperature 0.

        Raises TryAgain for what may pass (no connection, too slow, 408, 429, 5xx, a reply in another form), NoAnswer
        for a question that is refused, UserError where no question can be answered: a wrong address, key or model.
        """
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(
            self.url.rstrip("/") + "/chat/completions", json.dumps(body).encode(), headers, method="POST"
        )
        deadline = time.monotonic() + self.seconds
        try:
            with urllib.request.build_opener(NoRedirect).open(request, timeout=self.seconds) as response:
                content = read_until(response, deadline)
        except urllib.error.HTTPError as error:
            with error:
                raise self.failure(error) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise TryAgain(self.hide(f"no reply ({type(error).__name__}: {error})")) from None
        return self.text_of(content)

    def failure(self, error: urllib.error.HTTPError) -> Exception:
        """What a status that is no success means."""
        code = error.code
        try:
            said = self.hide(error.read(2000).decode("utf-8", "replace").strip())[:300]
        except OSError:
            said = ""
        if code in (408, 409, 425, 429) or code >= 500:
            return TryAgain(f"status {code}", retry_after(error.headers.get("Retry-After")))
        if code in (401, 403, 404, 405) or code < 400:
            return UserError(
                f"The judge at {self.url} answers with status {code}: {said or error.reason}. Look at address, model "
                f"({self.model}) and API key; judgments so far are kept."
            )
        return NoAnswer(f"status {code}: {said}")

    def text_of(self, content: bytes) -> str:
        """The message in a reply. Raises TryAgain where there is none."""
        try:
            text = json.loads(content)["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError):
            raise TryAgain("a reply that is not OpenAI's") from None
        if not isinstance(text, str):
            raise TryAgain("a reply without a text")
        return text

    def hide(self, text: str) -> str:
        """`text` without the key, should the endpoint repeat it."""
        return text.replace(self.api_key, "***") if self.api_key else text


def read_until(response: Any, deadline: float) -> bytes:
    """The body of a reply. A timeout of sockets alone would let one that drips go on for ever."""
    content = b""
    while chunk := response.read1(65536):
        content += chunk
        if time.monotonic() > deadline:
            raise TimeoutError("too slow")
        if len(content) > MOST_BYTES:
            raise ValueError(f"over {MOST_BYTES} bytes")
    return content


def retry_after(text: str | None) -> float | None:
    """Seconds that a reply asks to wait; None for a date, or nothing."""
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:
        return None
