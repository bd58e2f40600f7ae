"""Requests that come and go: prompts that hold nobody up, prefixes computed once, texts as they are written."""

import pytest

from looplm.data.tokenizer import train_tokenizer
from looplm.errors import UserError
from looplm.inference import reference
from looplm.inference.engine import Engine, EngineStats
from looplm.inference.exit_policy import FixedDepth, QuantileExit
from looplm.inference.prompts import Parts
from looplm.inference.sampling import SamplingParams
from looplm.inference.text import TextStream, final_text, token_texts

EIGHT = SamplingParams(max_tokens=8)


def finish(engine):
    results = []
    while engine.num_unfinished:
        results += engine.step()
    return results


def test_a_long_prompt_does_not_hold_up_running_texts(make_lm):
    """While 40 tokens are read in chunks of 4, four loops each, every step brings the other text one loop on."""
    engine = Engine(make_lm(), chunk_size=4)
    (short,) = engine.submit([1], SamplingParams(max_tokens=40), FixedDepth(1))
    engine.step()
    (long,) = engine.submit([2] * 40, EIGHT, FixedDepth(4))
    for _ in range(39):
        before = len(short.token_ids)
        work = engine.stats.prompt_token_loops
        engine.step()
        assert engine.stats.prompt_token_loops - work <= 4
        assert len(short.token_ids) == min(before + 1, 40)
        assert not long.token_ids
    engine.step()
    assert long.token_ids


def test_prompts_at_different_loops_share_a_pass(make_lm):
    engine = Engine(make_lm())
    engine.submit([1, 2, 3], EIGHT, FixedDepth(4))
    engine.step()
    engine.submit([4, 5], EIGHT, FixedDepth(4))
    for _ in range(4):
        engine.step()
    assert engine.stats.prompt_weight_passes == 5
    finish(engine)


@pytest.mark.parametrize("strategy", ["per_loop", "fill", "last", "mean", "first"])
def test_samples_share_their_prompt(strategy, make_lm):
    lm = make_lm("gqa")
    params = SamplingParams(max_tokens=6, temperature=1.4, seed=3, n=5, logprobs=True, prompt_logprobs=True)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    shared, apart = Engine(lm, kv_cache=strategy, max_batch=3), Engine(lm, kv_cache=strategy, share_prefixes=False)
    results = list(shared.generate([prompt], params, QuantileExit(0.5)))
    for result, expected in zip(results, apart.generate([prompt], params, QuantileExit(0.5)), strict=True):
        assert (result.token_ids, result.loops) == (expected.token_ids, expected.loops)
        assert result.prompt_logprobs == pytest.approx(expected.prompt_logprobs)
    assert shared.stats.prompt_token_loops == 4 * 11 and apart.stats.prompt_token_loops == 5 * 4 * 11
    assert shared.stats.shared_prompt_tokens == 4 * 11
    assert len({tuple(result.token_ids) for result in results}) > 1


def test_a_common_beginning_is_computed_once(make_lm):
    """Few-shot examples before every question; also when all arrive at once."""
    lm = make_lm("scalar_lora")
    shots = [(7 * i) % 29 for i in range(35)]
    prompts = [[*shots, 1, i] for i in range(4)]
    engine = Engine(lm)
    for prompt, result in zip(prompts, engine.generate(prompts, EIGHT, QuantileExit(0.5)), strict=True):
        assert result.token_ids == reference.generate(lm, prompt, EIGHT, QuantileExit(0.5)).token_ids
    assert engine.stats.prompt_token_loops == 4 * (37 + 3 * (37 - 32))
    engine.stats = EngineStats()
    list(engine.generate([[*shots, 8]], EIGHT, QuantileExit(0.5)))
    assert engine.stats.prompt_token_loops == 4 * 4


def test_a_chat_s_next_turn_computes_only_what_is_new(make_lm):
    lm = make_lm()
    engine = Engine(lm)
    turn = [1, 2, 3, 4, 5]
    (answer,) = engine.generate([turn], SamplingParams(max_tokens=20), FixedDepth(4))
    engine.stats = EngineStats()
    history = [*turn, *answer.token_ids, 6, 7]
    (result,) = engine.generate([history], EIGHT, FixedDepth(4))
    assert result.token_ids == reference.generate(lm, history, EIGHT, FixedDepth(4)).token_ids
    # The last token of the answer was never run, and two are new.
    assert engine.stats.prompt_token_loops == 4 * 3


@pytest.mark.parametrize("strategy", ["last", "mean", "first"])
def test_parts_are_computed_once_where_one_set_is_kept(strategy, make_lm):
    lm = make_lm("gqa")
    prompts = [Parts([1, 2, 3, 4, 5, 6, 7], [8, 9, i]) for i in range(4)]
    engine, apart = Engine(lm, kv_cache=strategy), Engine(lm, kv_cache=strategy, share_prefixes=False)
    results = list(engine.generate(prompts, EIGHT, QuantileExit(0.5)))
    for result, expected in zip(results, apart.generate(prompts, EIGHT, QuantileExit(0.5)), strict=True):
        assert (result.token_ids, result.loops) == (expected.token_ids, expected.loops)
    assert engine.stats.prompt_token_loops == 4 * (7 + 4 * 3)
    engine.stats = EngineStats()
    # The same tokens in one part are another prompt.
    list(engine.generate([[1, 2, 3, 4, 5, 6, 7, 8, 9, 0]], EIGHT, QuantileExit(0.5)))
    assert engine.stats.prompt_token_loops == 4 * 10


