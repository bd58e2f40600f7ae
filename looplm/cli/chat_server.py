"""The server's side of `looplm chat`: its models, and its answers as they come. It may be anything at all."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from looplm.cli.chat_bits import Bit, Reply, visible
from looplm.errors import UserError
from looplm.serving.depth import check_loops

if TYPE_CHECKING:
    import httpx

    from looplm.serving.schema import ChatRequest

GREETING_SECONDS = 30.0
"""For a server to say which models it has."""
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading of something else than expected ends in."""
MOST_LOOPS = 1024
"""A depth beyond is none."""


@contextmanager
def remote(
    url: str, asked: "ChatRequest", api_key: str | None, model: str | None
) -> "Iterator[tuple[ChatRequest, Reply]]":
    """`asked` of a model there, and its answers over HTTP. Raises UserError when there is no such server or model,
    and for what it could never do."""
    import httpx

    base = url.rstrip("/").removesuffix("/v1")
    headers = {} if api_key is None else {b"authorization": f"Bearer {api_key}".encode()}
    with ExitStack() as stack:
        try:
            # A local address is not for a proxy that the environment names.
            timeout = httpx.Timeout(30, read=None)
            client = httpx.Client(base_url=base, headers=headers, timeout=timeout, trust_env=False)
            stack.enter_context(client)
            listed = client.get("/v1/models", timeout=GREETING_SECONDS)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise UserError(f"There is no looplm server at {url} ({error}). Start one with `looplm serve`.") from None
        check_status(listed.status_code, listed.content)
        card = find_model(url, listed.content, model)
        check_card(asked, card)
        yield asked.model_copy(update={"model": card["id"]}), lambda body: answer(client, url, body)


def find_model(url: str, listed: bytes, model: str | None) -> dict[str, Any]:
    """What a server says of the model of that name, or of its first. Raises UserError when it has none."""
    try:
        cards = {card["id"]: card for card in json.loads(listed)["data"] if isinstance(card["id"], str)}
    except MALFORMED:
        raise UserError(f"What answers at {url} does not list models, as a looplm server does.") from None
    if not cards:
        raise UserError(f"The server at {url} has no model.")
    name = next(iter(cards)) if model is None else model
    if name not in cards:
        raise UserError(f"The server at {url} has no model {name!r}; it has {', '.join(map(repr, list(cards)[:8]))}.")
    return cards[name]


def check_card(asked: "ChatRequest", card: dict[str, Any]) -> None:
    """Raises UserError for what the model, by its own account, could never do; every message would be refused."""
    trained, positions = card.get("num_loops"), card.get("max_model_len")
    if card.get("chat") is False:
        raise UserError("The server's checkpoint has no chat template, so it cannot chat.")
    if isinstance(trained, int):
        check_loops(asked.num_loops, trained)
    if isinstance(positions, int) and (asked.max_completion_tokens or 0) >= positions:
        raise UserError(
            f"--max-tokens is {asked.max_completion_tokens}; the context has {positions} positions, the message "
            "included. Lower it."
        )


def answer(client: "httpx.Client", url: str, body: "ChatRequest") -> Iterator[Bit]:
    """One answer of a server, piece by piece. Raises UserError when it refuses, breaks off, or sends what is none."""
    import httpx

    try:
        with client.stream("POST", "/v1/chat/completions", json=body.model_dump(exclude_unset=True)) as stream:
            check_status(stream.status_code, b"" if stream.status_code == 200 else stream.read())
            for line in stream.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data:"):
                    yield from bits_of(url, line.removeprefix("data:"))
    except httpx.HTTPError as error:
        raise UserError(f"The server at {url} did not answer to the end ({error}).") from None
    raise UserError(f"The server at {url} did not answer to the end.")


def check_status(status: int, content: bytes) -> None:
    """Raises UserError with what a server says when it refuses."""
    if status == 200:
        return
    try:
        said = said_by(json.loads(content)["error"])
    except MALFORMED:
        said = f"The server answers with status {status}."
    raise UserError(said)


def bits_of(url: str, data: str) -> list[Bit]:
    """The pieces of text in one event of a stream. Raises UserError for an error in it, and for what is no event."""
    said, bits = None, []
    try:
        event = json.loads(data)
        if "error" in event:
            said = said_by(event["error"])
        else:
            for choice in event["choices"]:
                # The last event has the loops of all tokens once more.
                loops = choice.get("loops") or [] if choice.get("finish_reason") is None else []
                if not all(type(loop) is int and 0 < loop <= MOST_LOOPS for loop in loops):
                    raise ValueError
                text = choice["delta"].get("content") or ""
                bits.append(Bit(text.encode(errors="replace").decode(), loops))  # no half of a surrogate pair
    except MALFORMED:
        raise UserError(f"The server at {url} sends what is no part of an answer: {data[:80]!r}.") from None
    if said is not None:
        raise UserError(said)
    return [bit for bit in bits if bit.text]


def said_by(error: Any) -> str:
    """The message of an error, in OpenAI's form or plain. Raises one of MALFORMED where there is none."""
    message = error if isinstance(error, str) else error["message"]
    if not isinstance(message, str):
        raise TypeError
    return visible(message)
