"""Bits of knowledge a parameter holds (Physics of Language Models 3.3, arXiv 2404.05405, definition 4.3).

    bits  = N log2(N0 / e^p1) + N log2(S0 / e^p2)
    p1    = mean over people of the SUM of nats over the tokens of the name, read from the start of the text
    p2    = mean over people of the SUM of nats over the tokens of all values
    R     = bits / P,     R_max = (N log2(N0 / N) + N log2 S0) / P

Sums, not means: a value of three tokens costs three predictions. (The formula as Ouro prints it cannot be evaluated.)
A name can be known only up to which of the N people it is, so p1 is at least ln N, and R at most R_max. Each of the
two terms bounds the knowledge from below, and where it is negative it bounds nothing: it then counts 0.

P counts the parameters that the texts can use: rows of the embedding for tokens that occur, and no exit gate.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from looplm.data.packing import IGNORE_INDEX
from looplm.data.tokenizer import boundary_token_ids
from looplm.evaluation.record import record
from looplm.lab.capo import NUM_NAMES, NUM_VALUES, Biography, CapoTask
from looplm.model.config import LoopedConfig
from looplm.model.flops import count_parameters
from looplm.model.language_model import LoopLM

ATTRIBUTES = ("name", *NUM_VALUES)
_BATCH_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """What a model knows of a population, read out after each loop. Lists go by loop."""

    num_people: int
    num_parameters: int
    """P."""
    max_bits: float
    nats: dict[str, list[float]]
    """Mean over people of the nats summed over an attribute's tokens, by attribute (ATTRIBUTES)."""

    @property
    def bits(self) -> list[float]:
        """Known in all."""
        return [sum(self._terms(loop)) for loop in range(len(self.nats["name"]))]

    @property
    def bits_per_parameter(self) -> list[float]:
        """R."""
        return [bits / self.num_parameters for bits in self.bits]

    @property
    def max_bits_per_parameter(self) -> float:
        """R_max."""
        return self.max_bits / self.num_parameters

    def bits_of(self, attribute: str) -> list[float]:
        """Known of one attribute, below 0 where the model does worse than a guess."""
        size = NUM_NAMES if attribute == "name" else NUM_VALUES[attribute]
        return [self.num_people * (math.log2(size) - nats / math.log(2)) for nats in self.nats[attribute]]

    def _terms(self, loop: int) -> tuple[float, float]:
        values = sum(self.bits_of(attribute)[loop] for attribute in NUM_VALUES)
        return max(0.0, self.bits_of("name")[loop]), max(0.0, values)


def maximum_bits(num_people: int) -> float:
    """Bits of a population: which N of N0 names, all but their order, and every value."""
    return num_people * (math.log2(NUM_NAMES / num_people) + sum(map(math.log2, NUM_VALUES.values())))


def usable_parameters(config: LoopedConfig, num_used_tokens: int) -> int:
    """P: all but the exit gate and the rows of embedding and head that no text uses (2404.05405, appendix A)."""
    rows = (config.vocab_size - num_used_tokens) * config.hidden_size
    return count_parameters(config).total_without_gate - rows * (1 if config.tie_word_embeddings else 2)


def evaluate_capo(
    model: LoopLM,
    tokenizer: PreTrainedTokenizerBase,
    task: CapoTask,
    num_loops: int | None = None,
    *,
    seed: int = 0,
) -> Knowledge:
    """Reads one fresh text of every person and counts what the model knew before it read it.

    model: in eval mode. num_loops: deepest loop to read, the trained depth when None.
    """
    biographies = task.biographies(seed)
    ids, attributes = encode(biographies, tokenizer)
    used = {token for row in ids for token in row}
    if task.num_templates > 1:  # a single text of each person need not show every template
        for other in range(1, 2 * task.num_templates):
            used |= {token for row in encode(task.biographies(seed + other), tokenizer)[0] for token in row}
    found = record(model, _batches(ids, attributes, tokenizer), torch.ones(len(ids), dtype=torch.long), num_loops)
    told = [attribute for row in attributes for attribute in row if attribute >= 0]
    return Knowledge(
        num_people=task.num_people,
        num_parameters=usable_parameters(model.model.config, len(used)),
        max_bits=maximum_bits(task.num_people),
        nats=sums_of_nats(found.cross_entropy, torch.tensor(told), task.num_people),
    )


