"""What every loop says of a continuation, kept from one forward, and every exit rule applied to it afterwards."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looplm.errors import UserError
from looplm.evaluation.exit_rules import ExitRule, confidence_exit, gate_exit, hidden_change_exit
from looplm.evaluation.record import DepthRecord
from looplm.inference import ConfidenceExit, ExitPolicy, QuantileExit
from looplm.inference.exit_policy import HiddenDiffExit, Signals
from looplm.model.gate import exit_cdf

Key = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a context and of its continuation."""


@dataclass(frozen=True)
class Continuation:
    """The n tokens of one continuation at every recorded loop."""

    logprobs: Float[Tensor, "R n"]
    predictions: Int[Tensor, "R n"]
    """The likeliest token."""
    targets: Int[Tensor, " n"]
    gate_logits: Float[Tensor, "R n"]
    """At the positions that predict them, as the rest."""
    hidden_change: Float[Tensor, "R-1 n"] | None
    """||h_r - h_{r-1}||_2, r = 2..R; None unless a rule asked for changes."""
    prediction_kl: Float[Tensor, "R-1 n"] | None
    """KL(p_{r-1} || p_r) in nats, likewise."""

    def at(self, exit: ExitPolicy, trained_loops: int) -> tuple[float, bool, Int[Tensor, " n"]]:
        """Its log-likelihood, whether greedy decoding would write it, and the loop of each token, under a policy.

        Raises UserError for a policy that looks at the clock.
        """
        loops = self.exit_loops(exit, trained_loops)
        index = loops[None] - 1
        chosen = self.logprobs.double().gather(0, index).sum().item()
        return chosen, bool((self.predictions.gather(0, index)[0] == self.targets).all()), loops

    def exit_loops(self, exit: ExitPolicy, trained_loops: int) -> Int[Tensor, " n"]:
        """The loop, from 1, at which each token leaves: what `inference.exit_policy.exit_loops` finds from states."""
        if exit.needs == "clock":
            raise UserError(f"{exit!r} is not available for log-likelihoods, which take no time a token.")
        changes, divergence = self.hidden_change, self.prediction_kl
        if exit.needs in ("state", "logits") and (changes is None or divergence is None):
            raise ValueError(f"{exit!r} needs what changes from loop to loop, which was not recorded.")
        depth = exit.max_loops(trained_loops)
        cdf = exit_cdf(self.gate_logits[:depth]).double()
        gone = torch.zeros_like(self.targets, dtype=torch.bool)
        stable, loops = torch.zeros_like(self.targets), torch.full_like(self.targets, depth)
        for loop in range(1, depth):
            signals = Signals(loop, cdf[loop - 1])
            if loop > 1:
                stable = torch.where(self.predictions[loop - 1] == self.predictions[loop - 2], stable + 1, 0)
                signals = signals._replace(stable=stable)
                if changes is not None and divergence is not None:
                    signals = signals._replace(change=changes[loop - 2], divergence=divergence[loop - 2])
            leaves = ~gone & torch.as_tensor(exit.exits(signals, trained_loops))
            loops[leaves] = loop
            gone |= leaves
        return loops


def joined(kept: Iterable[Continuation], trained_loops: int) -> DepthRecord:
    """All tokens as one record, a document each continuation. Raises UserError when there is none."""
    parts = list(kept)
    if not parts:
        raise UserError("Nothing was scored yet, so that no thresholds can be chosen.")
    lengths = torch.tensor([len(part.targets) for part in parts])
    documents = torch.arange(len(parts)).repeat_interleave(lengths)
    changes = [part.hidden_change for part in parts if part.hidden_change is not None]
    divergence = [part.prediction_kl for part in parts if part.prediction_kl is not None]
    return DepthRecord(
        cross_entropy=-torch.cat([part.logprobs for part in parts], dim=1),
        predictions=torch.cat([part.predictions for part in parts], dim=1),
        gate_logits=torch.cat([part.gate_logits for part in parts], dim=1),
        targets=torch.cat([part.targets for part in parts]),
        document_ids=documents,
        sequence_ids=documents,
        document_bytes=torch.ones(len(parts), dtype=torch.long),
        trained_loops=trained_loops,
        hidden_change=torch.cat(changes, dim=1) if len(changes) == len(parts) else None,
        prediction_kl=torch.cat(divergence, dim=1) if len(divergence) == len(parts) else None,
    )


def spread_exits(record: DepthRecord, rule: str, count: int) -> list[ExitPolicy]:
    """`count` levels of a rule that spread the mean depth of the recorded tokens evenly, its two ends left out; to six
    digits, so that a table's can be asked for again.

    rule: gate, hidden-diff or kl. Fewer where the rule treats tokens alike; none where there is nothing to decide
    (one loop, or two for rules that compare loops).
    """
    rules: Mapping[str, Callable[[DepthRecord], ExitRule]] = {
        "gate": gate_exit, "hidden-diff": hidden_change_exit, "kl": confidence_exit,
    }  # fmt: skip
    loops = record.gated_loops()
    # Rules that compare loops say nothing of the first, whose share of the quantiles is lost.
    tried = count if rule == "gate" else round(count * (loops - 1) / max(1, loops - 2))
    found = [one for one in rules[rule](record).covering_thresholds(tried + 2) if abs(one) != float("inf")]
    levels = [float(f"{one:.6g}") for one in found[-count:]]
    if rule == "gate":
        return [QuantileExit(one) for one in levels]
    return [HiddenDiffExit(-one) if rule == "hidden-diff" else ConfidenceExit(kl=-one) for one in levels]
