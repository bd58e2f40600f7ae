"""Forced decoding against the oracles of every strategy, and the figures that are made of it."""

import math

import pytest
import torch
from torch import nn

from looplm.data.documents import Document
from looplm.data.evaluation_windows import evaluation_windows
from looplm.data.tokenizer import train_tokenizer
from looplm.errors import UserError
from looplm.evaluation.cache_quality import Continuations, cache_quality, continuations, decode_forced
from looplm.inference import Engine, FixedDepth, QuantileExit, SamplingParams, reference, reference_shared
from looplm.model.config import LoopedConfig
from looplm.model.looped import LoopedTransformer

VOCAB = 23
STRATEGIES = ["per_loop", "fill", "last", "mean", "first"]


class TinyLM(nn.Module):
    def __init__(self, num_coda_layers: int = 0) -> None:
        super().__init__()
        config = LoopedConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, num_loops=3, num_coda_layers=num_coda_layers, initializer_range=0.6,
        )  # fmt: skip
        self.model, self.lm_head = LoopedTransformer(config), nn.Linear(16, VOCAB, bias=False)
        nn.init.normal_(self.model.early_exit_gate.weight, std=0.5)  # tokens leave at mixed depths


@pytest.fixture
def tiny() -> TinyLM:
    torch.manual_seed(3)
    return TinyLM().double()


@pytest.mark.parametrize("coda", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("exit", [FixedDepth(3), QuantileExit(0.6)])
def test_fed_with_its_own_words_the_model_says_what_the_oracle_says(coda, strategy, exit):
    """Scores, choices and exits of a text that the oracle of the strategy has written."""
    torch.manual_seed(4)
    lm = TinyLM(coda).double()
    params, prompts = SamplingParams(max_tokens=7, logprobs=True), [[3, 1, 4], [1, 5, 9]]
    if strategy == "per_loop":
        written = [reference.generate(lm, prompt, params, exit) for prompt in prompts]
    else:
        written = [reference_shared.generate(lm, [prompt], params, exit, strategy) for prompt in prompts]
    texts = torch.tensor([[*p, *w.token_ids] for p, w in zip(prompts, written, strict=True)])
    found = decode_forced(Engine(lm, kv_cache=strategy), texts, 5, 3, exit)
    for row, expected in enumerate(written):
        assert (-found.nats[row]).tolist() == pytest.approx(expected.logprobs[-5:], abs=1e-9)
        assert found.loops[row].tolist() == expected.loops[-5:]
    assert found.right.all()
    if exit != FixedDepth(3):
        assert len(found.loops.unique()) > 1, "all leave together, so this test shows little"


def test_other_words_are_scored_and_found_wrong(tiny):
    texts = torch.randint(VOCAB, (4, 9))
    found = decode_forced(Engine(tiny, max_batch=3), texts, 6, 2, FixedDepth(3))
    out = tiny.model(texts)
    logits = tiny.lm_head(out.loop_hidden_states[-1])[:, 2:-1]
    targets = texts[:, 3:]
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(found.nats, expected)
    assert torch.equal(found.right, logits.argmax(-1) == targets)
    assert not found.right.all()


def test_the_exact_cache_does_not_care_whether_a_prompt_is_decoded(tiny):
    texts = torch.randint(VOCAB, (3, 12))
    read, decoded = (decode_forced(Engine(tiny), texts, 4, num_prompt, QuantileExit(0.6)) for num_prompt in (8, 1))
    torch.testing.assert_close(read.nats, decoded.nats)
    assert torch.equal(read.loops, decoded.loops)


@pytest.mark.parametrize("num_prompt", [0, 6])
def test_a_prompt_must_end_before_the_scored_tokens(num_prompt, tiny):
    with pytest.raises(UserError, match=f"prompt of {num_prompt} tokens does not fit before 4 of 9"):
        decode_forced(Engine(tiny), torch.zeros(1, 9, dtype=torch.long), 4, num_prompt, FixedDepth(1))


def test_a_broken_model_is_said(tiny):
    tiny.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(UserError, match="Text 0 could not be scored: The model gave logits that are not finite"):
        decode_forced(Engine(tiny), torch.zeros(1, 9, dtype=torch.long), 4, 2, FixedDepth(1))


def test_points_are_ratios_of_sums_against_the_exact_cache(tiny):
    texts = Continuations(
        token_ids=torch.randint(VOCAB, (5, 10)),
        num_scored=4,
        document_ids=torch.tensor([0, 0, 1, 2, 2]),
        num_bytes=torch.tensor([7, 5, 9, 4, 6]),
    )
    exit = QuantileExit(0.6)
    points = cache_quality(tiny, texts, exit, ["last", "first"])
    assert [(p.strategy, p.prompt_shares) for p in points] == [
        (strategy, shares) for shares in (False, True) for strategy in ("per_loop", "last", "first")
    ]
    for point in points:
        num_prompt = 1 if point.prompt_shares else 6
        found = decode_forced(Engine(tiny, kv_cache=point.strategy), texts.token_ids, 4, num_prompt, exit)
        assert point.bits_per_byte == pytest.approx(found.nats.sum().item() / math.log(2) / 31)
        more = point.increase_bits_per_byte
        assert more.value == pytest.approx(point.bits_per_byte - points[0].bits_per_byte)
        assert point.accuracy == found.right.double().mean()
        assert point.mean_loops == found.loops.double().mean()
        assert more.low <= more.high
    exact, last = points[0], points[1]
    assert exact.increase_bits_per_byte.low == exact.increase_bits_per_byte.high == 0
    assert exact.bytes_per_token == 3 * last.bytes_per_token
    assert last.bits_per_byte != pytest.approx(points[4].bits_per_byte), "sharing at the prompt changed nothing"


# --- Texts ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on the mat. déjà vu 漢字 " * 20], 300)


def test_continuations_are_spread_over_the_documents_and_know_their_bytes(tokenizer):
    documents = [Document(name=str(i), text=f"cat {i} sat on the mat déjà. " * (4 * i)) for i in range(5)]
    windows = evaluation_windows(documents, tokenizer, 12)
    found = continuations(windows, tokenizer, num_texts=6, num_before=5, num_scored=7)
    assert found.token_ids.shape == (6, 12) and found.num_before == 5
    assert found.document_ids.tolist() == sorted(found.document_ids.tolist())
    assert set(found.document_ids.tolist()) == {0, 1, 2, 3}  # of the four that have any text
    for text, count in zip(found.token_ids.tolist(), found.num_bytes.tolist(), strict=True):
        assert count == len(tokenizer.decode(text).encode()) - len(tokenizer.decode(text[:5]).encode()) > 6
    several = continuations(windows, tokenizer, num_texts=10**6, num_before=5, num_scored=7)
    assert len(several.token_ids) == int((windows.lengths >= 12).sum())
    assert len({tuple(text) for text in several.token_ids.tolist()}) <= len(several.token_ids)


def test_texts_that_are_too_short_are_refused(tokenizer):
    windows = evaluation_windows([Document(name="a", text="the cat")], tokenizer, 12)
    with pytest.raises(UserError, match="No held-out text has 12 tokens"):
        continuations(windows, tokenizer, num_texts=6, num_before=5, num_scored=7)
    with pytest.raises(UserError, match="num_scored is 0"):
        continuations(windows, tokenizer, num_texts=6, num_before=5, num_scored=0)
