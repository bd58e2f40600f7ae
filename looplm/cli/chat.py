"""`looplm chat`: a conversation in the terminal, with a checkpoint or with a running server."""

import io
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from looplm.cli.chat_bits import Bit, Reply, visible
from looplm.errors import UserError

if TYPE_CHECKING:
    from looplm.serving.schema import ChatRequest

ADDRESS = r"[\w.-]+:\d+(/.*)?|\[[\da-fA-F:]+\]:\d+(/.*)?"
"""host:port, which names no checkpoint."""
HELP = "One message a line. /new begins anew, /exit or Ctrl-D ends; Ctrl-C stops an answer."


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
    at_server = partner.lower().startswith(("http://", "https://"))
    check_partner(partner, at_server, model, device or dtype)
    asked = ask_for(
        system,
        model=model or partner,
        max_completion_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        num_loops=num_loops,
        exit_threshold=exit_threshold,
        exit=exit,
        draft_loops=draft_loops,
    )
    if not at_server:
        converse(asked, local(asked, partner, device, dtype), show_depth)
        return
    from looplm.cli.api_key import check_key
    from looplm.cli.chat_server import remote

    check_key(api_key)
    with remote(partner, asked, api_key, model) as (named, reply):
        converse(named, reply, show_depth)


def check_partner(partner: str, at_server: bool, model: str | None, placed: str | None) -> None:
    """Raises UserError for an address that is none, and for options of the other kind of partner.

    placed: device or dtype.
    """
    if re.fullmatch(ADDRESS, partner):
        raise UserError(f"{partner} is an address; write http://{partner} to talk with a server there.")
    if at_server and placed is not None:
        raise UserError("--device and --dtype say how a checkpoint runs here; a server has its own. Leave them out.")
    if not at_server and model is not None:
        raise UserError("--model chooses among the models of a server; a checkpoint is one. Leave it out.")


def ask_for(system: str | None, **options: Any) -> "ChatRequest":
    """A request that says how answers are wanted, its last message still empty. Raises UserError for bad options."""
    from pydantic import ValidationError

    from looplm.inference.sampling import check_text
    from looplm.serving.depth import exit_of, speculation_of
    from looplm.serving.schema import ChatRequest, Message, first_problem

    check_text("--system", system or "")
    told = [] if system is None else [Message(role="system", content=system)]
    messages = [*told, Message(role="user", content="")]
    try:
        asked = ChatRequest(messages=messages, stream=True, return_depths=True, **options)
    except ValidationError as error:
        raise UserError(first_problem([], error.errors())[0]) from None
    speculation_of(asked, exit_of(asked, "--exit"))
    return asked


def converse(asked: "ChatRequest", reply: Reply, show_depth: bool) -> None:
    """Messages from standard input, each answered in the light of those before. What is wrong with one is said."""
    from looplm.inference.sampling import check_text
    from looplm.serving.schema import Message

    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is not UTF-8 is said of its line
    typer.echo(HELP, err=True)
    told = asked.messages[:-1]
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
        try:
            check_text("The message", line)
            answer = write(reply(asked.model_copy(update={"messages": [*said, turn]})), show_depth)
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
                text = visible(bit.text)
                # Several tokens in one piece of text: its colour is that of the deepest.
                plain = not show_depth or not bit.loops
                shown = Text(text) if plain else depth_text("", [text], [max(bit.loops)], colours)
                console.print(shown, end="", soft_wrap=True)
        except KeyboardInterrupt:
            typer.echo(" [stopped]", err=True)
    console.print()
    if show_depth and loops:
        console.print(legend(loops, max(loops), colours), soft_wrap=True)
    return said


def local(asked: "ChatRequest", checkpoint: str, device: str | None, dtype: str | None) -> Reply:
    """Answers of a checkpoint in this process. Raises UserError when it cannot be loaded, or not do what is asked."""
    from looplm.cli.generate import load_engine
    from looplm.serving.depth import exit_of, speculation_of
    from looplm.serving.prompts import PromptReader

    exit = exit_of(asked, "--exit")
    engine = load_engine(checkpoint, exit, device, dtype)
    prompts, speculation = PromptReader(engine), speculation_of(asked, exit or engine.default_exit)
    engine.cancel(engine.submit(*prompts.chat(asked), exit, speculation=speculation))  # or every message would fail

    def reply(body: "ChatRequest") -> Iterator[Bit]:
        for piece in engine.stream(*prompts.chat(body), exit, speculation=speculation):
            yield Bit(piece.text, piece.loops)
            if piece.finish_reason == "error":
                raise UserError("The model gave logits that are not finite: its weights are damaged, or overflow.")

    return reply
