"""When a token leaves the loop: the policies, and the one decision that engine and oracle share.

Depth counts loops from 1 here, as everywhere a user sees it.
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looplm.errors import UserError
from looplm.model.gate import exit_cdf


@runtime_checkable
class ExitPolicy(Protocol):
    """Decides, loop by loop, whether a token is read out or goes on."""

    def max_loops(self, trained_loops: int) -> int:
        """The deepest loop a token may reach, which always reads out. Prompts are computed that far."""
        ...

    def exits(self, loop: int, cdf: float | Tensor, trained_loops: int) -> bool | Tensor:
        """Whether a token that has passed `loop` loops leaves, its exit cdf at that loop being `cdf`.

        Elementwise for a tensor. `cdf` comes from `looplm.model.gate.exit_cdf`, widened to float64.
        """
        ...


@dataclass(frozen=True)
class FixedDepth:
    """Every token leaves after `num_loops` loops, which may exceed the trained depth. UserError below 1."""

    num_loops: int

    def __post_init__(self) -> None:
        if not isinstance(self.num_loops, int) or isinstance(self.num_loops, bool) or self.num_loops < 1:
            raise UserError(
                f"num_loops is {self.num_loops!r}; depth counts loops from 1 (it may exceed the trained one)."
            )

    def max_loops(self, trained_loops: int) -> int:
        """`num_loops`, whatever was trained."""
        return self.num_loops

    def exits(self, loop: int, cdf: float | Tensor, trained_loops: int) -> bool | Tensor:
        """True from loop `num_loops` on."""
        return loop >= self.num_loops


@dataclass(frozen=True)
class QuantileExit:
    """A token leaves at the first loop whose exit cdf reaches `threshold` (Ouro, 3.2), at the last one otherwise.

    0 leaves after loop 1; 1 or more runs all loops, also where the cdf rounds to 1. UserError unless in [0, inf).
    """

    threshold: int | float

    def __post_init__(self) -> None:
        number = isinstance(self.threshold, Real) and not isinstance(self.threshold, bool)
        if not number or not 0 <= self.threshold < math.inf:
            raise UserError(
                f"The exit threshold is {self.threshold!r}; it must be a number from 0 (leave after the first loop) "
                "to 1 (run all loops)."
            )
        object.__setattr__(self, "threshold", float(self.threshold))

    def max_loops(self, trained_loops: int) -> int:
        """The trained depth: the gate has learned nothing about deeper loops."""
        return trained_loops

    def exits(self, loop: int, cdf: float | Tensor, trained_loops: int) -> bool | Tensor:
        """True where the cdf reaches the threshold, and at the last loop."""
        return loop >= trained_loops or (self.threshold < 1 and cdf >= self.threshold)


def exit_loops(
    policy: ExitPolicy, gate_logits: Float[Tensor, "R *batch"], trained_loops: int
) -> Int[Tensor, "*batch"]:
    """The loop, from 1, at which each token leaves, given its gate logits at every loop it may reach.

    The first dimension holds at least `policy.max_loops(trained_loops)` loops; what lies beyond is not read.
    """
    cdf = exit_cdf(gate_logits).double()
    never = torch.zeros_like(cdf[0], dtype=torch.bool)
    leaves = [never | policy.exits(loop, cdf[loop - 1], trained_loops) for loop in range(1, cdf.shape[0] + 1)]
    # argmax of 0 and 1 is the first 1.
    return torch.stack(leaves).byte().argmax(0) + 1
