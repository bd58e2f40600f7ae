"""Capo: the texts and where their values stand, the stream, and the bits, against models whose knowledge is known."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from looplm.errors import UserError
from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.lab import capo
from looplm.lab.capo import BiographyStream, CapoTask
from looplm.lab.capo_evaluation import (
    ATTRIBUTES,
    encode,
    evaluate_capo,
    maximum_bits,
    measure,
    sums_of_nats,
    usable_parameters,
)
from looplm.model.config import LoopedConfig
from looplm.model.flops import parameter_shapes

NUM_PEOPLE = 40
SHAPE = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8
)


@pytest.fixture(scope="module")
def task() -> CapoTask:
    return CapoTask(num_people=NUM_PEOPLE, vocab_size=400)


@pytest.fixture(scope="module")
def tokenizer(task):
    return capo.tokenizer(num_people=NUM_PEOPLE, vocab_size=400)


# --- Texts ----------------------------------------------------------------------------------------------------------


def test_the_population_is_that_of_the_paper():
    assert capo.NUM_NAMES == 400 * 400 * 1000
    assert capo.NUM_VALUES == {
        "pronoun": 2, "birth date": 12 * 28 * 200, "city": 200, "university": 300, "major": 100, "employer": 263,
    }  # fmt: skip
    for values in (capo.FIRST_NAMES, capo.MIDDLE_NAMES, capo.LAST_NAMES, capo.CITIES, capo.UNIVERSITIES, capo.MAJORS,
                   capo.EMPLOYERS):  # fmt: skip
        assert len(set(values)) == len(values)
    assert maximum_bits(20_000) == pytest.approx(1.211e6, rel=1e-3)
    assert maximum_bits(500_000) == pytest.approx(27.96e6, rel=1e-3)


@pytest.mark.parametrize("arguments", [{}, {"num_templates": 4}, {"short": True}])
def test_every_value_stands_where_its_span_says(arguments):
    task = CapoTask(num_people=30, **arguments)
    fields = {"name": "name", "pronoun": "his", "birth date": "date"}
    for words, found in zip(task.people(), task.biographies(seed=3), strict=True):
        assert {span.attribute for span in found.spans} == set(ATTRIBUTES) and len(found.spans) == len(ATTRIBUTES)
        for span in found.spans:
            assert found.text[span.begin : span.end] == words[fields.get(span.attribute, span.attribute)]
        begins = [span.begin for span in found.spans]
        assert begins == sorted(begins) and found.spans[0].attribute == "name" and begins[0] == 0
        assert "{" not in found.text


def test_people_have_distinct_names_and_values_spread_over_their_lists():
    people = CapoTask(num_people=2000).people()
    assert len({words["name"] for words in people}) == 2000
    for field, values in (("city", capo.CITIES), ("major", capo.MAJORS), ("employer", capo.EMPLOYERS)):
        assert {words[field] for words in people} == set(values)
    assert 900 < sum(words["his"] == "her" for words in people) < 1100
    by_employer = {(words["employer"], words["work city"]) for words in people}
    assert len(by_employer) == len(capo.EMPLOYERS)  # the city follows from the employer


def test_one_template_gives_every_exposure_the_same_text_and_several_do_not():
    fixed = CapoTask(num_people=5)
    assert fixed.biographies(0) == fixed.biographies(1)
    drawn = CapoTask(num_people=5, num_templates=4)
    assert drawn.biographies(0) == drawn.biographies(0) != drawn.biographies(1)


def test_every_exposure_shows_each_person_once_in_an_order_of_its_own():
    texts = list(itertools.islice(capo.documents(num_people=50), 150))
    exposures = [texts[i : i + 50] for i in range(0, 150, 50)]
    assert all(sorted(exposure) == sorted(exposures[0]) for exposure in exposures)
    assert len(set(exposures[0])) == 50 and exposures[0] != exposures[1] != exposures[2]
    assert texts != list(itertools.islice(capo.documents(num_people=50, stream_seed=1), 150))


@pytest.mark.parametrize("arguments", [{}, {"num_templates": 3}])
def test_a_resumed_stream_goes_on_with_the_same_texts(arguments):
    straight = capo.documents(num_people=7, **arguments)
    texts = [next(straight) for _ in range(40)]
    first = capo.documents(num_people=7, **arguments)
    assert [next(first) for _ in range(17)] == texts[:17]
    second = capo.documents(num_people=7, **arguments)
    second.load_state_dict(first.state_dict())
    assert [next(second) for _ in range(23)] == texts[17:]


def test_a_stream_of_another_population_is_refused():
    state = BiographyStream(CapoTask(num_people=7)).state_dict()
    with pytest.raises(UserError, match="another num_people and seed"):
        BiographyStream(CapoTask(num_people=8, seed=1)).load_state_dict(state)


@pytest.mark.parametrize(
    "arguments", [{"num_people": 0}, {"num_templates": 9}, {"seed": -1}, {"short": True, "num_templates": 2}]
)
def test_impossible_tasks_are_refused(arguments):
    with pytest.raises(UserError):
        CapoTask(**arguments)


# --- Bits -----------------------------------------------------------------------------------------------------------


def test_the_tokens_of_a_value_are_those_that_spell_it(task, tokenizer):
    biographies = task.biographies(0)
    ids, attributes = encode(biographies, tokenizer)
    for found, row, told in zip(biographies, ids, attributes, strict=True):
        assert tokenizer.decode(row[1:-1]) == found.text and row[0] == row[-1] == tokenizer.eos_token_id
        for span in found.spans:
            mine = [token for token, which in zip(row, told, strict=True) if which == ATTRIBUTES.index(span.attribute)]
            assert tokenizer.decode(mine).strip() == found.text[span.begin : span.end]


class LookUp(nn.Module):
    """A model that is a table: it knows whole texts, but only the values of some attributes, and guesses the others.

    At a position that begins or continues a name it gives every continuation its share of the people who still
    fit; an unknown value costs log2 of the number of values, spread over its tokens; anything else it knows.
    """

    def __init__(self, task: CapoTask, tokenizer, known: set[str]) -> None:
        super().__init__()
        config = LoopedConfig(vocab_size=len(tokenizer), num_loops=1, **SHAPE)
        self.rows, self.told = encode(task.biographies(0), tokenizer)
        self.known, self.vocab = known, len(tokenizer)
        self.lm_head = nn.Identity()
        self.lm_head.out_features = self.vocab  # pyright: ignore
        self.config = config
        self.embed_tokens = nn.Embedding(1, 1)

    @property
    def model(self):
        return self

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, num_loops: int | None = None):
        logits = torch.full((*input_ids.shape, self.vocab), -1e4)
        for i, row in enumerate(input_ids.tolist()):
            whole = next(j for j, known in enumerate(self.rows) if row[: len(known)] == known)
            for place in range(len(self.rows[whole]) - 1):
                self._predict(logits[i, place], whole, place)
        return SimpleNamespace(loop_hidden_states=[logits], gate_logits=torch.zeros(1, *input_ids.shape))

    def _predict(self, logits: Tensor, whole: int, place: int) -> None:
        row, told = self.rows[whole], self.told[whole]
        attribute = ATTRIBUTES[told[place + 1]] if told[place + 1] >= 0 else None
        target = row[place + 1]
        if attribute == "name" and "name" in self.known:
            fitting = [other for other in self.rows if other[: place + 1] == row[: place + 1]]
            for other in fitting:
                share = sum(one[place + 1] == other[place + 1] for one in fitting) / len(fitting)
                logits[other[place + 1]] = math.log(share)
        elif attribute is not None and attribute not in self.known:
            size = capo.NUM_NAMES if attribute == "name" else capo.NUM_VALUES[attribute]
            share = size ** (-1 / told.count(told[place + 1]))
            logits[target] = math.log(share)
            logits[(target + 1) % self.vocab] = math.log1p(-share)  # all the rest, on a wrong token
        else:
            logits[target] = 0.0


@pytest.mark.parametrize(
    "known",
    [set(), {"name"}, {"city"}, {"name", "birth date", "major"}, set(ATTRIBUTES)],
    ids=lambda known: "+".join(sorted(known)) or "nothing",
)
def test_a_look_up_table_gets_the_bits_it_holds(task, tokenizer, known):
    found = evaluate_capo(LookUp(task, tokenizer, known), tokenizer, task)
    bits = NUM_PEOPLE * math.log2(capo.NUM_NAMES / NUM_PEOPLE) * ("name" in known)
    bits += NUM_PEOPLE * sum(math.log2(size) for name, size in capo.NUM_VALUES.items() if name in known)
    assert found.bits[0] == pytest.approx(bits, abs=0.5)
    if known == set(ATTRIBUTES):
        assert found.bits[0] == pytest.approx(found.max_bits, rel=1e-5)
        assert found.bits_per_parameter[0] == pytest.approx(found.max_bits_per_parameter, rel=1e-5)
        assert found.nats["name"][0] == pytest.approx(math.log(NUM_PEOPLE), rel=1e-5)  # the floor of p1


def tiny_model(tokenizer, num_loops: int = 1) -> LoopLMForCausalLM:
    config = LoopedConfig(vocab_size=len(tokenizer), num_loops=num_loops, **SHAPE)
    return LoopLMForCausalLM(LoopLMConfig.from_model_config(config)).eval()


def test_an_untrained_model_knows_nothing(task, tokenizer):
    found = evaluate_capo(tiny_model(tokenizer, 2), tokenizer, task)
    assert found.bits == [0.0, 0.0]
    assert all(found.bits_of(name)[0] < 0 for name in ATTRIBUTES if name != "pronoun")


def test_nats_are_summed_over_a_value_and_averaged_over_people():
    nats = torch.tensor([[1.0, 2.0, 4.0, 8.0], [0.0, 0.5, 0.0, 0.25]])
    found = sums_of_nats(nats, torch.tensor([0, 0, 3, 0]), num_people=2)
    assert found["name"] == [5.5, 0.375] and found["city"] == [2.0, 0.0] and found["major"] == [0.0, 0.0]


def test_the_nats_are_those_of_plain_cross_entropy_text_by_text(task, tokenizer):
    model = tiny_model(tokenizer, 2)
    found = evaluate_capo(model, tokenizer, task)
    expected = dict.fromkeys(ATTRIBUTES, 0.0)
    for biography in task.biographies(0):
        pieces = [tokenizer.eos_token_id]
        position = 0
        for span in biography.spans:
            before = tokenizer(biography.text[position : span.begin].rstrip(" "))["input_ids"]
            gap = " " if biography.text[position : span.begin].endswith(" ") else ""
            value = tokenizer(gap + biography.text[span.begin : span.end])["input_ids"]
            pieces += before
            logits = model(torch.tensor([pieces + value])).logits[0].double().log_softmax(-1)
            for i, token in enumerate(value):
                expected[span.attribute] -= logits[len(pieces) + i - 1, token].item() / NUM_PEOPLE
            pieces, position = pieces + value, span.end
    assert {name: nats[1] for name, nats in found.nats.items()} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_only_what_the_texts_use_is_counted(tied):
    config = LoopedConfig(vocab_size=500, num_loops=4, tie_word_embeddings=tied, **SHAPE)
    used = LoopedConfig(vocab_size=90, num_loops=4, tie_word_embeddings=tied, **SHAPE)
    without_gate = sum(math.prod(shape) for name, shape in parameter_shapes(used).items() if "early_exit" not in name)
    assert usable_parameters(config, 90) == without_gate


def test_measure_takes_the_arguments_of_the_stream(tokenizer):
    figures = measure(tiny_model(tokenizer), tokenizer, num_people=NUM_PEOPLE, vocab_size=400, stream_seed=5)
    assert figures["bits_per_parameter"] == 0.0 < figures["max_bits_per_parameter"]
    assert figures["tokens_per_exposure"] > 20 * NUM_PEOPLE
