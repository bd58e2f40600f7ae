"""The engine against the oracle that runs all loops of the whole text and then selects, in float64."""

import itertools

import pytest
import torch

from looplm.inference import reference
from looplm.inference.engine import Engine
from looplm.inference.exit_policy import FixedDepth, QuantileExit
from looplm.inference.sampling import SamplingParams

SHAPES = ["ouro", "gqa", "scalar_lora", "prelude_coda", "raw_state", "prelude_raw"]
THRESHOLDS = [0.0, 0.3, 0.5, 0.9, 1.0]
GREEDY = SamplingParams(max_tokens=10, logprobs=True)


def assert_same(result, expected, tolerance=1e-9):
    """Token for token, depth for depth, and the log-probabilities."""
    assert result.token_ids == expected.token_ids
    assert result.loops == expected.loops
    assert result.logprobs == pytest.approx(expected.logprobs, abs=tolerance)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("shape", SHAPES)
def test_adaptive_decoding_is_the_oracle(shape, make_lm, make_prompts):
    lm = make_lm(shape)
    trained = lm.model.config.num_loops
    prompts = make_prompts(8)
    policies = [QuantileExit(q) for q in THRESHOLDS] + [FixedDepth(1), FixedDepth(trained + 2)]
    # Every prompt meets two policies, every policy two or three prompts.
    cases = [(i, p) for i, p in itertools.product(range(8), range(len(policies))) if (i + p) % 7 in (0, 3)]
    oracle = {(i, p): reference.generate(lm, prompts[i], GREEDY, policies[p]) for i, p in cases}
    depths = {loop for (_, p), expected in oracle.items() if p in (1, 2, 3) for loop in expected.loops}
    assert len(depths) >= 3, "the gates of this model do not mix depths, so this test shows little"
    engine = Engine(lm)
    for batch in (1, 3, 8):
        for start in range(0, len(cases), batch):
            chosen = cases[start : start + batch]
            results = engine.generate([prompts[i] for i, _ in chosen], GREEDY, [policies[p] for _, p in chosen])
            for case, result in zip(chosen, results, strict=True):
                assert_same(result, oracle[case])


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_one_threshold_for_a_whole_batch(threshold, make_lm, make_prompts):
    lm, policy = make_lm("gqa"), QuantileExit(threshold)
    prompts = make_prompts(8, seed=5)
    oracle = [reference.generate(lm, prompt, GREEDY, policy) for prompt in prompts]
    for batch in (1, 3, 8):
        for result, expected in zip(
            Engine(lm, max_batch=batch).generate(prompts, GREEDY, policy), oracle, strict=True
        ):
            assert_same(result, expected)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("shape", ["scalar_lora", "prelude_coda"])
@pytest.mark.parametrize(("max_batch", "chunk_size"), [(1, 3), (3, 512), (4, 2), (8, 1)])
def test_queueing_and_chunks_change_nothing(shape, max_batch, chunk_size, make_lm, make_prompts):
    lm = make_lm(shape)
    prompts = make_prompts(7, seed=3)
    exits = [QuantileExit(q) for q in (0.3, 0.5, 0.6, 0.0, 1.0, 0.4)] + [FixedDepth(2)]
    sampling = [SamplingParams(max_tokens=n, logprobs=True) for n in (12, 1, 7, 12, 3, 9, 5)]
    plain = list(Engine(lm).generate(prompts, sampling, exits))
    engine = Engine(lm, max_batch=max_batch, chunk_size=chunk_size)
    for result, expected in zip(engine.generate(prompts, sampling, exits), plain, strict=True):
        assert_same(result, expected)
        assert result.token_loops == expected.token_loops
        assert result.index == expected.index


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_request_alone_is_the_same_request_among_31_others(make_lm, make_prompts):
    lm = make_lm("scalar_lora")
    prompts = make_prompts(32, seed=4)
    exits = [QuantileExit([0.0, 0.3, 0.5, 0.7, 1.0][i % 5]) if i % 7 else FixedDepth(1 + i % 4) for i in range(32)]
    sampling = [
        SamplingParams(max_tokens=4 + i % 9, temperature=[0, 0.8, 1.5][i % 3], top_k=i % 4, seed=i, logprobs=True)
        for i in range(32)
    ]
    crowd = list(Engine(lm, max_batch=32).generate(prompts, sampling, exits))
    assert len({loop for result in crowd for loop in result.loops}) == 4
    for i, result in enumerate(crowd):
        (alone,) = Engine(lm).generate([prompts[i]], sampling[i], exits[i])
        assert_same(result, alone)


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}])
def test_sampling_is_the_oracle_too(filters, make_lm, make_prompts):
    lm = make_lm("gqa")
    prompts = make_prompts(3, seed=6)
    params = [SamplingParams(max_tokens=8, temperature=1.2, seed=seed, logprobs=True, **filters) for seed in (1, 2, 2)]
    for prompt, p, result in zip(
        prompts, params, Engine(lm).generate(prompts, params, QuantileExit(0.5)), strict=True
    ):
        assert_same(result, reference.generate(lm, prompt, p, QuantileExit(0.5)))


def test_n_samples_are_n_requests(make_lm, make_prompts):
    lm = make_lm()
    prompts = make_prompts(2)
    params = SamplingParams(max_tokens=8, temperature=1.5, seed=3, n=3, logprobs=True)
    results = list(Engine(lm, max_batch=4).generate(prompts, params, QuantileExit(0.5)))
    assert [(r.index, r.sample) for r in results] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    for result in results:
        expected = reference.generate(lm, prompts[result.index], params, QuantileExit(0.5), sample_index=result.sample)
        assert_same(result, expected)
    assert len({tuple(result.token_ids) for result in results}) == 6


def test_beyond_the_trained_depth(make_lm, make_prompts):
    """Per-loop parameters beyond R are those of loop R, in engine and oracle alike."""
    lm = make_lm("scalar_lora")
    prompts = make_prompts(2)
    for prompt, result in zip(prompts, Engine(lm).generate(prompts, GREEDY, FixedDepth(6)), strict=True):
        assert result.loops == [6] * 10
        assert_same(result, reference.generate(lm, prompt, GREEDY, FixedDepth(6)))


def test_the_oracle_reads_what_a_forward_gives(make_lm):
    """Without a coda the oracle's logits are those of the model's own forward at the chosen loop."""
    lm = make_lm("gqa")
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    out = lm.model(torch.tensor([prompt]))
    for threshold in THRESHOLDS:
        logits, loop = reference.next_logits(lm, prompt, QuantileExit(threshold))
        torch.testing.assert_close(logits, lm.lm_head(out.loop_hidden_states[loop - 1][:, -1]))


def test_a_single_loop(make_lm, make_prompts):
    lm = make_lm(num_loops=1)
    prompts = make_prompts(3)
    for prompt, result in zip(prompts, Engine(lm).generate(prompts, GREEDY, QuantileExit(0.5)), strict=True):
        assert_same(result, reference.generate(lm, prompt, GREEDY, QuantileExit(0.5)))
        assert result.loops == [1] * 10
