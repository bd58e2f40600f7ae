"""The token ids that two models are compared on: of a file, of a passage that ships, or random where there is no
tokenizer."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from looplm.conversion.dense_to_looped import random_ids
from looplm.errors import UserError
from looplm.model.config import LoopedConfig

MAX_TOKENS = 256
"""Positions compared unless asked otherwise."""

PASSAGE = """The lighthouse on the northern cape was built in 1874, after three ships had been lost on the reef in a \
single winter. For almost a hundred years a keeper climbed its 212 steps every evening to light the lamp, and every \
morning to put it out again. He wrote down the weather, the passing ships and the birds that had flown against \
the glass. These books are now kept in the town library, where students of the climate read them more often than \
students of history do.

In the summer of 1969 the lamp was made automatic. The last keeper, a man of few words, moved into a small house \
below the hill, from which he could still see the light. Asked by a newspaper whether he missed the work, he \
answered that he missed the stairs. "A man who climbs the same stairs every day," he said, "thinks the same \
thought every day, and after some years it becomes a better thought."

Today visitors may go up as far as the gallery. On a clear day one can count eleven islands, and the line where \
the warm current meets the cold one. The water is green on one side and nearly black on the other. Fishing boats \
follow this line because the fish do, and the gulls follow the boats. At dusk the lamp comes on by itself, turns \
once every twelve seconds, and can be seen from a distance of about twenty nautical miles.
"""


def parity_ids(
    config: LoopedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    text: Path | None = None,
    max_tokens: int = MAX_TOKENS,
) -> Tensor:
    """(1, S) token ids of `text`, or of PASSAGE, cut to `max_tokens` and to the context; random ids, the same on every
    call, without a tokenizer.

    Raises UserError for a file that cannot be read, is empty or comes without a tokenizer, and for ids without an
    embedding.
    """
    if max_tokens < 2:
        raise UserError(f"max_tokens is {max_tokens}; a comparison needs two tokens or more.")
    if tokenizer is None:
        if text is not None:
            raise UserError(f"There is no tokenizer to read {text} with; leave the text out to compare on random ids.")
        return random_ids(config, max_tokens)
    # A token has rarely more than a few characters; a whole book need not be tokenised.
    content = PASSAGE if text is None else read_text(text)[: 32 * max_tokens]
    ids = tokenizer(content, add_special_tokens=True)["input_ids"]
    ids = ids[: min(max_tokens, config.max_position_embeddings)]
    if len(ids) < 2:
        raise UserError(f"{text} holds {len(ids)} tokens; a comparison needs two or more.")
    if max(ids) >= config.vocab_size:
        raise UserError(
            f"The tokenizer gives the id {max(ids)}, and the model has embeddings for {config.vocab_size} only: the "
            "tokenizer belongs to another model."
        )
    return torch.tensor([ids])


def read_text(file: Path) -> str:
    """A UTF-8 file. Raises UserError when it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 (byte {error.start}). Save it as UTF-8.") from None
