"""Who may attend to whom: causal, padded and document-packed masks, and the positions that go with them."""

import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor


def causal_mask(
    query_index: Int[Tensor, "#B S"],
    num_keys: int,
    key_mask: Integer[Tensor, "B M"] | Bool[Tensor, "B M"] | None = None,
    document_ids: Int[Tensor, "B S"] | None = None,
) -> Bool[Tensor, "#B 1 S M"]:
    """True where the query at `query_index` may read key j: j <= its index, j is no padding, same document.

    `query_index` counts slots of the key tensor, not rotary positions. A query always sees itself, so a
    padding row attends to one finite key instead of producing NaN. `document_ids` needs M = S.
    """
    keys = torch.arange(num_keys, device=query_index.device)  # (M,)
    queries = query_index[:, :, None]  # (B, S, 1)
    visible = keys <= queries  # (B, S, M)
    if key_mask is not None:
        visible = visible & key_mask[:, None, :].bool()
    if document_ids is not None:
        visible = visible & (document_ids[:, :, None] == document_ids[:, None, :])
    return (visible | (keys == queries))[:, None]


def positions_from_mask(attention_mask: Integer[Tensor, "B M"] | Bool[Tensor, "B M"]) -> Int[Tensor, "B M"]:
    """Rotary positions that count real tokens only, so a padded row rotates exactly as it does alone."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def positions_from_documents(document_ids: Int[Tensor, "B S"]) -> Int[Tensor, "B S"]:
    """Rotary positions that restart at every document of a packed row, as each would have alone."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return index - torch.where(starts, index, 0).cummax(-1).values
