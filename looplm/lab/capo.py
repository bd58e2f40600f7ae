"""Capo: biographies of invented people, to count how many bits of knowledge a parameter holds.

    Belna Cordoro Ashwell celebrates her birthday on January 24, 1914. She spent her early years in Amberton. ...

The population is bioS(N) (Physics of Language Models 3.3, arXiv 2404.05405; Ouro 6.1 and appendix B.1): N distinct
names among 400 x 400 x 1000, and for each person a pronoun, a date of birth, a city, a university, a major and an
employer, independent and uniform. The employer's city follows from the employer and holds no bits. Names, values and
templates are our own, put together from short lists, since the papers print none.

A text is one sentence an attribute. With one template an attribute, as in Ouro, every text of a person is the same;
with more, each exposure draws templates and the order of the sentences anew. `short` leaves the sentences out, for
quick studies: what is to be remembered is the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from looplm.data.tokenizer import train_tokenizer
from looplm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PEOPLE, _ORDER, _TEXTS = range(3)  # keep the draws of one seed apart
_MOST_TOKENIZER_TEXTS = 2000


def _pairs(first: str, second: str) -> list[str]:
    """Every word of the one list with every word of the other; "_" stands for a space."""
    return [(a + b).replace("_", " ") for a in first.split() for b in second.split()]


# --- What there is to choose from -----------------------------------------------------------------------------------

FIRST_NAMES = _pairs(
    "Al Bel Cor Dar El Fen Gar Hal Is Jo Kel Lan Mar Nor Or Per Ros Sel Tal Vin",
    "a ana by da eth ia ick ina is la len lo na nor o on ra ric ton us",
)
MIDDLE_NAMES = _pairs(
    "Am Bri Cal Dor Em Fla Gil Hec Ir Jas Kir Lor Mel Nel Os Pal Quin Rob Sil Ther",
    "ana ay bert do ela en ene fred gard ian ice iel lina man mund olo ora oro vin wen",
)
LAST_NAMES = _pairs(
    "Ash Barn Black Brad Car Chad Clay Cole Dun East Elm Fair Farn Glen Green Hart Haw Hol Kirk Lang "
    "Lin Long Mar Mil New North Oak Pem Red Rush Sand Shel South Stan Thorn Wake Wal West Whit Win",
    "bank bourne brook bury by cliff combe cote croft dale den don field ford ham hurst land ley more ridge shaw "
    "stead stone well wick",
)
CITIES = _pairs(
    "Amber Birch Cedar Deer Eagle Falcon Granite Harbor Iron Juniper Kings Laurel Maple Nettle Otter Pine Quarry "
    "River Silver Timber",
    "_Bay _Falls _Hill _Lake _Park burg port ton vale ville",
)
UNIVERSITIES = _pairs(
    "Alden Beacon Calder Dunmore Everett Foxhall Gresham Hadley Ingram Jarvis Kendal Lowell Merton Norfolk Oriel "
    "Prescott Quincy Radley Selwyn Tarleton Upton Varley Wexford Yarrow Zeller Avon Bristow Crosby Denham Esher",
    "_Academy _Agricultural_College _College _Institute _Polytechnic _School_of_Mines _State_College "
    "_State_University _Technical_University _University",
)
MAJORS = _pairs(
    "Applied Classical Clinical Comparative Digital Environmental Industrial International Modern Theoretical",
    "_Biology _Chemistry _Economics _Education _Engineering _History _Linguistics _Music _Physics _Statistics",
)
EMPLOYERS = _pairs(
    "Acorn Bluebell Compass Drift Ember Fable Gannet Harvest Indigo Jubilee Keystone Lantern Meridian Nimbus Orchard "
    "Pinnacle Quartz Rampart Summit Tidal Umber Vector Willow Xenon Yonder Zephyr Atlas",
    "_Airlines _Bank _Foods _Insurance _Labs _Media _Motors _Power _Software _Textiles",
)[:263]
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
          "November", "December")  # fmt: skip
NUM_DAYS, FIRST_YEAR, NUM_YEARS = 28, 1900, 200
PRONOUNS = (("She", "her"), ("He", "his"))

NUM_NAMES = len(FIRST_NAMES) * len(MIDDLE_NAMES) * len(LAST_NAMES)
"""N0, names to choose from."""
NUM_VALUES = {
    "pronoun": len(PRONOUNS),
    "birth date": len(MONTHS) * NUM_DAYS * NUM_YEARS,
    "city": len(CITIES),
    "university": len(UNIVERSITIES),
    "major": len(MAJORS),
    "employer": len(EMPLOYERS),
}
"""Values of each attribute; their product is S0."""

_OPENINGS = ("{name} celebrates {his} birthday on {date}.", "{name} marks {his} birthday every {date}.",
             "{name} keeps {his} birthday on {date}.", "{name} has had {his} birthday since {date}.")  # fmt: skip
_SENTENCES = {
    "city": ("{He} spent {his} early years in {city}.", "{He} grew up in {city}.", "{He} is a native of {city}.",
             "{He} was raised in {city}."),
    "major": ("{He} focused on {major}.", "{He} took a degree in {major}.", "{He} specialised in {major}.",
              "{He} studied {major}."),
    "employer": ("{He} supported operations for {employer} in {work city}.",
                 "{He} holds a position at {employer} in {work city}.", "{He} works for {employer} in {work city}.",
                 "{He} joined {employer} in {work city}."),
    "university": ("{He} received {his} education at {university}.", "{He} graduated from {university}.",
                   "{He} is an alumnus of {university}.", "{He} attended {university}."),
}  # fmt: skip
MOST_TEMPLATES = len(_OPENINGS)
_SHORT = "{name}: {his} {date}, {city}, {major}, {employer}, {university}."

_VALUE_OF_FIELD = {"name": "name", "his": "pronoun", "date": "birth date"}
"""The attribute that a field tells where it occurs first; other fields are called as theirs."""


class Span(NamedTuple):
    """Characters of a text that tell an attribute."""

    attribute: str
    """"name", or a key of NUM_VALUES."""
    begin: int
    end: int


class Biography(NamedTuple):
    """One text about one person."""

    person: int
    text: str
    spans: list[Span]
    """Of the name and of each attribute once, in the order of the text."""


@dataclass(frozen=True, kw_only=True)
class CapoTask:
    """A population and how it is told.

    Raises UserError for a size, seed or number of templates out of range.
    """

    num_people: int = 1000
    num_templates: int = 1
    """Templates an attribute, of MOST_TEMPLATES. Above one, each text draws them and the order of its sentences."""
    short: bool = False
    """Values alone, without sentences."""
    vocab_size: int = 512
    """Of the tokenizer that is trained on the texts."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (("num_people", 1, NUM_NAMES), ("num_templates", 1, MOST_TEMPLATES)):
            if not low <= getattr(self, name) <= high:
                raise UserError(f"{name} is {getattr(self, name)}; it must lie between {low} and {high:,}.")
        if self.short and self.num_templates > 1:
            raise UserError("Short texts have one template; leave num_templates out.")
        if self.seed < 0:
            raise UserError(f"seed is {self.seed}; it must not be negative.")

    def people(self) -> list[dict[str, str]]:
        """Each person's words, by field of the templates."""
        rng = np.random.default_rng((_PEOPLE, self.seed))
        names = rng.choice(NUM_NAMES, self.num_people, replace=False)
        values = {name: rng.integers(size, size=self.num_people) for name, size in NUM_VALUES.items()}
        return [
            _words(int(names[i]), {name: int(drawn[i]) for name, drawn in values.items()})
            for i in range(self.num_people)
        ]

    def biography(self, person: int, words: dict[str, str], rng: np.random.Generator) -> Biography:
        """A text about a person, with the places of its values. `rng` draws only where there is a choice."""
        if self.short:
            return _fill(person, _SHORT, words)
        chosen = [[*templates][int(rng.integers(self.num_templates)) if self.num_templates > 1 else 0]
                  for templates in (_OPENINGS, *_SENTENCES.values())]  # fmt: skip
        rest = [chosen[1 + i] for i in rng.permutation(len(_SENTENCES))] if self.num_templates > 1 else chosen[1:]
        return _fill(person, " ".join((chosen[0], *rest)), words)

    def biographies(self, seed: int) -> list[Biography]:
        """One fresh text of every person, in order."""
        rng = np.random.default_rng((_TEXTS, self.seed, 1, seed))
        return [self.biography(i, words, rng) for i, words in enumerate(self.people())]


