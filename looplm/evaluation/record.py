"""One pass over held-out text that keeps, for every predicted token, what each loop would have done."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from looplm.data.packing import IGNORE_INDEX
from looplm.errors import UserError
from looplm.model.looped import LoopedTransformer

_LOGITS_PER_CHUNK = 2**24  # 64 MB in float32


class LoopLM(Protocol):
    """What a model needs to be recorded: the looped transformer and its LM head."""

    @property
    def model(self) -> LoopedTransformer: ...

    @property
    def lm_head(self) -> nn.Linear: ...


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
) -> DepthRecord:
    """Runs `model` once over `batches` and reads the LM head at every loop.

    Args:
        model: is run as it stands, in its own dtype and on its own device; wrap the call in `torch.autocast` for bf16.
        batches: as :meth:`looplm.data.evaluation_windows.EvaluationWindows.batches` yields them: `input_ids`,
            `labels` (unshifted, IGNORE_INDEX where nothing is predicted) and `attention_mask`, each (B, S), and
            `document_index` (B,).
        document_bytes: bytes of each document that `document_index` points to.
        num_loops: depth of the pass, the trained depth when None; it may be larger.

    The record is on the CPU; cross entropies and gate logits are float32 (float64 for a float64 model). Logits exist
    only for a chunk of tokens at one loop, so memory does not grow with the vocabulary times the loops. Raises
    UserError when the batches hold nothing to predict.
    """
    device = model.model.embed_tokens.weight.device
    parts: list[dict[str, Tensor]] = []
    num_sequences = 0
    for batch in batches:
        parts.append(_record_batch(model, {name: value.to(device) for name, value in batch.items()}, num_loops))
        parts[-1]["sequence_ids"] += num_sequences
        num_sequences += batch["input_ids"].shape[0]
    if sum(part["targets"].shape[0] for part in parts) == 0:
        raise UserError("The held-out batches hold no token to predict. Check the held-out documents.")
    per_token = [field.name for field in fields(DepthRecord) if field.name in parts[0]]
    joined = {name: torch.cat([part[name] for part in parts], dim=-1) for name in per_token}
    return DepthRecord(**joined, document_bytes=document_bytes.cpu(), trained_loops=model.model.config.num_loops)


def _record_batch(model: LoopLM, batch: Mapping[str, Tensor], num_loops: int | None) -> dict[str, Tensor]:
    """The fields of DepthRecord that one batch gives, with sequences counted from 0."""
    labels, attention_mask = batch["labels"][:, 1:], batch["attention_mask"]
    # Without padding plain causal attention does, and takes the fast kernel.
    output = model.model(batch["input_ids"], None if attention_mask.all() else attention_mask, num_loops=num_loops)
    predicted = labels != IGNORE_INDEX  # (B, S - 1): the position that predicts, not the one predicted
    targets, rows = labels[predicted], predicted.nonzero()[:, 0]  # (n,)
    read = [read_head(model.lm_head, hidden[:, :-1][predicted], targets) for hidden in output.loop_hidden_states]
    gate_logits = output.gate_logits[:, :, :-1][:, predicted]  # (R, n)
    part = {
        "cross_entropy": torch.stack([cross_entropy for cross_entropy, _ in read]),
        "predictions": torch.stack([predictions for _, predictions in read]),
        "gate_logits": gate_logits.to(torch.promote_types(gate_logits.dtype, torch.float32)),
        "targets": targets,
        "document_ids": batch["document_index"][rows],
        "sequence_ids": rows,
    }
    return {name: value.cpu() for name, value in part.items()}


def read_head(
    lm_head: nn.Linear, hidden: Float[Tensor, "n D"], targets: Int[Tensor, " n"]
) -> tuple[Float[Tensor, " n"], Int[Tensor, " n"]]:
    """Cross entropy in nats and most probable token of each row, a chunk of rows at a time."""
    cross_entropy, predictions = [], []
    rows_per_chunk = max(1, _LOGITS_PER_CHUNK // lm_head.out_features)
    for states, wanted in zip(hidden.split(rows_per_chunk), targets.split(rows_per_chunk), strict=True):
        logits = lm_head(states)  # (chunk, V)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        cross_entropy.append(logits.logsumexp(-1) - logits.gather(-1, wanted[:, None])[:, 0])
        predictions.append(logits.argmax(-1))
    return torch.cat(cross_entropy), torch.cat(predictions)
