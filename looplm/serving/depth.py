"""What the extras of a request that speak of depth mean."""

from looplm.errors import UserError
from looplm.inference.exit_policy import Deadline, ExitPolicy, FixedDepth, QuantileExit, parse_exit
from looplm.inference.speculative import Speculation
from looplm.serving.schema import Generation

DEEPEST = 2
"""A request may ask for so many times the trained loops: more would only keep others waiting."""


def exit_of(body: Generation, option: str = "exit") -> ExitPolicy | None:
    """When tokens leave; None leaves it to the checkpoint. Raises UserError when impossible.

    option: what `exit` is called where it was given.
    """
    if body.num_loops is not None:
        return FixedDepth(body.num_loops)
    if body.exit_threshold is not None:
        return QuantileExit(body.exit_threshold)
    if body.deadline_ms is not None:
        return Deadline(body.deadline_ms)
    return None if body.exit is None else parse_exit(body.exit, option)


def check_loops(num_loops: int | None, trained_loops: int) -> None:
    """Raises UserError for a depth that is far beyond what was trained."""
    if num_loops is not None and num_loops > DEEPEST * trained_loops:
        raise UserError(
            f"num_loops is {num_loops}; the model was trained for {trained_loops}, and this server allows at most "
            f"{DEEPEST * trained_loops}."
        )


def speculation_of(body: Generation, exit: ExitPolicy | None) -> Speculation | None:
    """What is drafted, if anything; `exit`: when tokens leave, None where that is not known.

    Raises UserError where a fixed depth leaves no loop that could test a draft. Where each token chooses its depth,
    one that leaves at `draft_loops` or before is final.
    """
    if body.draft_loops is None:
        return None
    if isinstance(exit, FixedDepth) and body.draft_loops >= exit.num_loops:
        raise UserError(
            f"draft_loops is {body.draft_loops}, but every token leaves at loop {exit.num_loops}: nothing would test "
            "a draft. Give an earlier loop, or leave it out."
        )
    return Speculation(body.draft_loops, body.draft_tokens)
