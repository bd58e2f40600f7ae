"""When a token leaves the loop: the policies, and the one decision that engine and oracle share.

Depth counts loops from 1 here, as everywhere a user sees it.
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from looplm.errors import UserError
from looplm.model.gate import exit_cdf

Need = Literal["nothing", "gate", "state", "logits", "clock"]
"""What a policy looks at. "logits" costs one more read of the LM head at every loop a token passes."""


class Signals(NamedTuple):
    """What is known of a token, or elementwise of many, that has passed `loop` loops. A policy reads what it needs."""

    loop: int
    cdf: float | Tensor = math.nan
    """Its exit cdf at this loop, from `looplm.model.gate.exit_cdf`, widened to float64."""
    change: float | Tensor = math.inf
    """||h_r - h_{r-1}||_2 of the hidden state that head and gate read; infinite after loop 1."""
    divergence: float | Tensor = math.inf
    """KL(p_{r-1} || p_r) in nats between the next-token distributions of two loops; infinite after loop 1."""
    stable: int | Tensor = 0
    """Loops in a row, up to this one, whose likeliest token is that of the loop before."""
    elapsed_ms: float = 0.0
    """Since the token began its first loop."""
    pass_ms: float = 0.0
    """What the latest pass took; the next one is expected to take as long."""


@runtime_checkable
class ExitPolicy(Protocol):
    """Decides, loop by loop, whether a token is read out or goes on."""

    needs: ClassVar[Need]

    def max_loops(self, trained_loops: int) -> int:
        """The deepest loop a token may reach, which always reads out. Prompts are computed that far."""
        ...

    def exits(self, signals: Signals, trained_loops: int) -> bool | Tensor:
        """Whether a token leaves now. Elementwise where the signals are tensors."""
        ...


@dataclass(frozen=True)
class FixedDepth:
    """Every token leaves after `num_loops` loops, which may exceed the trained depth. UserError below 1."""

    needs: ClassVar[Need] = "nothing"
    num_loops: int

    def __post_init__(self) -> None:
        if not isinstance(self.num_loops, int) or isinstance(self.num_loops, bool) or self.num_loops < 1:
            raise UserError(
                f"num_loops is {self.num_loops!r}; depth counts loops from 1 (it may exceed the trained one)."
            )

    def max_loops(self, trained_loops: int) -> int:
        """`num_loops`, whatever was trained."""
        return self.num_loops

    def exits(self, signals: Signals, trained_loops: int) -> bool | Tensor:
        """True from loop `num_loops` on."""
        return signals.loop >= self.num_loops


@dataclass(frozen=True)
class QuantileExit:
    """A token leaves at the first loop whose exit cdf reaches `threshold` (Ouro, 3.2), at the last one otherwise.

    0 leaves after loop 1; 1 or more runs all loops, also where the cdf rounds to 1. UserError unless in [0, inf).
    """

    needs: ClassVar[Need] = "gate"
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

    def exits(self, signals: Signals, trained_loops: int) -> bool | Tensor:
        """True where the cdf reaches the threshold, and at the last loop."""
        return signals.loop >= trained_loops or (self.threshold < 1 and signals.cdf >= self.threshold)


@dataclass(frozen=True)
class HiddenDiffExit:
    """A token leaves once its hidden state has moved by no more than `eps` in a loop (Ouro, 5.4.1), from loop 2 on.

    The change is ||h_r - h_{r-1}||_2, not divided by anything: `eps` depends on the width of the model. All trained
    loops at most. UserError unless `eps` is a number in [0, inf).
    """

    needs: ClassVar[Need] = "state"
    eps: int | float

    def __post_init__(self) -> None:
        object.__setattr__(self, "eps", not_negative("eps of HiddenDiffExit", self.eps))

    def max_loops(self, trained_loops: int) -> int:
        """The trained depth."""
        return trained_loops

    def exits(self, signals: Signals, trained_loops: int) -> bool | Tensor:
        """True where the change has fallen to `eps`, and at the last loop."""
        return signals.loop >= trained_loops or signals.change <= self.eps


@dataclass(frozen=True)
class ConfidenceExit:
    """A token leaves once its next-token distribution has settled; give one of the two.

    kl: KL(p_{r-1} || p_r), in nats, has fallen to this (Huginn, arXiv 2502.05171, section 6: 5e-4).
    stable_loops: the likeliest token has been that of the loop before for so many loops in a row.

    It reads the LM head at every loop, which the counts of the engine say. All trained loops at most. UserError
    unless exactly one is given, `kl` a number in [0, inf), `stable_loops` a whole number from 1.
    """

    needs: ClassVar[Need] = "logits"
    kl: int | float | None = None
    stable_loops: int | None = None

    def __post_init__(self) -> None:
        if (self.kl is None) == (self.stable_loops is None):
            raise UserError("ConfidenceExit takes either kl or stable_loops; give exactly one of them.")
        if self.kl is not None:
            object.__setattr__(self, "kl", not_negative("kl of ConfidenceExit", self.kl))
        loops = self.stable_loops
        if loops is not None and (not isinstance(loops, int) or isinstance(loops, bool) or loops < 1):
            raise UserError(f"stable_loops of ConfidenceExit is {loops!r}; it must be a whole number from 1.")

    def max_loops(self, trained_loops: int) -> int:
        """The trained depth."""
        return trained_loops

    def exits(self, signals: Signals, trained_loops: int) -> bool | Tensor:
        """True where the distribution has settled, and at the last loop."""
        if signals.loop >= trained_loops:
            return True
        if self.stable_loops is not None:
            return signals.stable >= self.stable_loops
        return self.kl is not None and signals.divergence <= self.kl


@dataclass(frozen=True)
class Deadline:
    """Anytime generation: a token leaves after the last loop that one more could not follow within `milliseconds`.

    Counted from the start of the token's first loop; the next pass is expected to take as long as the latest. One
    loop is always run, all trained loops at most. Prompts run all loops. What comes out depends on the speed of the
    machine and on the rest of the batch. UserError unless `milliseconds` is a number in [0, inf).
    """

    needs: ClassVar[Need] = "clock"
    milliseconds: int | float

    def __post_init__(self) -> None:
        object.__setattr__(self, "milliseconds", not_negative("milliseconds of Deadline", self.milliseconds))

    def max_loops(self, trained_loops: int) -> int:
        """The trained depth."""
        return trained_loops

    def exits(self, signals: Signals, trained_loops: int) -> bool | Tensor:
        """True where another pass would end too late, and at the last loop."""
        return signals.loop >= trained_loops or signals.elapsed_ms + signals.pass_ms > self.milliseconds


def not_negative(name: str, value: object) -> float:
    """`value` as a float. Raises UserError unless it is a number in [0, inf)."""
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise UserError(f"{name} is {value!r}; it must be a number from 0.")
    return float(value)


def decides_per_position(policy: ExitPolicy) -> bool:
    """Whether each position of a prompt has a depth of its own under `policy`.

    The others decide on what exists only while a token is generated: distributions, time. Their prompts are read
    out at the last loop, ConfidenceExit at the prompt's end excepted.
    """
    return policy.needs not in ("logits", "clock")


def exit_loops(
    policy: ExitPolicy,
    gate_logits: Float[Tensor, "R *batch"],
    trained_loops: int,
    *,
    hidden: Float[Tensor, "R *batch D"] | None = None,
    logits: Float[Tensor, "R *batch V"] | None = None,
) -> Int[Tensor, "*batch"]:
    """The loop, from 1, at which each token leaves, given what it is at every loop it may reach.

    The first dimension holds at least `policy.max_loops(trained_loops)` loops; what lies beyond is not read.
    `hidden` is needed by HiddenDiffExit and `logits` by ConfidenceExit: ValueError without.
    """
    if (policy.needs == "state" and hidden is None) or (policy.needs == "logits" and logits is None):
        raise ValueError(f"{policy!r} needs {'hidden' if policy.needs == 'state' else 'logits'} of every loop.")
    cdf = exit_cdf(gate_logits).double()
    changes = None if hidden is None or policy.needs != "state" else hidden_changes(hidden)
    never = torch.zeros_like(cdf[0], dtype=torch.bool)
    stable = torch.zeros_like(never, dtype=torch.long)
    leaves: list[Tensor] = []
    for loop in range(1, cdf.shape[0] + 1):
        signals = Signals(loop, cdf[loop - 1])
        if loop > 1 and changes is not None:
            signals = signals._replace(change=changes[loop - 2])
        if loop > 1 and logits is not None and policy.needs == "logits":
            divergence, same = compare_logits(logits[loop - 2], logits[loop - 1])
            stable = torch.where(same, stable + 1, 0)
            signals = signals._replace(divergence=divergence, stable=stable)
        leaves.append(never | policy.exits(signals, trained_loops))
    # argmax of 0 and 1 is the first 1.
    return torch.stack(leaves).byte().argmax(0) + 1


def hidden_changes(hidden: Float[Tensor, "R *batch D"]) -> Float[Tensor, "changes *batch"]:
    """||h_r - h_{r-1}||_2 for r from 2 to R, in float32 or wider."""
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    return (wide[1:] - wide[:-1]).norm(dim=-1)


def compare_logits(
    before: Float[Tensor, "*batch V"], now: Float[Tensor, "*batch V"]
) -> tuple[Float[Tensor, "*batch"], Bool[Tensor, "*batch"]]:
    """KL(p_before || p_now) in nats, in float32 or wider, and whether the likeliest token is the same."""
    wide = torch.promote_types(now.dtype, torch.float32)
    log_before, log_now = before.to(wide).log_softmax(-1), now.to(wide).log_softmax(-1)
    return (log_before.exp() * (log_before - log_now)).sum(-1), before.argmax(-1) == now.argmax(-1)


EXITS = "hidden-diff:EPS, kl:NATS, stable:LOOPS or deadline:MILLISECONDS"


def parse_exit(text: str, option: str) -> ExitPolicy:
    """An exit policy from NAME:NUMBER, as `option` gives it. Raises UserError for another form, name or number."""
    name, _, value = text.partition(":")
    try:
        number = int(value) if name == "stable" else float(value)
    except ValueError:
        raise UserError(f"{option} is {text!r}; give {EXITS}.") from None
    if not int(name == "stable") <= number < math.inf:
        raise UserError(f"{option} is {text!r}; its number must be finite, from {int(name == 'stable')}.")
    if name == "hidden-diff":
        return HiddenDiffExit(number)
    if name == "kl":
        return ConfidenceExit(kl=number)
    if name == "stable":
        return ConfidenceExit(stable_loops=int(number))
    if name == "deadline":
        return Deadline(number)
    raise UserError(f"{option} is {text!r}; give {EXITS}.")
