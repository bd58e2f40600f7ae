"""What a model would answer after each loop: among labels, or with any token."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from looplm.errors import UserError

_LOGITS_PER_CHUNK = 2**24


class Encoder(Protocol):
    """What is asked of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...


@dataclass(frozen=True)
class Labels:
    """The answers a model may choose between, each with the tokens that begin it."""

    names: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.names) < 2 or len(self.names) != len(self.token_ids):
            raise UserError(f"{len(self.names)} labels are no choice; name at least two.")


def spelled_labels(tokenizer: Encoder, names: Sequence[str]) -> Labels:
    """Labels by their first tokens, written as they are or capitalised, with and without a space before.

    Raises UserError where one token begins two of them: the model could not be seen to choose.
    """
    found: list[tuple[int, ...]] = []
    for name in names:
        spellings = {space + word for word in (name, name.capitalize()) for space in ("", " ")}
        encoded = [tokenizer.encode(text, add_special_tokens=False) for text in sorted(spellings)]
        found.append(tuple(sorted({ids[0] for ids in encoded if ids and not _is_space(tokenizer, ids[0])})))
    for i, mine in enumerate(found):
        for j in range(i):
            if set(mine) & set(found[j]) or not mine:
                raise UserError(
                    f"The labels {names[j]!r} and {names[i]!r} begin with the same token in this vocabulary, so the "
                    "next token does not tell them apart. Choose other words."
                )
    return Labels(tuple(names), tuple(found))


def _is_space(tokenizer: Encoder, token_id: int) -> bool:
    """Whether a token is what a vocabulary without " word" tokens spells the space as."""
    return tokenizer.encode(" ", add_special_tokens=False) == [token_id]


@torch.inference_mode()
def label_logits(lm_head: nn.Linear, hidden: Float[Tensor, "*rows D"], labels: Labels) -> Float[Tensor, "*rows C"]:
    """The log of the summed weight of each label's tokens: a softmax over C gives the choice between labels.

    Only these rows of the head are read.
    """
    ids = torch.tensor([token for tokens in labels.token_ids for token in tokens])
    weight = lm_head.weight[ids.to(lm_head.weight.device)].to("cpu", hidden.dtype)
    bias = None if lm_head.bias is None else lm_head.bias[ids.to(lm_head.bias.device)].to("cpu", hidden.dtype)
    logits = nn.functional.linear(hidden.cpu(), weight, bias)
    parts = logits.split([len(tokens) for tokens in labels.token_ids], dim=-1)
    return torch.stack([part.logsumexp(-1) for part in parts], dim=-1)


@torch.inference_mode()
def free_answers(lm_head: nn.Linear, hidden: Float[Tensor, "R N D"]) -> Int[Tensor, "R N"]:
    """The most probable token at every loop."""
    device, dtype = lm_head.weight.device, lm_head.weight.dtype
    rows = max(1, _LOGITS_PER_CHUNK // lm_head.out_features)
    flat = hidden.flatten(0, 1)
    found = [lm_head(part.to(device, dtype)).argmax(-1).cpu() for part in flat.split(rows)]
    return torch.cat(found).view(hidden.shape[:2])


def ranked(answers: Int[Tensor, "R N"], most: int) -> tuple[Int[Tensor, "R N"], tuple[int, ...]]:
    """Free answers as numbers of the `most` frequent ones, and the token ids these numbers stand for.

    Rarer answers stay apart from each other, as numbers from len(ids) on.
    """
    ids, inverse, counts = torch.unique(answers, return_inverse=True, return_counts=True)
    order = counts.argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    return rank[inverse], tuple(ids[order[:most]].tolist())


def last_label(text: str, names: Sequence[str]) -> int | None:
    """The label that stands last in a text as a word of its own, whatever its case; None where there is none."""
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    found = re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", text, flags=re.IGNORECASE)
    return [name.lower() for name in names].index(found[-1].lower()) if found else None
