"""What the extras of a request that speak of depth mean."""

from looplm.errors import UserError
from looplm.inference.exit_policy import Deadline, ExitPolicy, FixedDepth, QuantileExit, parse_exit
from looplm.inference.speculative import Speculation
from looplm.serving.schema import Generation

DEEPEST = 2
"""A request may ask for so many times the trained loops: more would only keep others waiting."""


def exit_of(body: Generation, trained_loops: int) -> ExitPolicy | None:
    """When tokens leave; None leaves it to the checkpoint. Raises UserError when impossible."""
    if body.num_loops is not None:
        return FixedDepth(checked_loops(body.num_loops, trained_loops))
    if body.exit_threshold is not None:
        return QuantileExit(body.exit_threshold)
    if body.deadline_ms is not None:
        return Deadline(body.deadline_ms)
    return None if body.exit is None else parse_exit(body.exit, "exit")


def checked_loops(num_loops: int, trained_loops: int) -> int:
    """`num_loops`. Raises UserError when it is far beyond what was trained."""
    if num_loops > DEEPEST * trained_loops:
        raise UserError(
            f"num_loops is {num_loops}; the model was trained for {trained_loops}, and this server allows at most "
            f"{DEEPEST * trained_loops}."
        )
    return num_loops


def speculation_of(body: Generation) -> Speculation | None:
    """What is drafted, if anything."""
    return None if body.draft_loops is None else Speculation(body.draft_loops, body.draft_tokens)
