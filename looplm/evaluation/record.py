"""One pass over held-out text that keeps, for every predicted token, what each loop would have done."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from looplm.data.packing import IGNORE_INDEX
from looplm.errors import UserError
from looplm.model.language_model import LoopLM

_LOGITS_PER_CHUNK = 2**24  # 64 MB in float32


@dataclass(kw_only=True, frozen=True)
class DepthRecord:
    """Every held-out prediction at every depth. Tokens of one sequence are contiguous and in order."""

    cross_entropy: Float[Tensor, "R N"]
    """Nats of the right token, at each loop."""
    predictions: Int[Tensor, "R N"]
    """The most probable token, at each loop."""
    gate_logits: Float[Tensor, "R N"]
    targets: Int[Tensor, " N"]
    document_ids: Int[Tensor, " N"]
    """Row of `document_bytes` that each token belongs to."""
    sequence_ids: Int[Tensor, " N"]
    """Window of the pass: tokens of one window attend to each other, those of different windows do not."""
    document_bytes: Int[Tensor, " M"]
    """UTF-8 bytes of each document; every byte belongs to exactly one predicted token."""
    trained_loops: int
    """R the model was trained with. The record may go beyond it, or stop short of it."""
    hidden_change: Float[Tensor, "R-1 N"] | None = None
    """||h_r - h_{r-1}||_2 of what the LM head reads at loop r, r = 2..R: absolute, not relative (Ouro, 5.4.1)."""
    prediction_kl: Float[Tensor, "R-1 N"] | None = None
    """KL(p_{r-1} || p_r) = sum_v p_{r-1} (log p_{r-1} - log p_r) in nats, r = 2..R, p_r the next-token distribution
    of loop r: the distribution one has weighs the one that is new (Huginn, arXiv 2502.05171)."""

    @property
    def num_loops(self) -> int:
        """Loops recorded."""
        return self.cross_entropy.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.cross_entropy.shape[1]

    @property
    def num_documents(self) -> int:
        return self.document_bytes.shape[0]

    def gated_loops(self, num_loops: int | None = None) -> int:
        """Loops among which the gate decides: `num_loops`, or the trained depth as far as it was recorded.

        Raises UserError when more are asked for than were recorded.
        """
        loops = min(self.trained_loops, self.num_loops) if num_loops is None else num_loops
        if not 1 <= loops <= self.num_loops:
            raise UserError(f"{loops} loops were asked for, but the record holds loops 1 to {self.num_loops}.")
        return loops


@torch.inference_mode()
def record(
    model: LoopLM,
    batches: Iterable[Mapping[str, Tensor]],
    document_bytes: Int[Tensor, " M"],
    num_loops: int | None = None,
    *,
    changes: bool = False,
) -> DepthRecord:
    """Runs `model` once over `batches` and reads the LM head at every loop.

    Args:
        model: is run as it stands, in its own dtype and on its own device; wrap the call in `torch.autocast` for bf16.
        batches: as :meth:`looplm.data.evaluation_windows.EvaluationWindows.batches` yields them: `input_ids`,
            `labels` (unshifted, IGNORE_INDEX where nothing is predicted) and `attention_mask`, each (B, S), and
            `document_index` (B,).
        document_bytes: bytes of each document that `document_index` points to.
        num_loops: depth of the pass, the trained depth when None; it may be larger.
        changes: also keep `hidden_change` and `prediction_kl`, which exits by hidden difference and by confidence
            decide on (:mod:`looplm.evaluation.exit_rules`); reading the head then takes up to half as long again.

    The record is on the CPU; all but the integers is float32 (float64 for a float64 model). Logits exist only for a
    chunk of tokens at one loop (two with `changes`), so memory does not grow with the vocabulary times the loops.
    Raises UserError when the batches hold nothing to predict.
    """
    device = model.model.embed_tokens.weight.device
    parts: list[dict[str, Tensor]] = []
    num_sequences = 0
    for batch in batches:
        batch = {name: value.to(device) for name, value in batch.items()}
        parts.append(_record_batch(model, batch, num_loops, changes))
        parts[-1]["sequence_ids"] += num_sequences
        num_sequences += batch["input_ids"].shape[0]
    if sum(part["targets"].shape[0] for part in parts) == 0:
        raise UserError("The held-out batches hold no token to predict. Check the held-out documents.")
    per_token = [field.name for field in fields(DepthRecord) if field.name in parts[0]]
    joined = {name: torch.cat([part[name] for part in parts], dim=-1) for name in per_token}
    return DepthRecord(**joined, document_bytes=document_bytes.cpu(), trained_loops=model.model.config.num_loops)


def _record_batch(
    model: LoopLM, batch: Mapping[str, Tensor], num_loops: int | None, changes: bool
) -> dict[str, Tensor]:
    """The fields of DepthRecord that one batch gives, with sequences counted from 0."""
    labels, attention_mask = batch["labels"][:, 1:], batch["attention_mask"]
    # Without padding plain causal attention does, and takes the fast kernel.
    output = model.model(batch["input_ids"], None if attention_mask.all() else attention_mask, num_loops=num_loops)
    predicted = labels != IGNORE_INDEX  # (B, S - 1): the position that predicts, not the one predicted
    targets, rows = labels[predicted], predicted.nonzero()[:, 0]  # (n,)
    hidden = [state[:, :-1][predicted] for state in output.loop_hidden_states]  # R times (n, D)
    gate_logits = output.gate_logits[:, :, :-1][:, predicted]  # (R, n)
    part = {
        **read_head(model.lm_head, hidden, targets, changes),
        "gate_logits": _widen(gate_logits),
        "targets": targets,
        "document_ids": batch["document_index"][rows],
        "sequence_ids": rows,
    }
    if changes:
        change = [(_widen(now) - _widen(before)).norm(dim=-1) for before, now in pairwise(hidden)]
        part["hidden_change"] = torch.stack(change) if change else part["cross_entropy"][1:]
    return {name: value.cpu() for name, value in part.items()}


def _widen(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def read_head(
    lm_head: nn.Linear, hidden: Sequence[Float[Tensor, "n D"]], targets: Int[Tensor, " n"], changes: bool = False
) -> dict[str, Tensor]:
    """`cross_entropy` and `predictions` of every loop, (R, n), and `prediction_kl`, (R - 1, n), with `changes`.

    A chunk of rows at a time, all loops of a chunk in turn: each needs the distribution of the loop before alone.
    """
    rows_per_chunk = max(1, _LOGITS_PER_CHUNK // lm_head.out_features)
    parts: dict[str, list[Tensor]] = {"cross_entropy": [], "predictions": []}
    if changes:
        parts["prediction_kl"] = []
    for first in range(0, max(1, len(targets)), rows_per_chunk):
        rows = slice(first, first + rows_per_chunk)
        found = _read_chunk(lm_head, [state[rows] for state in hidden], targets[rows], changes)
        for name, part in parts.items():
            part.append(found[name])
    return {name: torch.cat(part, dim=-1) for name, part in parts.items()}


def _read_chunk(lm_head: nn.Linear, hidden: Sequence[Tensor], targets: Tensor, changes: bool) -> dict[str, Tensor]:
    cross_entropy, predictions, divergence = [], [], []
    before: Tensor | None = None
    for states in hidden:
        logits = _widen(lm_head(states))  # (n, V)
        log_z = logits.logsumexp(-1, keepdim=True)
        cross_entropy.append((log_z - logits.gather(-1, targets[:, None]))[:, 0])
        predictions.append(logits.argmax(-1))
        if changes:
            now = logits.sub_(log_z)
            if before is not None:
                # before - now first: `before` may then be overwritten by its own exponential.
                divergence.append(((before - now).mul_(before.exp_())).sum(-1))
            before = now
    found = {"cross_entropy": torch.stack(cross_entropy), "predictions": torch.stack(predictions)}
    if changes:
        found["prediction_kl"] = torch.stack(divergence) if divergence else found["cross_entropy"][1:]
    return found
