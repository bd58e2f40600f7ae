"""Drafting changes no text and no distribution, computes nothing twice, and its counts are right."""

import pytest
import torch

from looplm.errors import UserError
from looplm.inference import choice, packed, reference, speculative
from looplm.inference.engine import Engine, EngineStats
from looplm.inference.exit_policy import ConfidenceExit, FixedDepth, HiddenDiffExit, QuantileExit
from looplm.inference.sampling import SamplingParams
from looplm.inference.speculative import Costs, Speculation, best_draft_tokens, judge

GREEDY = SamplingParams(max_tokens=14, logprobs=True)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(("draft_loops", "draft_tokens"), [(1, 1), (1, 4), (2, 3), (3, 2), (1, None)])
def test_greedy_text_is_the_oracle_s(draft_loops, draft_tokens, make_lm, make_prompts):
    lm, prompts = make_lm("scalar_lora"), make_prompts(5, seed=8)
    exits = [FixedDepth(4), QuantileExit(0.5), QuantileExit(0.8), HiddenDiffExit(2.0), ConfidenceExit(kl=0.5)]
    engine = Engine(lm, max_batch=4)
    speculation = Speculation(draft_loops, draft_tokens)
    for prompt, exit, result in zip(
        prompts, exits, engine.generate(prompts, GREEDY, exits, speculation=speculation), strict=True
    ):
        expected = reference.generate(lm, prompt, GREEDY, exit)
        assert (result.token_ids, result.loops) == (expected.token_ids, expected.loops)
        assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-7)
    assert engine.stats.drafted_tokens


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("draft_vocab", [1, 12, (3, 28, 7, 7, 14, 21), 29])
def test_drafts_from_a_part_of_the_vocabulary_change_no_text(draft_vocab, make_lm, make_prompts):
    lm, prompts = make_lm("scalar_lora"), make_prompts(5, seed=8)
    exits = [FixedDepth(4), QuantileExit(0.5), QuantileExit(0.8), HiddenDiffExit(2.0), ConfidenceExit(kl=0.5)]
    engine = Engine(lm, max_batch=4)
    speculation = Speculation(1, 3, draft_vocab)
    seen = []
    outcome = choice.outcome

    def tell(request, flight):
        if flight.token is not None and not flight.final and not flight.forced:
            seen.append(flight.token)
        return outcome(request, flight)

    choice.outcome = tell
    try:
        results = list(engine.generate(prompts, GREEDY, exits, speculation=speculation))
    finally:
        choice.outcome = outcome
    for prompt, exit, result in zip(prompts, exits, results, strict=True):
        expected = reference.generate(lm, prompt, GREEDY, exit)
        assert (result.token_ids, result.loops) == (expected.token_ids, expected.loops)
        assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-7)
    assert engine.stats.drafted_tokens == len(seen) > 0
    # ConfidenceExit reads the whole head at every loop, and so may draft anything.
    allowed = set(range(draft_vocab)) if isinstance(draft_vocab, int) else set(draft_vocab)
    assert len([token for token in seen if token in allowed]) >= 0.7 * len(seen)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("exit", [FixedDepth(4), QuantileExit(0.5), HiddenDiffExit(2.0)], ids=str)
@pytest.mark.parametrize("draft_tokens", [1, 3, 30])
def test_every_loop_is_accounted_for(exit, draft_tokens, make_lm, make_prompts):
    """What texts have cost, drafts that did not stand included, is what the engine has run."""
    engine = Engine(make_lm("scalar_lora"), max_batch=4)
    results = list(engine.generate(make_prompts(5, seed=8), GREEDY, exit, speculation=Speculation(1, draft_tokens)))
    assert sum(result.rejected_token_loops for result in results) > 0
    computed = sum(sum(result.token_loops[1:]) + result.rejected_token_loops for result in results)
    assert computed == engine.stats.token_loops


@pytest.mark.parametrize(("draft_vocab", "brief"), [(None, False), (29, True), (5, True)])
def test_reads_of_the_short_head_are_counted_apart(draft_vocab, brief, agreeing):
    engine = Engine(agreeing)
    params = SamplingParams(max_tokens=13)
    (result,) = engine.generate([[1, 2, 3]], params, FixedDepth(4), speculation=Speculation(1, 3, draft_vocab))
    (plain,) = Engine(agreeing).generate([[1, 2, 3]], params, FixedDepth(4))
    assert result.token_ids == plain.token_ids
    drafts, tests = (9, 12) if draft_vocab != 5 else (engine.stats.drafted_tokens, engine.stats.head_reads)
    assert (engine.stats.draft_head_reads >= drafts) == brief and (engine.stats.draft_head_reads > 0) == brief
    assert engine.stats.head_reads == (tests if brief else 9 + 12)