def _words(name: int, values: dict[str, int]) -> dict[str, str]:
    name, last = divmod(name, len(LAST_NAMES))
    first, middle = divmod(name, len(MIDDLE_NAMES))
    rest, day = divmod(values["birth date"], NUM_DAYS)
    year, month = divmod(rest, len(MONTHS))
    he, his = PRONOUNS[values["pronoun"]]
    return {
        "name": f"{FIRST_NAMES[first]} {MIDDLE_NAMES[middle]} {LAST_NAMES[last]}",
        "He": he,
        "his": his,
        "date": f"{MONTHS[month]} {day + 1}, {FIRST_YEAR + year}",
        "city": CITIES[values["city"]],
        "university": UNIVERSITIES[values["university"]],
        "major": MAJORS[values["major"]],
        "employer": EMPLOYERS[values["employer"]],
        "work city": CITIES[(7 * values["employer"] + 3) % len(CITIES)],
    }


def _fill(person: int, template: str, words: dict[str, str]) -> Biography:
    text, spans = "", {}
    for piece in template.split("{"):
        field, closed, rest = piece.partition("}")
        if not closed:
            text += piece
            continue
        attribute = _VALUE_OF_FIELD.get(field, field)
        if attribute == "name" or attribute in NUM_VALUES:
            spans.setdefault(attribute, Span(attribute, len(text), len(text) + len(words[field])))
        text += words[field] + rest
    return Biography(person, text, list(spans.values()))


