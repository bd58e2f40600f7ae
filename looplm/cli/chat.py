"""`looplm chat`: a conversation in the terminal, with a checkpoint or with a running server."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from looplm.errors import UserError

if TYPE_CHECKING:
    import httpx

    from looplm.serving.schema import ChatRequest

ADDRESS = r"[\w.-]+:\d+(/.*)?|\[[\da-fA-F:]+\]:\d+(/.*)?"
"""host:port, which names no checkpoint."""
GREETING_SECONDS = 30.0
"""For a server to say which model it has."""
HELP = "One message a line. /new begins anew, /exit or Ctrl-D ends; Ctrl-C stops an answer."


class Bit(NamedTuple):
    """A piece of an answer, and the loops its tokens left at."""

    text: str
    loops: list[int]


Reply = Callable[["ChatRequest"], Iterator[Bit]]
"""Answers a conversation. Raises UserError when it cannot be answered."""


def chat(
    partner: Annotated[
        str, typer.Argument(metavar="CHECKPOINT|URL", help="A checkpoint, or a server: http://host:port.")
    ] = "stdlib-small",
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same answers.")] = None,
    num_loops: Annotated[int | None, typer.Option(min=1, help="Leave after this many loops, every token.")] = None,
    exit_threshold: Annotated[
        float | None, typer.Option(min=0, help="Leave at the first loop whose exit cdf reaches this.")
    ] = None,
    exit: Annotated[
        str | None, typer.Option(help="hidden-diff:EPS, kl:NATS, stable:LOOPS or deadline:MILLISECONDS.")
    ] = None,
    draft_loops: Annotated[int | None, typer.Option(min=1, help="Draft tokens at this loop.")] = None,
    show_depth: Annotated[bool, typer.Option("--show-depth", help="Colour tokens by loop.")] = False,
    api_key: Annotated[str | None, typer.Option(envvar="LOOPLM_API_KEY", help="Of the server.")] = None,
    model: Annotated[str | None, typer.Option(help="Of the server; its first one if left out.")] = None,
    device: Annotated[str | None, typer.Option(help="Where a checkpoint runs: cpu, cuda ...")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of a checkpoint's weights: bf16, fp32 ...")] = None,
) -> None:
    """Talk with a checkpoint, or with a server started by `looplm serve`. Answers appear as they are written."""
    from pydantic import ValidationError

    from looplm.serving.schema import ChatRequest, Message, first_problem

    try:
        asked = ChatRequest(
            model=model or partner,
            messages=[Message(role="user", content="")],
            max_completion_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            num_loops=num_loops,
            exit_threshold=exit_threshold,
            exit=exit,
            draft_loops=draft_loops,
            stream=True,
            return_depths=True,
        )
    except ValidationError as error:
        raise UserError(first_problem([], error.errors())[0]) from None
    told = [] if system is None else [Message(role="system", content=system)]
    if re.fullmatch(ADDRESS, partner):
        raise UserError(f"{partner} is an address; write http://{partner} to talk with a server there.")
    if not partner.lower().startswith(("http://", "https://")):
        converse(asked, told, local(partner, device, dtype), show_depth)
        return
    with remote(partner, api_key, model) as (name, reply):
        converse(asked.model_copy(update={"model": name}), told, reply, show_depth)


def converse(asked: "ChatRequest", told: "list[Any]", reply: Reply, show_depth: bool) -> None:
    """Messages from standard input, each answered in the light of those before. What is wrong with one is said."""
    import sys

    from looplm.serving.schema import Message

    typer.echo(HELP, err=True)
    said = list(told)
    while True:
        typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            typer.echo("", err=True)
            return
        if line.strip() == "/new":
            said = list(told)
            continue
        if not line.strip():
            continue
        turn = Message(role="user", content=line.rstrip("\n"))
        request = asked.model_copy(update={"messages": [*said, turn]})
        try:
            answer = write(reply(request), show_depth)
        except UserError as error:
            typer.echo(f"looplm: {error}", err=True)
            continue
        said += [turn, Message(role="assistant", content=answer)]


def write(bits: Iterator[Bit], show_depth: bool) -> str:
    """Prints an answer while it is written; returns what was said of it."""
    from rich.console import Console
    from rich.text import Text

    from looplm.report.depth_text import depth_text, legend

    console = Console(highlight=False)
    colours = console.color_system is not None
    said, loops = "", []
    with closing(bits):  # type: ignore[type-var]
        try:
            for bit in bits:
                said, loops = said + bit.text, loops + bit.loops
                # Several tokens in one piece of text: its colour is that of the deepest.
                plain = not show_depth or not bit.loops
                shown = Text(bit.text) if plain else depth_text("", [bit.text], [max(bit.loops)], colours)
                console.print(shown, end="", soft_wrap=True)
        except KeyboardInterrupt:
            typer.echo(" [stopped]", err=True)
    console.print()
    if show_depth and loops:
        console.print(legend(loops, max(loops), colours), soft_wrap=True)
    return said


def local(checkpoint: str, device: str | None, dtype: str | None) -> Reply:
    """Answers of a checkpoint in this process. Raises UserError when it cannot be loaded."""
    from looplm.cli.generate import load_engine
    from looplm.serving.depth import exit_of, speculation_of
    from looplm.serving.prompts import PromptReader

    engine = load_engine(checkpoint, None, device, dtype)
    prompts, trained = PromptReader(engine), engine.model.model.config.num_loops

    def reply(body: "ChatRequest") -> Iterator[Bit]:
        token_ids, sampling = prompts.chat(body)
        exit, speculation = exit_of(body, trained), speculation_of(body)
        for piece in engine.stream(token_ids, sampling, exit, speculation=speculation):
            yield Bit(piece.text, piece.loops)
            if piece.finish_reason == "error":
                raise UserError("The model gave logits that are not finite: its weights are damaged, or overflow.")

    return reply


@contextmanager
def remote(url: str, api_key: str | None, model: str | None) -> Iterator[tuple[str, Reply]]:
    """The model's name and its answers over HTTP. Raises UserError when there is no such server."""
    import httpx

    base = url.rstrip("/").removesuffix("/v1")
    headers = {} if not api_key else {"authorization": f"Bearer {api_key}"}
    with ExitStack() as stack:
        try:
            # A local address is not for a proxy that the environment names.
            timeout = httpx.Timeout(30, read=None)
            client = httpx.Client(base_url=base, headers=headers, timeout=timeout, trust_env=False)
            stack.enter_context(client)
            listed = client.get("/v1/models", timeout=GREETING_SECONDS)
            check_status(listed, listed.content)
            name = model or listed.json()["data"][0]["id"]
        except (httpx.HTTPError, httpx.InvalidURL, json.JSONDecodeError, LookupError, TypeError) as error:
            raise UserError(f"There is no looplm server at {url} ({error}). Start one with `looplm serve`.") from None
        yield name, lambda body: ask(client, url, body)


