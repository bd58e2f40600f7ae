"""Multi-hop questions about invented people, in words (Ouro, section 6.2 and appendix B.3).

    The teacher of Tamos is Belin
    Who is the instructor of the teacher of Tamos ? Answer: Corva

People stand in layers, and each relation leads from everyone to somebody in the next layer, drawn at random. Training
sees all facts, as statements and as questions of one hop, and of the longer questions, which begin in the first layer,
only some: how many different ones (`num_pairs`) is what the experiment varies. Evaluation asks the others.

A document is a statement or a question of `min_hops` to `max_hops`, all kinds equally often; nothing is predicted but
its last word. A name, a relation or a word of the template is one token. What share of the paper's documents were
facts, and whether shorter questions were trained on, it does not say; `min_hops = max_hops = 3` is its Figure 7.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from looplm.errors import UserError
from looplm.lab.task import (
    QUESTIONS,
    TASK,
    Documents,
    at_least_one,
    checked_seed,
    fill_up,
)
from looplm.lab.task_recipe import recipe_functions

RELATIONS = (
    "teacher", "instructor", "neighbour", "cousin", "landlord", "dentist", "tailor", "rival", "mentor", "colleague",
    "lawyer", "partner", "barber", "manager", "advisor", "gardener", "editor", "coach", "banker", "guide",
    "painter", "architect", "baker", "driver", "accountant", "pharmacist", "plumber", "publisher", "witness", "heir",
)  # fmt: skip
_BEGINNINGS = (
    "Ta", "Be", "Cor", "Da", "El", "Fe", "Gra", "Ho", "Ir", "Ja", "Ka", "Lu", "Mi", "Na", "Or", "Pe", "Qui", "Ro",
    "Sa", "Tri", "Ul", "Vi", "Wen", "Xa", "Yo", "Ze",
)  # fmt: skip
_ENDINGS = (
    "mos", "lin", "va", "rick", "dora", "ben", "sha", "ton", "mira", "gul", "phe", "nard", "lo", "kin", "sey", "wyn",
    "rus", "bel", "dan", "tia",
)  # fmt: skip
NAMES = tuple(beginning + ending for beginning in _BEGINNINGS for ending in _ENDINGS)
_WORDS = ("The", "the", "of", "is", "Who", "?", "Answer:", "<pad>")

_TABLES, _TRAINED = range(2)


@dataclass(frozen=True)
class MultihopTask:
    """Questions of `min_hops` to `max_hops` relations among `num_entities` people in `num_layers` equal layers.

    `num_pairs` different questions of `max_hops` are trained on, and the same share of those of 2 hops and more that
    are shorter. `seed` decides who is whose teacher, and which questions these are.
    Raises UserError for sizes that do not fit each other or the lists of names, and for a negative seed.
    """

    name: ClassVar = "multihop"
    level_name: ClassVar = "hops"
    num_pairs: int
    num_entities: int = 500
    num_relations: int = 20
    num_layers: int = 5
    min_hops: int = 1
    max_hops: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.num_entities <= len(NAMES) or not 0 < self.num_relations <= len(RELATIONS):
            raise UserError(
                f"{self.num_entities} people and {self.num_relations} relations; there are names for up to "
                f"{len(NAMES)}, and {len(RELATIONS)} relations."
            )
        if self.num_layers < 2 or self.num_entities % self.num_layers:
            raise UserError(f"{self.num_entities} people cannot stand in {self.num_layers} equal layers, two or more.")
        if not 1 <= self.min_hops <= self.max_hops < self.num_layers:
            raise UserError(
                f"{self.min_hops} to {self.max_hops} hops: that must begin at 1 or above, rise, and stay below the "
                f"{self.num_layers} layers."
            )
        if self.max_hops < 2:
            raise UserError("max_hops is 1; with single facts there is nothing to compose.")
        if not 1 <= self.num_pairs < self.num_questions(self.max_hops):
            raise UserError(
                f"num_pairs is {self.num_pairs}; of the {self.num_questions(self.max_hops)} questions of "
                f"{self.max_hops} hops at least one must be trained on, and one left."
            )
        checked_seed(self.seed)

    @property
    def levels(self) -> tuple[int, ...]:
        return tuple(range(self.min_hops, self.max_hops + 1))

    @property
    def words(self) -> tuple[str, ...]:
        """Names, which are their own numbers; relations; the words of the templates, <pad>."""
        return (*NAMES[: self.num_entities], *RELATIONS[: self.num_relations], *_WORDS)

    @property
    def max_len(self) -> int:
        return 3 * self.max_hops + 6

    @property
    def layer_size(self) -> int:
        return self.num_entities // self.num_layers

    @cached_property
    def related(self) -> Int[Tensor, "E K"]:
        """[person, relation] -> person in the next layer; -1 for the last layer."""
        rng = np.random.default_rng((TASK, _TABLES, self.seed))
        layer = np.arange(self.num_entities) // self.layer_size
        drawn = rng.integers(self.layer_size, size=(self.num_entities, self.num_relations))
        drawn += self.layer_size * (layer + 1)[:, None]
        drawn[layer == self.num_layers - 1] = -1
        return torch.from_numpy(drawn)

    def num_questions(self, hops: int) -> int:
        """Different questions of so many hops; those of one hop begin in every layer but the last."""
        begin = self.layer_size if hops > 1 else self.layer_size * (self.num_layers - 1)
        return begin * self.num_relations**hops

    def num_trained(self, hops: int) -> int:
        """How many of them training sees: all facts, else the share that `num_pairs` is of the longest, and one at
        least on either side."""
        total = self.num_questions(hops)
        if hops == 1:
            return total
        return min(total - 1, max(1, round(total * self.num_pairs / self.num_questions(self.max_hops))))

    def draw(self, count: int, rng: np.random.Generator) -> Documents:
        """See :class:`~looplm.lab.task.Task`: a statement, or a question of each number of hops, with equal chance."""
        kinds = rng.integers(self.min_hops - 1, self.max_hops + 1, size=count)
        documents = []
        for kind in range(self.min_hops - 1, self.max_hops + 1):
            rows = (kinds == kind).nonzero()[0]
            hops = kind if kind >= self.min_hops else 1
            numbers = self._order(hops)[rng.integers(self.num_trained(hops), size=len(rows))]
            write = self.asked if kind >= self.min_hops else self.stated
            documents.append((torch.from_numpy(rows), write(*self.question(hops, torch.from_numpy(numbers)))))
        return fill_up(documents, count, self.max_len, len(self.words) - 1)

    def questions(self, level: int, count: int, seed: int) -> Int[Tensor, "N S"]:
        """See :class:`~looplm.lab.task.Task`. At one hop any, since training sees all facts."""
        if not 1 <= level < self.num_layers:
            raise UserError(f"hops is {level}; it must lie between 1 and {self.num_layers - 1}.")
        rng = np.random.default_rng((QUESTIONS, checked_seed(seed), level))
        first = self.num_trained(level) if 1 < level <= self.max_hops else 0
        numbers = rng.integers(first, self.num_questions(level), size=at_least_one("count", count))
        return self.asked(*self.question(level, torch.from_numpy(self._order(level)[numbers])))

    def question(
        self, hops: int, numbers: Int[Tensor, " N"]
    ) -> tuple[Int[Tensor, " N"], Int[Tensor, "N h"], Int[Tensor, " N"]]:
        """The questions of these numbers, below `num_questions`: whom they begin with, the relations, the answer."""
        places = self.num_relations ** torch.arange(hops)
        relations = numbers[:, None] // places % self.num_relations  # (N, h), the first one followed first
        person = answer = numbers // self.num_relations**hops
        for relation in relations.unbind(1):
            answer = self.related[answer, relation]
        return person, relations, answer

    def asked(
        self, person: Int[Tensor, " N"], relations: Int[Tensor, "N h"], answer: Int[Tensor, " N"]
    ) -> Int[Tensor, "N S"]:
        """Who is the r2 of the r1 of NAME ? Answer: NAME"""
        columns: list[Tensor | str] = ["Who", "is"]
        for relation in reversed(relations.unbind(1)):  # the last one followed is named first
            columns += ["the", self.num_entities + relation, "of"]
        return self._rows([*columns, person, "?", "Answer:", answer])

    def stated(
        self, person: Int[Tensor, " N"], relations: Int[Tensor, "N h"], answer: Int[Tensor, " N"]
    ) -> Int[Tensor, "N S"]:
        """The r of NAME is NAME"""
        return self._rows(["The", self.num_entities + relations[:, 0], "of", person, "is", answer])

    def _rows(self, columns: list[Tensor | str]) -> Tensor:
        first_word = self.num_entities + self.num_relations
        words = [torch.tensor(first_word + _WORDS.index(c)) if isinstance(c, str) else c for c in columns]
        return torch.stack(torch.broadcast_tensors(*words), dim=1)

    def _order(self, hops: int) -> np.ndarray:
        """The numbers of all questions of so many hops, those that are trained on first."""
        if hops not in self._orders:
            rng = np.random.default_rng((TASK, _TRAINED, self.seed, hops))
            self._orders[hops] = rng.permutation(self.num_questions(hops))
        return self._orders[hops]

    @cached_property
    def _orders(self) -> dict[int, np.ndarray]:
        return {}


documents, tokenizer, measure = recipe_functions(MultihopTask)
