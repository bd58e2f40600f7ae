"""Exits by change, by confidence and by time, against the oracle, mixed in one batch; and what they cost."""

import math

import pytest
import torch

from looplm.errors import UserError
from looplm.inference import reference
from looplm.inference.engine import Engine
from looplm.inference.exit_policy import (
    ConfidenceExit,
    Deadline,
    FixedDepth,
    HiddenDiffExit,
    QuantileExit,
    Signals,
    exit_loops,
)
from looplm.inference.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=8, logprobs=True, prompt_logprobs=True)
POLICIES = [
    HiddenDiffExit(1.5),
    HiddenDiffExit(3.0),
    ConfidenceExit(kl=0.3),
    ConfidenceExit(kl=1.5),
    ConfidenceExit(stable_loops=1),
    ConfidenceExit(stable_loops=2),
    QuantileExit(0.5),
]


class FakeClock:
    """Every look at it is a millisecond after the last."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        self.seconds += 0.001
        return self.seconds


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("shape", ["ouro", "prelude_coda", "raw_state"])
def test_a_mixed_batch_is_the_oracle(shape, make_lm, make_prompts):
    lm, prompts = make_lm(shape), make_prompts(7, seed=11)
    results = list(Engine(lm, chunk_size=5).generate(prompts, GREEDY, POLICIES))
    for prompt, policy, result in zip(prompts, POLICIES, results, strict=True):
        expected = reference.generate(lm, prompt, GREEDY, policy)
        assert (result.token_ids, result.loops) == (expected.token_ids, expected.loops)
        assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-7)
        assert result.prompt_logprobs == pytest.approx(expected.prompt_logprobs, abs=1e-7)
        (alone,) = Engine(lm).generate([prompt], GREEDY, policy)
        assert alone.token_ids == result.token_ids and alone.loops == result.loops
    assert len({loop for result in results for loop in result.loops}) >= 3


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("shape", ["ouro", "prelude_coda"])
@pytest.mark.parametrize("milliseconds", [0, 4, 7, 1000])
def test_a_deadline_is_the_oracle_at_the_depths_it_came_to(shape, milliseconds, make_lm, make_prompts):
    lm, prompts = make_lm(shape), make_prompts(3, seed=12)
    engine = Engine(lm, clock=FakeClock())
    results = list(engine.generate(prompts, GREEDY, Deadline(milliseconds)))
    for prompt, result in zip(prompts, results, strict=True):
        expected = reference.generate(lm, prompt, GREEDY, Deadline(milliseconds), forced_loops=result.loops)
        assert result.token_ids == expected.token_ids
        assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-7)
        assert result.loops[0] == 4  # a prompt runs all loops: leaving earlier saves nothing
    depths = {loop for result in results for loop in result.loops[1:]}
    assert depths == {1} if milliseconds == 0 else depths == {4} if milliseconds == 1000 else depths & {2, 3}


def test_confidence_pays_the_head_at_every_loop(make_lm):
    engine = Engine(make_lm())
    (result,) = engine.generate([[1, 2, 3]], GREEDY, ConfidenceExit(kl=0.3))
    assert engine.stats.head_reads == sum(result.loops[1:])
    gated = Engine(make_lm())
    (result,) = gated.generate([[1, 2, 3]], SamplingParams(max_tokens=8), QuantileExit(0.5))
    assert gated.stats.head_reads == 7 and gated.stats.prompt_head_reads == 1


def test_vectorised_decisions_are_the_definitions():
    torch.manual_seed(0)
    hidden = torch.randn(4, 50, 6, dtype=torch.float64)
    logits = torch.randn(4, 50, 5, dtype=torch.float64)
    gate = torch.zeros(4, 50, dtype=torch.float64)
    by_change = exit_loops(HiddenDiffExit(3.0), gate, 4, hidden=hidden)
    by_kl = exit_loops(ConfidenceExit(kl=0.5), gate, 4, logits=logits)
    by_argmax = exit_loops(ConfidenceExit(stable_loops=1), gate, 4, logits=logits)
    for token in range(50):
        change = [(hidden[r, token] - hidden[r - 1, token]).norm().item() for r in range(1, 4)]
        assert by_change[token] == next((r + 2 for r, c in enumerate(change) if c <= 3.0), 4)
        p = logits[:, token].log_softmax(-1)
        kl = [(p[r - 1].exp() * (p[r - 1] - p[r])).sum().item() for r in range(1, 4)]
        assert by_kl[token] == next((r + 2 for r, d in enumerate(kl) if d <= 0.5), 4)
        best = logits[:, token].argmax(-1).tolist()
        assert by_argmax[token] == next((r + 1 for r in range(1, 4) if best[r] == best[r - 1]), 4)
    assert len(set(by_change.tolist())) == len(set(by_kl.tolist())) == len(set(by_argmax.tolist())) == 3


def test_nothing_leaves_at_loop_one_by_comparison():
    for policy in (HiddenDiffExit(1e9), ConfidenceExit(kl=1e9)):
        assert not policy.exits(Signals(1), 4)
        assert policy.exits(Signals(2, change=0.0, divergence=0.0), 4)
    assert Deadline(5).exits(Signals(1, elapsed_ms=3, pass_ms=2.5), 4)
    assert not Deadline(5).exits(Signals(1, elapsed_ms=3, pass_ms=2), 4)
    assert Deadline(math.pi).exits(Signals(4), 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: HiddenDiffExit(-1),
        lambda: HiddenDiffExit(math.nan),
        lambda: ConfidenceExit(),
        lambda: ConfidenceExit(kl=0.1, stable_loops=2),
        lambda: ConfidenceExit(kl=-0.1),
        lambda: ConfidenceExit(stable_loops=0),
        lambda: Deadline(-1),
        lambda: Deadline(math.inf),
    ],
)
def test_impossible_policies_are_refused(make):
    with pytest.raises(UserError, match="Exit|Deadline"):
        make()


def test_what_is_missing_is_said():
    with pytest.raises(ValueError, match="needs hidden"):
        exit_loops(HiddenDiffExit(1), torch.zeros(4, 2), 4)
    with pytest.raises(ValueError, match="needs logits"):
        exit_loops(ConfidenceExit(kl=1), torch.zeros(4, 2), 4)


def test_fixed_depth_reads_nothing_from_the_device(make_lm, monkeypatch):
    """No policy of the batch needs the gate, so its cdf is not computed."""
    monkeypatch.setattr("looplm.inference.decide.exit_cdf_of_one", None)
    (result,) = Engine(make_lm()).generate([[1, 2]], GREEDY, FixedDepth(2))
    assert result.loops == [2] * 8