# --- What a recipe names --------------------------------------------------------------------------------------------


class BiographyStream:
    """Endless texts: all people in an order drawn anew for each exposure. Where it stands is one number.

    Raises UserError when a state is loaded that another task or seed has left.
    """

    def __init__(self, task: CapoTask, stream_seed: int = 0) -> None:
        self.task, self.stream_seed = task, stream_seed
        self.num_drawn = 0
        self._people = task.people()
        self._exposure: tuple[int, Sequence[int]] | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        exposure, place = divmod(self.num_drawn, self.task.num_people)
        if self._exposure is None or self._exposure[0] != exposure:
            order = np.random.default_rng((_ORDER, self.task.seed, self.stream_seed, exposure))
            self._exposure = exposure, order.permutation(self.task.num_people).tolist()
        person = self._exposure[1][place]
        rng = np.random.default_rng((_TEXTS, self.task.seed, 0, self.stream_seed, self.num_drawn))
        self.num_drawn += 1
        return self.task.biography(person, self._people[person], rng).text

    def state_dict(self) -> dict[str, Any]:
        """Texts drawn so far, and what they must be continued with."""
        return {"num_drawn": self.num_drawn, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after the last text that `state` counts."""
        here = self._identity()
        if changed := [name for name in here if state[name] != here[name]]:
            raise UserError(f"The biographies cannot be resumed with another {' and '.join(changed)}.")
        self.num_drawn = state["num_drawn"]

    def _identity(self) -> dict[str, int]:
        task = {field.name: getattr(self.task, field.name) for field in fields(CapoTask)}
        return {**task, "stream_seed": self.stream_seed}


def documents(stream_seed: int = 0, **arguments: Any) -> BiographyStream:
    """The training texts of `CapoTask(**arguments)`, for a recipe's `kind: generator` source of format text."""
    return BiographyStream(CapoTask(**arguments), stream_seed)


def tokenizer(**arguments: Any) -> "PreTrainedTokenizerFast":
    """A byte-level BPE trained on one text a person, of so many people that every value occurs."""
    arguments.pop("stream_seed", None)
    task = CapoTask(**arguments)
    task = replace(task, num_people=min(task.num_people, _MOST_TOKENIZER_TEXTS))
    return train_tokenizer((biography.text for biography in task.biographies(seed=0)), task.vocab_size)
