"""One way to run a model: when tokens leave, by whose gate, what the cache keeps, how long answers may be."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from looplm.inference import ExitPolicy, FixedDepth, QuantileExit
from looplm.inference.exit_policy import ConfidenceExit, Deadline, HiddenDiffExit
from looplm.model.flops import CacheStrategy

FIXED, GATE, STAGE_ONE = "loops", "threshold", "stage-one threshold"
"""Names of rules that tables single out."""


@dataclass(frozen=True)
class Setting:
    """How deep tokens go, and what generation keeps in its cache and how far it may go."""

    exit: ExitPolicy
    kv_cache: CacheStrategy = "per_loop"
    stage_one: bool = False
    """Whether the gate is that of the checkpoint before Stage II (`LoopLMAdapter.stage_one`)."""
    max_gen_toks: int | None = None
    """Longest answer, in tokens; the task's own limit when None."""

    @property
    def rule(self) -> str:
        """Name of the exit rule, without its number."""
        name, _ = rule_of(self.exit)
        return f"stage-one {name}" if self.stage_one else name

    @property
    def name(self) -> str:
        """For tables and files."""
        rest = [] if self.kv_cache == "per_loop" else [self.kv_cache]
        rest += [] if self.max_gen_toks is None else [f"{self.max_gen_toks} tokens"]
        return ", ".join((f"{self.rule} {rule_of(self.exit)[1]:g}", *rest))

    def axes(self) -> dict[str, Any]:
        """What tables sort by, as JSON has it."""
        return {
            "rule": self.rule,
            "level": rule_of(self.exit)[1],
            "kv_cache": self.kv_cache,
            "max_gen_toks": self.max_gen_toks,
        }


def rule_of(exit: ExitPolicy) -> tuple[str, float]:
    """The rule that a policy follows, and its number."""
    if isinstance(exit, FixedDepth):
        return FIXED, exit.num_loops
    if isinstance(exit, QuantileExit):
        return GATE, exit.threshold
    if isinstance(exit, HiddenDiffExit):
        return "hidden-diff", exit.eps
    if isinstance(exit, ConfidenceExit):
        return ("kl", exit.kl) if exit.kl is not None else ("stable", exit.stable_loops or 1)
    assert isinstance(exit, Deadline)
    return "deadline", exit.milliseconds


def all_settings(
    exits: Sequence[ExitPolicy],
    strategies: Sequence[CacheStrategy] = ("per_loop",),
    lengths: Sequence[int | None] = (None,),
    *,
    stage_one: bool = False,
) -> list[Setting]:
    """Every policy with every cache strategy and length; thresholds a second time with the gate of Stage I."""
    found = []
    for length, strategy, exit in product(lengths, strategies, exits):
        found.append(Setting(exit, strategy, False, length))
        if stage_one and isinstance(exit, QuantileExit):
            found.append(Setting(exit, strategy, True, length))
    return found


def policy_of(rule: str, level: float) -> ExitPolicy:
    """The policy that :func:`rule_of` names so."""
    if rule == FIXED:
        return FixedDepth(int(level))
    if rule == GATE:
        return QuantileExit(level)
    if rule == "hidden-diff":
        return HiddenDiffExit(level)
    return ConfidenceExit(kl=level) if rule == "kl" else ConfidenceExit(stable_loops=int(level))
