"""Options of commands that ask one checkpoint at many depths."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from looplm.errors import UserError

if TYPE_CHECKING:
    from looplm.inference import Engine, ExitPolicy

NumLoops = Annotated[
    str | None, typer.Option(help="Depths, with commas, also beyond the trained one; 1 to R if nothing is given.")
]
ExitThresholds = Annotated[str | None, typer.Option(help="Thresholds of the gate, with commas.")]
OtherRules = Annotated[
    str | None, typer.Option(help="Other rules, with commas: hidden-diff:EPS, kl:NATS, stable:LOOPS.")
]


def exits_of(
    num_loops: str | None, exit_threshold: str | None, exit: str | None, trained: int
) -> "dict[str, ExitPolicy]":
    """The policies that the options name, by their name in tables; depths 1 to `trained` when none is given.

    Raises UserError for an impossible one.
    """
    from looplm.inference import FixedDepth, QuantileExit
    from looplm.inference.exit_policy import parse_exit

    if num_loops is None and exit_threshold is None and exit is None:
        num_loops = ",".join(map(str, range(1, trained + 1)))
    exits: dict[str, ExitPolicy] = {f"loops {n}": FixedDepth(n) for n in whole_numbers("--num-loops", num_loops)}
    for text in parts(exit_threshold):
        try:
            threshold = float(text)
        except ValueError:
            raise UserError(f"--exit-threshold is {exit_threshold!r}; give numbers with commas.") from None
        exits[f"threshold {threshold:g}"] = QuantileExit(threshold)
    exits |= {text: parse_exit(text, "--exit") for text in parts(exit)}
    if not exits:
        raise UserError("Give at least one of --num-loops, --exit-threshold and --exit.")
    return exits


def whole_numbers(option: str, text: str | None) -> list[int]:
    """Whole numbers with commas between them. Raises UserError for anything else."""
    try:
        return [int(part) for part in parts(text)]
    except ValueError:
        raise UserError(f"{option} is {text!r}; give whole numbers with commas.") from None


def parts(text: str | None) -> list[str]:
    """What stands between commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def load_for(checkpoint: str, device: str | None, dtype: str | None, kv_cache: str) -> "Engine":
    """The checkpoint as an engine. Raises UserError for what cannot be loaded."""
    from looplm.cli.generate import load_engine
    from looplm.cli.generate_options import check_kv_cache

    return load_engine(checkpoint, None, device, dtype, check_kv_cache(kv_cache))


def warn_beyond(exits: "Mapping[str, ExitPolicy]", trained: int) -> None:
    """Says on stderr which depths the model was not trained for."""
    from looplm.inference import FixedDepth

    deeper = [name for name, exit in exits.items() if isinstance(exit, FixedDepth) and exit.num_loops > trained]
    if deeper:
        typer.echo(f"looplm: warning: {', '.join(deeper)}: beyond the {trained} this model was trained for.", err=True)