def test_a_short_head_is_rows_of_the_head():
    lm_head = torch.nn.Linear(6, 20)
    heads = speculative.DraftHeads(lm_head)
    head = heads.head_for(Speculation(1, 2, (19, 3)))
    hidden = torch.randn(4, 6)
    logits, whole = head(hidden), lm_head(hidden)
    torch.testing.assert_close(logits[:, [3, 19]], whole[:, [3, 19]])
    assert logits.isfinite().all() and logits[:, [0, 2, 4, 18]].softmax(-1).max() < 1
    assert (logits.softmax(-1) > 0).sum() == 8
    assert heads.head_for(Speculation(2, None, [3, 19, 3])) is head
    heads.forget()
    assert heads.head_for(Speculation(1, 2, (19, 3))) is not head
    assert heads.head_for(Speculation(1)) is None and heads.head_for(None) is None


def test_a_short_head_of_a_packed_head_is_packed(make_lm):
    lm = make_lm(vocab_size=100).bfloat16()
    if not packed.can_pack(lm):
        pytest.skip("no bfloat16 products on this CPU")
    engine = Engine(lm, pack_weights=True)
    head = engine._intake.draft_heads.head_for(Speculation(1, 2, 80))
    assert isinstance(head.linear, packed.PackedLinear)
    hidden = torch.randn(1, 12).bfloat16()
    torch.testing.assert_close(head(hidden)[:, :80], lm.lm_head(hidden)[:, :80])


def test_new_weights_reach_the_short_head(agreeing):
    engine = Engine(agreeing)
    speculation = Speculation(1, 3, 29)
    list(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=5), FixedDepth(4), speculation=speculation))
    with torch.no_grad():
        agreeing.lm_head.weight.copy_(agreeing.lm_head.weight.flip(0))
    engine.stats = EngineStats()
    list(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=13), FixedDepth(4), speculation=speculation))
    assert engine.stats.acceptance == 1


@pytest.mark.parametrize("draft_tokens", [1, 2, 4])
def test_counts_where_every_draft_stands(draft_tokens, agreeing):
    """A round of k drafts and the token behind them takes s(k + 1) + R - s passes; none is made twice."""
    lm = agreeing
    rounds = 3
    tokens = 1 + rounds * (draft_tokens + 1)
    engine = Engine(lm)
    (result,) = engine.generate(
        [[1, 2, 3]], SamplingParams(max_tokens=tokens), FixedDepth(4), speculation=Speculation(1, draft_tokens)
    )
    assert engine.stats.accepted_tokens == engine.stats.drafted_tokens == rounds * draft_tokens
    assert engine.stats.weight_passes == rounds * (draft_tokens + 1 + 3)
    assert engine.stats.token_loops == 4 * (tokens - 1) == sum(result.token_loops[1:])
    assert engine.stats.head_reads == rounds * (2 * draft_tokens + 1)
    assert engine.stats.acceptance == 1


class DeepOnce:
    """The token after the prompt's first goes through all loops, those after it leave at loop 1.

    Drafted on, positions pass loop 1 in order: the first that does is the deep one.
    """

    needs = "nothing"

    def __init__(self):
        self.first_loops = 0

    def max_loops(self, trained_loops):
        return trained_loops

    def exits(self, signals, trained_loops):
        self.first_loops += signals.loop == 1
        return signals.loop >= trained_loops or (signals.loop == 1 and self.first_loops > 2)


def test_positions_go_no_deeper_than_they_have_to(agreeing):
    """What has left behind the last token that goes on is not taken along: the work is that without drafts."""
    engine = Engine(agreeing)
    (result,) = engine.generate([[1, 2]], SamplingParams(max_tokens=5), DeepOnce(), speculation=Speculation(1, 3))
    assert result.loops == [4, 4, 1, 1, 1]
    assert engine.stats.token_loops == sum(result.token_loops[1:]) == 4 + 1 + 1 + 1
    assert engine.stats.drafted_tokens == 1


def test_counts_match_a_model_that_counts(make_lm, make_prompts):
    """Every application of the core, and every real position in it, as the model itself sees them."""
    lm = make_lm("gqa")
    seen = {"passes": 0}
    run_core = lm.model.run_core

    def counting(*args):
        seen["passes"] += 1
        return run_core(*args)

    lm.model.run_core = counting
    engine = Engine(lm, max_batch=3)
    list(
        engine.generate(
            make_prompts(5), GREEDY, [QuantileExit(0.5)] * 3 + [FixedDepth(4)] * 2, speculation=Speculation(1, 2)
        )
    )
    assert engine.stats.weight_passes + engine.stats.prompt_weight_passes == seen["passes"]
    assert 0 < engine.stats.accepted_tokens < engine.stats.drafted_tokens


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("draft_vocab", [None, (0, 3, 4)])
def test_sampled_text_keeps_its_distribution(draft_vocab, make_lm):
    """All texts of two tokens over five, chi-square against the exact probabilities, seeds fixed."""
    lm = make_lm("ouro", vocab_size=5, num_hidden_layers=1)
    params = SamplingParams(max_tokens=3, temperature=1.3, top_k=4, seed=5, n=1500)
    engine = Engine(lm, max_batch=250)
    first = [1, 2, 3]
    results = list(engine.generate([first], params, FixedDepth(3), speculation=Speculation(1, 2, draft_vocab)))
    assert (engine.stats.draft_head_reads > 0) == (draft_vocab is not None)
    assert 0.2 < engine.stats.acceptance < 0.95
    counts: dict[tuple[int, ...], int] = {}
    for result in results:
        counts[tuple(result.token_ids)] = counts.get(tuple(result.token_ids), 0) + 1
    expected = exact_probabilities(lm, first, params, FixedDepth(3), 3)
    assert set(counts) <= set(expected)
    frequent = {text: p for text, p in expected.items() if p * len(results) >= 5}
    rest = 1 - sum(frequent.values())
    chi = sum((counts.get(text, 0) - len(results) * p) ** 2 / (len(results) * p) for text, p in frequent.items())
    others = len(results) - sum(counts.get(text, 0) for text in frequent)
    chi += (others - len(results) * rest) ** 2 / max(len(results) * rest, 1e-9)
    freedom = len(frequent)
    assert freedom > 10
    assert chi < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations


def exact_probabilities(lm, prompt, params, exit, length):
    """Text -> its probability under the oracle."""
    from looplm.inference.sampling import filtered_probabilities

    texts = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, p in texts.items():
            with torch.inference_mode():
                logits, _ = reference.next_logits(lm, [*prompt, *text], exit)
            for token, q in enumerate(filtered_probabilities(logits, params)[0].tolist()):
                if q > 0:
                    longer[(*text, token)] = p * q
        texts = longer
    return texts


def test_the_test_of_a_draft_keeps_the_target_exactly():
    """Over a fine grid of the two random numbers: what comes out is distributed as the target."""
    draft = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    target = torch.tensor([0.2, 0.4, 0.1, 0.3], dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    counts = torch.zeros(4, dtype=torch.float64)
    for _ in range(8000):
        token = int(torch.multinomial(draft, 1, generator=generator))
        instead = judge(token, draft, target, generator)
        counts[token if instead is None else instead] += 1
    chi = ((counts - 8000 * target) ** 2 / (8000 * target)).sum()
    assert chi < 16  # three degrees of freedom, p = 0.001


def test_a_greedy_draft_stands_if_it_is_the_likeliest():
    target = torch.tensor([0.1, 0.7, 0.2])
    assert judge(1, None, target, None) is None
    assert judge(0, None, target, None) == 1


def test_the_draft_length_follows_acceptance_and_cost():
    equal, dear_head = Costs(1.0, 0.0, 0.0), Costs(1.0, 3.0, 3.0)
    lengths = [best_draft_tokens(1, 4, a, equal) for a in (0.1, 0.5, 0.7, 0.9, 0.99)]
    assert lengths == sorted(lengths) and lengths[0] == 1 and lengths[-1] > 4
    assert best_draft_tokens(1, 4, 0.7, dear_head) <= best_draft_tokens(1, 4, 0.7, equal)
    assert best_draft_tokens(3, 4, 0.7, equal) <= best_draft_tokens(1, 4, 0.7, equal)
    brief = dear_head._replace(draft_read=0.3)
    assert best_draft_tokens(1, 4, 0.7, brief) > best_draft_tokens(1, 4, 0.7, dear_head)


@pytest.mark.parametrize("loops", [0, -1, True])
def test_impossible_drafts_are_refused(loops):
    with pytest.raises(UserError, match="draft_loops"):
        Speculation(loops, 1)
    with pytest.raises(UserError, match="draft_tokens"):
        Speculation(1, 0)


@pytest.mark.parametrize("vocab", [0, -3, True, [], [-1, 4], "abc", [1.5], 2.5])
def test_impossible_draft_vocabularies_are_refused(vocab):
    with pytest.raises((UserError, Exception), match="draft_vocab"):
        Speculation(1, 2, vocab)


@pytest.mark.parametrize("vocab", [30, [2, 29]])
def test_tokens_that_there_are_not_are_no_drafts(vocab, make_lm):
    with pytest.raises(UserError, match="^draft_vocab is (30 tokens|the token id 29), more than the vocabulary of 29"):
        Engine(make_lm()).generate([[1]], GREEDY, speculation=Speculation(1, 2, vocab))


def test_a_draft_needs_the_exact_cache(make_lm):
    for engine in (Engine(make_lm(), kv_cache="last"), Engine(make_lm("prelude_coda"))):
        with pytest.raises(UserError, match="per_loop"):
            engine.generate([[1]], GREEDY, speculation=Speculation(1, 2))


def test_a_draft_as_deep_as_the_text_is_no_draft(make_lm):
    engine = Engine(make_lm())
    (result,) = engine.generate([[1, 2]], GREEDY, FixedDepth(2), speculation=Speculation(2, 3))
    assert engine.stats.drafted_tokens == 0 and engine.stats.weight_passes == 2 * 13
    assert result.loops == [2] * 14