def sums_of_nats(
    cross_entropy: Float[Tensor, "R n"], attributes: Int[Tensor, " n"], num_people: int
) -> dict[str, list[float]]:
    """Nats summed over each attribute's tokens, over the number of people; `attributes` index ATTRIBUTES."""
    sums = torch.zeros((len(cross_entropy), len(ATTRIBUTES)), dtype=torch.float64)
    sums.index_add_(1, attributes, cross_entropy.double())
    return {name: (sums[:, i] / num_people).tolist() for i, name in enumerate(ATTRIBUTES)}


def encode(
    biographies: Sequence[Biography], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of each text as training packs it, and for each token the index in ATTRIBUTES that it tells, or -1.

    A token tells the value whose characters, or the space before them, it holds some of: where a vocabulary has no
    " Z", the bare space already says that the word begins with a rare letter. tokenizer: a fast one, for the places.
    """
    start_id, end_id = boundary_token_ids(tokenizer)
    encoded = tokenizer([biography.text for biography in biographies], add_special_tokens=False,
                        split_special_tokens=True, return_offsets_mapping=True, verbose=False)  # fmt: skip
    ids = [[start_id, *row, end_id] for row in encoded["input_ids"]]
    attributes = [
        [-1, *(_told(biography, begin, end) for begin, end in places), -1]
        for biography, places in zip(biographies, encoded["offset_mapping"], strict=True)
    ]
    return ids, attributes


def _told(biography: Biography, begin: int, end: int) -> int:
    for span in biography.spans:
        spaced = span.begin - (biography.text[: span.begin].endswith(" "))
        if begin < span.end and spaced < end:
            return ATTRIBUTES.index(span.attribute)
    return -1


def _batches(
    ids: Sequence[list[int]], attributes: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[dict[str, Tensor]]:
    """As :func:`looplm.evaluation.record.record` reads them, in the order of the people."""
    _, end_id = boundary_token_ids(tokenizer)
    for first in range(0, len(ids), _BATCH_ROWS):
        rows = range(first, min(len(ids), first + _BATCH_ROWS))
        width = max(len(ids[row]) for row in rows)
        input_ids = torch.tensor([ids[row] + [end_id] * (width - len(ids[row])) for row in rows])
        told = torch.tensor([attributes[row] + [-1] * (width - len(ids[row])) for row in rows])
        lengths = torch.tensor([len(ids[row]) for row in rows])
        yield {
            "input_ids": input_ids,
            "labels": input_ids.masked_fill(told < 0, IGNORE_INDEX),
            "attention_mask": (torch.arange(width) < lengths[:, None]).long(),
            "document_index": torch.tensor(list(rows)),
        }


def measure(model: LoopLM, tokenizer: PreTrainedTokenizerBase, **arguments: Any) -> dict[str, Any]:
    """The figures of a study's cell."""
    arguments.pop("stream_seed", None)
    task = CapoTask(**arguments)
    found = evaluate_capo(model, tokenizer, task)
    ids, _ = encode(task.biographies(0), tokenizer)
    return {
        "bits_per_parameter": found.bits_per_parameter[-1],
        "max_bits_per_parameter": found.max_bits_per_parameter,
        "known_share": found.bits[-1] / found.max_bits,
        "bits_per_parameter_by_loop": found.bits_per_parameter,
        "usable_parameters": found.num_parameters,
        "tokens_per_exposure": sum(map(len, ids)),
        "bits_by_attribute": {name: found.bits_of(name)[-1] for name in ATTRIBUTES},
    }