def ask(client: "httpx.Client", url: str, body: "ChatRequest") -> Iterator[Bit]:
    """One answer of a server, piece by piece. Raises UserError when it refuses, or breaks off."""
    import httpx

    try:
        with client.stream("POST", "/v1/chat/completions", json=body.model_dump(exclude_unset=True)) as answer:
            check_status(answer, answer.read() if answer.status_code != 200 else b"")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield from bits_of(json.loads(line.removeprefix("data: ")))
    except httpx.HTTPError as error:
        raise UserError(f"The server at {url} did not answer to the end ({error}).") from None


def check_status(answer: Any, content: bytes) -> None:
    """Raises UserError with what a server says when it refuses."""
    if answer.status_code == 200:
        return
    try:
        raise UserError(json.loads(content)["error"]["message"])
    except (json.JSONDecodeError, LookupError, TypeError):
        raise UserError(f"The server answers with status {answer.status_code}.") from None


def bits_of(event: dict[str, Any]) -> Iterator[Bit]:
    """The pieces of text in one event of a stream. Raises UserError for an error in it."""
    if "error" in event:
        raise UserError(event["error"]["message"])
    for choice in event["choices"]:
        text, final = choice["delta"].get("content") or "", choice["finish_reason"]
        if text:
            # The last event has the loops of all tokens once more.
            yield Bit(text, [] if final else choice.get("loops", []))
