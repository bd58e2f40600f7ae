"""The options that the analyses share, each written once."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

OUT = Path("analysis")
OutOption = Annotated[Path, typer.Option(help="Directory for the page and the numbers.")]
SeedOption = Annotated[int, typer.Option(help="Of every draw.", min=0)]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is looked into, and where it goes."""

    checkpoint: Annotated[str, typer.Argument(help="A directory or hub name.", show_default=False)]
    num_loops: Annotated[
        int | None, typer.Option(help="Depth; as trained if left out.", min=1, show_default=False)
    ] = None
    layers_per_loop: Annotated[
        int | None,
        typer.Option(
            help="Take every so many layers of a dense model for a loop, to lay it beside a looped one.", min=1,
            show_default=False,
        ),
    ] = None  # fmt: skip
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the checkpoint's chat template.")] = False
    out: OutOption = OUT
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default=False)] = None
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 ...; the checkpoint's own if left out.")] = None
    seed: SeedOption = 0


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where prompts come from."""

    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSONL of prompt or input_ids, with answer, level and score where known; or a text file, a prompt a "
            "line."
        ),
    ] = None
    pairs: Annotated[
        Path | None,
        typer.Option(help="TSV, CSV or JSONL of question1, question2, is_duplicate; asked for yes or no."),
    ] = None
    generator: Annotated[
        str | None,
        typer.Option(
            help="Or a generator of documents: of a task of the lab, as looplm.lab.mano:documents, the questions that "
            "it holds out.",
            show_default=False,
        ),
    ] = None
    arguments: Annotated[str, typer.Option(help="The generator's arguments, as JSON.")] = "{}"
    levels: Annotated[
        str | None,
        typer.Option(help="Levels of a task of the lab, with commas; all if left out.", show_default=False),
    ] = None
    count: Annotated[
        int | None,
        typer.Option(
            help="Prompts to take, at most: 1,000 if left out, 100 for lens and intervene.", min=1, show_default=False
        ),
    ] = None
    labels: Annotated[
        str | None,
        typer.Option(help="Answers to choose between, with commas; any token if left out (pairs: yes,no)."),
    ] = None


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command of Typer's for one that takes dataclasses of options: each field is an option of its own."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    options: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        options += signature(groups[name]).parameters.values() if name in groups else [parameter]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    vars(run)["__signature__"] = Signature([one.replace(kind=Parameter.KEYWORD_ONLY) for one in options])
    run.__annotations__ = {one.name: one.annotation for one in options}
    return run
