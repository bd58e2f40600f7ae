"""Quality at each fixed depth, within the trained depth and beyond it, and what one more loop changes."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looplm.errors import UserError
from looplm.evaluation.bootstrap import (
    NUM_RESAMPLES,
    Interval,
    document_sums,
    percentile_interval,
    resample_weights,
    standard_error,
)
from looplm.evaluation.record import DepthRecord


@dataclass(kw_only=True, frozen=True)
class DepthPoint:
    """All tokens read out after the same loop. Standard errors are over documents."""

    num_loops: int
    bits_per_byte: float
    bits_per_byte_stderr: float
    """Mostly how documents differ from each other; for how depths differ see the next field."""
    change_from_first_bits_per_byte: Interval
    """Less those at loop 1 on the same documents: below 0 where depth pays."""
    loss_nats: float
    """Mean cross entropy of a token."""
    accuracy: float
    """Share of tokens whose most probable prediction is right."""
    agreement: float
    """Share of tokens predicted as at the reference depth of the sweep."""
    loss_change_nats: float | None
    """Mean cross entropy of the next loop less that of this one: below 0 where one more loop helps."""
    loss_change_nats_stderr: float | None
    worsened_share: float | None
    """Share of tokens whose cross entropy the next loop raises."""


@dataclass(kw_only=True, frozen=True)
class DepthSweep:
    """Every recorded depth. Whether more loops are never worse on average is measured here, not assumed (the anytime
    claim of Ouro, section 7: E[L_{r+1}] <= E[L_r])."""

    points: tuple[DepthPoint, ...]
    trained_loops: int
    reference_loops: int
    """Depth that `agreement` compares with: the trained one, as far as it was recorded."""
    num_tokens: int
    num_documents: int
    num_bytes: int

    @property
    def best(self) -> DepthPoint:
        """The depth of the fewest bits per byte, the shallowest of equals."""
        return min(self.points, key=lambda point: point.bits_per_byte)

    @property
    def gain_share(self) -> float:
        """Share of loop 1's bits per byte that the best depth saves."""
        return 1 - self.best.bits_per_byte / self.points[0].bits_per_byte


def depth_sweep(record: DepthRecord, *, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> DepthSweep:
    """Measures every depth of `record`. Raises UserError below two documents."""
    change = record.cross_entropy.diff(dim=0)  # (R - 1, N)
    reference = record.gated_loops()
    weights = resample_weights(record.num_documents, num_resamples, seed)
    bpb, resampled_bpb = bits_per_byte(record, record.cross_entropy, weights)
    change_sums = document_sums(change, record.document_ids, record.num_documents)  # (R - 1, M)
    tokens = document_sums(torch.ones(record.num_tokens), record.document_ids, record.num_documents)
    change_stderr = standard_error((weights @ change_sums.T) / (weights @ tokens)[:, None]).tolist()
    bpb_stderr = standard_error(resampled_bpb).tolist()
    from_first = [
        percentile_interval((bpb[i] - bpb[0]).item(), resampled_bpb[:, i] - resampled_bpb[:, 0])
        for i in range(record.num_loops)
    ]
    mean_change = change.double().mean(1).tolist()
    worsened = (change > 0).double().mean(1).tolist()
    loss = record.cross_entropy.double().mean(1).tolist()
    accuracy = (record.predictions == record.targets).double().mean(1).tolist()
    agreement = (record.predictions == record.predictions[reference - 1]).double().mean(1).tolist()
    points = tuple(
        DepthPoint(
            num_loops=i + 1,
            bits_per_byte=bpb[i].item(),
            bits_per_byte_stderr=bpb_stderr[i],
            change_from_first_bits_per_byte=from_first[i],
            loss_nats=loss[i],
            accuracy=accuracy[i],
            agreement=agreement[i],
            loss_change_nats=mean_change[i] if i + 1 < record.num_loops else None,
            loss_change_nats_stderr=change_stderr[i] if i + 1 < record.num_loops else None,
            worsened_share=worsened[i] if i + 1 < record.num_loops else None,
        )
        for i in range(record.num_loops)
    )
    return DepthSweep(
        points=points,
        trained_loops=record.trained_loops,
        reference_loops=reference,
        num_tokens=record.num_tokens,
        num_documents=record.num_documents,
        num_bytes=int(record.document_bytes.sum()),
    )


def bits_per_byte(
    record: DepthRecord, cross_entropy: Float[Tensor, "*rows N"], weights: Float[Tensor, "W M"]
) -> tuple[Float[Tensor, "*rows"], Float[Tensor, "W *rows"]]:
    """Bits per byte of one cross entropy per token, for each row, and the same in every resample of the documents.

    Nats of all tokens / ln 2 / bytes of all documents: a ratio of sums, which no tokenizer can flatter.
    """
    bits = document_sums(cross_entropy, record.document_ids, record.num_documents) / math.log(2)  # (*rows, M)
    size = record.document_bytes.double()
    resampled = torch.einsum("wm,...m->w...", weights, bits)
    total = (weights @ size).reshape(-1, *[1] * (bits.dim() - 1))
    return bits.sum(-1) / size.sum(), resampled / total


def mean_depth(
    record: DepthRecord, loops: Int[Tensor, "*rows N"], weights: Float[Tensor, "W M"]
) -> Float[Tensor, "W *rows"]:
    """Mean of one exit loop per token, for each row, in every resample of the documents."""
    sums = document_sums(loops, record.document_ids, record.num_documents)  # (*rows, M)
    tokens = document_sums(torch.ones(record.num_tokens), record.document_ids, record.num_documents)  # (M,)
    total = (weights @ tokens).reshape(-1, *[1] * (sums.dim() - 1))
    return torch.einsum("wm,...m->w...", weights, sums) / total


def twin_difference(
    record: DepthRecord,
    num_loops: int,
    twin: DepthRecord,
    twin_loops: int = 1,
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Bits per byte of `record` at `num_loops` less those of `twin` at `twin_loops`: below 0, the looped model wins.

    Both are resampled by the same draws of documents, so what makes a document hard for both cancels. Raises
    UserError when the two were not recorded on the same documents.
    """
    if not torch.equal(record.document_bytes, twin.document_bytes):
        raise UserError("The two models were recorded on different held-out documents and cannot be compared.")
    weights = resample_weights(record.num_documents, num_resamples, seed)
    ours, resampled = bits_per_byte(record, record.cross_entropy[num_loops - 1], weights)
    theirs, resampled_twin = bits_per_byte(twin, twin.cross_entropy[twin_loops - 1], weights)
    return percentile_interval((ours - theirs).item(), resampled - resampled_twin)