def test_depths_do_not_share(make_lm):
    engine = Engine(make_lm())
    prompts = [[1, 2] * 20] * 2
    list(engine.generate(prompts, EIGHT, [FixedDepth(4), FixedDepth(2)]))
    assert engine.stats.shared_prompt_tokens == 0


def test_a_leader_that_is_cancelled_leaves_its_samples_alive(make_lm):
    lm = make_lm()
    params = SamplingParams(max_tokens=5, temperature=1.0, seed=1, n=3)
    expected = [r.token_ids for r in Engine(lm).generate([[1] * 9], params, FixedDepth(4))]
    engine = Engine(lm, chunk_size=4)
    requests = engine.submit([1] * 9, params, FixedDepth(4))
    engine.step()
    engine.cancel(requests[:1])
    finish(engine)
    assert [request.token_ids for request in requests[1:]] == expected[1:]


def test_step_returns_what_has_finished_and_only_submitted_requests(make_lm):
    engine = Engine(make_lm())
    texts = engine.generate([[1, 2]], EIGHT, FixedDepth(1))
    engine.submit([3, 4], SamplingParams(max_tokens=3), FixedDepth(1), index=7)
    (result,) = texts
    assert result.index == 0
    assert [r.index for r in finish(engine)] == [7] or engine.num_unfinished == 0


# --- Streaming --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on the mat. " * 20], 280)


def test_pieces_join_to_the_text(make_lm, tokenizer):
    engine = Engine(make_lm(vocab_size=len(tokenizer)), tokenizer)
    params = SamplingParams(max_tokens=30, temperature=2.0, seed=1, n=2)
    results = list(engine.generate(["the cat"], params, QuantileExit(0.5)))
    pieces = list(engine.stream("the cat", params, QuantileExit(0.5)))
    for result in results:
        own = [piece for piece in pieces if piece.sample == result.sample]
        assert "".join(piece.text for piece in own) == result.text
        assert [token for piece in own for token in piece.token_ids] == result.token_ids
        assert [loop for piece in own for loop in piece.loops] == result.loops
        assert [piece.finish_reason for piece in own] == [None] * (len(own) - 1) + ["length"]
    assert len(pieces) > 20


def test_a_stop_string_is_never_shown(make_lm, tokenizer):
    engine = Engine(make_lm(vocab_size=len(tokenizer)), tokenizer)
    (plain,) = engine.generate(["the cat"], SamplingParams(max_tokens=20), QuantileExit(0.5))
    stop = plain.text[6:8]
    params = SamplingParams(max_tokens=20, stop=stop)
    (result,) = engine.generate(["the cat"], params, QuantileExit(0.5))
    assert result.finish_reason == "stop"
    assert "".join(piece.text for piece in engine.stream("the cat", params, QuantileExit(0.5))) == result.text


@pytest.mark.parametrize("text", ["déjà vu 漢字 🙂 ok", "aaab", "ends in 漢"])
@pytest.mark.parametrize("stop", [(), ("aab",), ("字 🙂",), ("zzz", "vu")])
def test_text_comes_whole(text, stop, tokenizer):
    """Characters of several tokens come complete; a stop string that begins inside another's start is seen."""
    token_ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, stop)
    shown = [stream.add(token) for token in token_ids]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in shown)
    assert "".join(shown) + stream.finish() == final_text(tokenizer, token_ids, stop)
    if not stop:
        assert shown == token_texts(tokenizer, token_ids)


def test_half_a_character_is_shown_only_at_the_end(tokenizer):
    token_ids = tokenizer.encode("漢")[:-1]
    stream = TextStream(tokenizer)
    assert [stream.add(token) for token in token_ids] == [""] * len(token_ids)
    assert stream.finish() == tokenizer.decode(token_ids)


def test_streaming_needs_a_tokenizer(make_lm):
    with pytest.raises(UserError, match="tokenizer"):
        Engine(make_lm()).stream([1, 2])


# --- Choosing tokens --------------------------------------------------------------------------------------------


def test_the_repetition_penalty_counts_prompt_and_text(make_lm):
    lm = make_lm()
    params = SamplingParams(max_tokens=12, repetition_penalty=5.0)
    (plain,) = Engine(lm).generate([[1, 2, 3]], SamplingParams(max_tokens=12), FixedDepth(4))
    (result,) = Engine(lm).generate([[1, 2, 3]], params, FixedDepth(4))
    assert result.token_ids == reference.generate(lm, [1, 2, 3], params, FixedDepth(4)).token_ids
    assert len(set(result.token_ids)) > len(set(plain.token_ids))
