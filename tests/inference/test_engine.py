"""What the engine counts, when it stops, what it refuses, and what it does with a broken model."""

import subprocess
import sys
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from looplm.data.tokenizer import train_tokenizer
from looplm.errors import UserError
from looplm.inference import capacity
from looplm.inference.engine import Engine
from looplm.inference.exit_policy import FixedDepth, QuantileExit
from looplm.inference.results import EngineStats
from looplm.inference.sampling import SamplingParams
from looplm.model.flops import cache_bytes_per_token

TWELVE = SamplingParams(max_tokens=12)


def suffix_max(loops):
    return list(accumulate(reversed(loops), max))[::-1]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on the mat. " * 20], 280)


@pytest.fixture
def text_engine(make_lm, tokenizer):
    """An engine on text, and the model's greedy continuation of "the cat"."""
    engine = Engine(make_lm(vocab_size=len(tokenizer)), tokenizer)
    return engine, next(engine.generate("the cat", TWELVE, QuantileExit(0.5)))


# --- Counts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_weight_passes_alone_are_the_claimed_depths(threshold, make_lm, make_prompts):
    """Catching up rides along: it adds no pass."""
    engine = Engine(make_lm())
    for prompt in make_prompts(3):
        engine.stats = EngineStats()
        (result,) = engine.generate([prompt], TWELVE, QuantileExit(threshold))
        assert engine.stats.weight_passes == sum(result.loops[1:])  # the first token is read out of the prompt
        assert engine.stats.prompt_weight_passes == 4
        assert engine.stats.prompt_token_loops == 4 * len(prompt)
        assert engine.stats.generated_tokens == 12
        assert engine.stats.mean_loops == pytest.approx(sum(result.loops) / 12)


@pytest.mark.parametrize("num_loops", [1, 2, 4, 6])
def test_fixed_depth_makes_that_many_passes_a_token(num_loops, make_lm):
    engine = Engine(make_lm())
    (result,) = engine.generate([[1, 2, 3]], TWELVE, FixedDepth(num_loops))
    assert engine.stats.weight_passes == engine.stats.token_loops == 11 * num_loops
    # Nothing deeper is ever read, so the prompt stops there as well.
    assert engine.stats.prompt_weight_passes == num_loops
    assert result.loops == result.token_loops == [num_loops] * 12


@pytest.mark.parametrize("chunk_size", [2, 512])
def test_token_loops_are_the_suffix_maximum_of_the_depths(chunk_size, make_lm, make_prompts):
    """A position is computed as deep as the deepest of it and all later ones, which read its keys there."""
    engine = Engine(make_lm(), max_batch=3, chunk_size=chunk_size)
    results = list(engine.generate(make_prompts(5), TWELVE, QuantileExit(0.5)))
    assert len({loop for result in results for loop in result.loops[1:]}) == 4
    assert sum(sum(result.loops[1:]) for result in results) < engine.stats.token_loops < 5 * 11 * 4
    for result in results:
        assert result.token_loops == [4, *suffix_max(result.loops[1:])]  # the prompt has run all loops
    assert engine.stats.token_loops == sum(sum(result.token_loops[1:]) for result in results)


def test_a_batch_shares_passes(make_lm):
    engine = Engine(make_lm())
    results = list(engine.generate([[1, 2, 3]] * 6, TWELVE, FixedDepth(3)))
    assert engine.stats.weight_passes == 33
    assert engine.stats.token_loops == 6 * 33
    assert engine.stats.prompt_weight_passes == 3
    assert [result.index for result in results] == list(range(6))


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_long_catch_up_goes_in_chunks(make_lm):
    """A token that goes deep after many shallow ones takes at most `chunk_size` positions a pass."""
    lm = make_lm()
    engine = Engine(lm, chunk_size=3)
    whole = Engine(lm)
    for prompt in ([1, 2], [5], [9, 9, 9]):
        (result,) = engine.generate([prompt], replace(TWELVE, max_tokens=40), QuantileExit(0.35))
        (expected,) = whole.generate([prompt], replace(TWELVE, max_tokens=40), QuantileExit(0.35))
        assert result == expected
    assert engine.stats.token_loops == whole.stats.token_loops
    assert engine.stats.weight_passes > whole.stats.weight_passes


@pytest.mark.parametrize("threshold", [1, 1.0, 2.0])
def test_all_loops_means_all_loops_in_bfloat16(threshold, make_lm):
    lm = make_lm().bfloat16()
    torch.nn.init.constant_(lm.model.early_exit_gate.bias, 20.0)
    torch.nn.init.zeros_(lm.model.early_exit_gate.weight)
    (result,) = Engine(lm).generate([[1, 2, 3]], TWELVE, QuantileExit(threshold))
    assert result.loops == [4] * 12
    (result,) = Engine(lm).generate([[1, 2, 3]], TWELVE, QuantileExit(0.999))
    assert result.loops == [1] * 12


def test_cache_bytes_are_those_of_the_cost_model(make_lm):
    lm = make_lm("gqa")
    per_token = cache_bytes_per_token(lm.model.config, "per_loop", dtype_bytes=8).decode
    engine = Engine(lm, max_batch=2)
    list(engine.generate([[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 5]], TWELVE, QuantileExit(1)))
    positions = 4 + 12 - 1  # the last token is never run
    assert engine.stats.cache_bytes_in_use == 2 * positions * per_token
    assert engine.stats.cache_bytes == (2 * 16 + 2) * per_token  # in blocks of 16, and two rows for padding
    shallow = Engine(lm)
    list(shallow.generate([[1, 2, 3, 4]], TWELVE, FixedDepth(1)))
    assert shallow.stats.cache_bytes_in_use == positions * per_token / 4


# --- When a text ends -------------------------------------------------------------------------------------------


def test_text_in_text_out(text_engine, tokenizer):
    engine, result = text_engine
    assert result.prompt_token_ids == tokenizer.encode("the cat")
    assert result.text == tokenizer.decode(result.token_ids, skip_special_tokens=True)
    assert result.finish_reason == "length" and len(result.token_ids) == 12
    assert result.logprobs is None
    (again,) = engine.generate([result.prompt_token_ids], TWELVE, QuantileExit(0.5))
    assert again == result


def test_a_stop_token_ends_the_text_and_is_not_shown(text_engine, tokenizer):
    engine, plain = text_engine
    stop = plain.token_ids[5]
    first = plain.token_ids.index(stop)
    (result,) = engine.generate(["the cat"], replace(TWELVE, stop_token_ids=[stop]), QuantileExit(0.5))
    assert result.token_ids == plain.token_ids[: first + 1]
    assert result.loops == plain.loops[: first + 1]
    assert result.finish_reason == "stop"
    assert result.text == tokenizer.decode(plain.token_ids[:first])


def test_a_stop_string_ends_the_text_and_is_not_shown(text_engine):
    engine, plain = text_engine
    stop = plain.text[6:8]
    (result,) = engine.generate(["the cat"], replace(TWELVE, stop=[stop, "never"]), QuantileExit(0.5))
    assert result.finish_reason == "stop"
    assert result.text == plain.text[: plain.text.index(stop)]
    assert result.token_ids == plain.token_ids[: len(result.token_ids)]
    assert len(result.token_ids) < 12


@pytest.mark.parametrize("where", ["tokenizer", "turn", "config", "generation_config"])
def test_end_tokens_come_from_wherever_a_checkpoint_names_them(where, text_engine):
    """Released base configs name neither <|im_end|> nor the chat template's end, and chats never stopped."""
    plain = text_engine[1]
    end = plain.token_ids[4]
    lm = text_engine[0].model
    given = end if where == "config" else None
    lm.config = SimpleNamespace(eos_token_id=given, exit_threshold=None, exit_epsilon=None)
    lm.generation_config = SimpleNamespace(eos_token_id=[end, 3] if where == "generation_config" else None)
    tokenizer = SimpleNamespace(
        eos_token_id=end if where == "tokenizer" else None,
        added_tokens_decoder={end: SimpleNamespace(content="<|im_end|>", special=where == "turn")},
        encode=lambda text: plain.prompt_token_ids,
        decode=lambda token_ids, skip_special_tokens=False: "",
    )
    engine = Engine(lm, tokenizer)
    (result,) = engine.generate(["the cat"], TWELVE, QuantileExit(0.5))
    assert result.token_ids == plain.token_ids[: plain.token_ids.index(end) + 1]
    assert result.finish_reason == "stop"
    (result,) = engine.generate(["the cat"], replace(TWELVE, ignore_eos=True), QuantileExit(0.5))
    assert result.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("saved", "expected"), [(None, FixedDepth(4)), (1.0, FixedDepth(4)), (0.4, QuantileExit(0.4))]
)
def test_without_a_policy_the_checkpoint_decides(saved, expected, make_lm):
    lm = make_lm()
    assert Engine(lm).default_exit == FixedDepth(4)
    lm.config = SimpleNamespace(eos_token_id=None, exit_threshold=saved, exit_epsilon=None)
    lm.generation_config = SimpleNamespace(eos_token_id=None)
    assert Engine(lm).default_exit == expected
    (result,) = Engine(lm).generate([[1, 2]], TWELVE)
    (same,) = Engine(lm).generate([[1, 2]], TWELVE, expected)
    assert result == same


@pytest.mark.usefixtures("unchecked_shapes")
def test_two_calls_at_a_time_do_not_meet(make_lm, make_prompts):
    engine = Engine(make_lm())
    prompts = make_prompts(4)
    plain = list(engine.generate(prompts, TWELVE, QuantileExit(0.5)))
    first, second = (engine.generate(prompts, TWELVE, QuantileExit(0.5)) for _ in range(2))
    for expected, one, other in zip(plain, first, second, strict=True):
        assert one == other == expected
    assert torch.is_inference_mode_enabled() is False


def test_no_prompts_no_results(make_lm):
    assert list(Engine(make_lm()).generate([])) == []


# --- What is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1, 2], []], "Prompt 1: The prompt is empty"),
        ([[1, 29]], "token id 29, outside the vocabulary of 29"),
        ([[-1]], "token id -1"),
        ([[1] * 60], "60 tokens; with max_tokens 12 that is 72, more than the 64 positions"),
        (["text"], "no tokenizer"),
    ],
)
def test_prompts_that_cannot_be_served_are_refused_before_anything_runs(prompts, message, make_lm):
    engine = Engine(make_lm())
    with pytest.raises(UserError, match=message):
        engine.generate(prompts, TWELVE)
    assert engine.stats == EngineStats()


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("strategy", ["per_loop", "mean"])
def test_a_prompt_that_is_too_long_is_refused_alone(limit, strategy, make_lm):
    """Over the context, or over the memory limit: its results say so, and the others are what they are alone."""
    lm = make_lm()
    memory_bytes = None if limit is None else capacity.bytes_for(lm.model, strategy, limit, 4)
    engine = Engine(lm, kv_cache=strategy, memory_bytes=memory_bytes)
    long = [1] * (60 if limit is None else 30)
    params = replace(TWELVE, n=2, temperature=1.0, seed=4)
    results = list(engine.generate([[1, 2], long, [3]], [TWELVE, params, TWELVE], FixedDepth(4)))
    assert [(r.index, r.sample) for r in results] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    for result in results[1:3]:
        assert (result.finish_reason, result.token_ids, result.loops, result.token_loops) == ("error", [], [], [])
        assert result.prompt_token_ids == long
        assert result.error.startswith("The prompt has 60 tokens" if limit is None else "41 positions at 4 loops take")
    for result, prompt in ((results[0], [1, 2]), (results[3], [3])):
        (alone,) = Engine(lm, kv_cache=strategy).generate([prompt], TWELVE, FixedDepth(4))
        assert result == replace(alone, index=result.index)
    with pytest.raises(UserError, match="Prompt 0: (The prompt has 60|41 positions)"):
        engine.generate([long], TWELVE, FixedDepth(4))
    with pytest.raises(UserError, match="Prompt 0: (The prompt has 60|41 positions)"):
        engine.submit(long, TWELVE, FixedDepth(4))
    assert engine.num_unfinished == 0


def test_what_the_system_has_no_memory_for_is_refused_alone(make_lm):
    """Ten to the fourteen loops: a step does not raise, and what waits beside it runs."""
    lm = make_lm()
    (alone,) = Engine(lm).generate([[1, 2]], TWELVE, FixedDepth(4))
    engine = Engine(lm)
    (before,) = engine.submit([1, 2], TWELVE, FixedDepth(4), index=1)
    (deep,) = engine.submit([1, 2], TWELVE, FixedDepth(10**14), index=2)
    (after,) = engine.submit([1, 2], TWELVE, FixedDepth(4), index=3)
    results = []
    while engine.num_unfinished:
        results += engine.step()
    assert sorted(result.index for result in results) == [1, 2, 3]
    assert deep.finish_reason == "error" and deep.error.startswith("No memory for 16 positions")
    assert before.token_ids == after.token_ids == alone.token_ids
    one, other = engine.generate([[1, 2], [1, 2]], TWELVE, [FixedDepth(4), FixedDepth(10**14)])
    assert one.token_ids == alone.token_ids and other.error == deep.error


def test_a_request_has_no_result_before_it_has_finished(make_lm):
    engine = Engine(make_lm())
    (request,) = engine.submit([1], TWELVE, FixedDepth(1))
    with pytest.raises(UserError, match="not finished"):
        engine.result(request)


def test_a_stream_of_what_does_not_fit_is_refused(text_engine):
    engine, _ = text_engine
    with pytest.raises(UserError, match="No memory for"):
        next(engine.stream("the cat", TWELVE, FixedDepth(10**14)))
    with pytest.raises(UserError, match="positions of the context"):
        engine.stream("the cat" * 40, TWELVE)
    assert engine.num_unfinished == 0


def test_the_context_can_be_filled_to_the_last_position(make_lm):
    (result,) = Engine(make_lm()).generate([[1] * 52], TWELVE, QuantileExit(0.5))
    assert len(result.token_ids) == 12
    with pytest.raises(UserError, match="that is 13, more than the 12 positions"):
        Engine(make_lm(), max_len=12).generate([[1]], TWELVE)


def test_an_empty_text_is_an_empty_prompt(text_engine):
    with pytest.raises(UserError, match="Prompt 0: The prompt is empty"):
        text_engine[0].generate("")


def test_lists_must_fit_the_prompts(make_lm):
    engine = Engine(make_lm())
    with pytest.raises(UserError, match="exit has 1 entries for 2 prompts"):
        engine.generate([[1], [2]], TWELVE, [FixedDepth(1)])
    with pytest.raises(UserError, match="sampling has 3 entries for 2 prompts"):
        engine.generate([[1], [2]], [TWELVE] * 3)


def test_stop_strings_need_a_tokenizer(make_lm):
    with pytest.raises(UserError, match="tokenizer"):
        Engine(make_lm()).generate([[1]], SamplingParams(max_tokens=2, stop="x"))


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    "options",
    [
        {"max_batch": 0},
        {"max_len": -1},
        {"chunk_size": 0},
        {"kv_cache": "latest"},
        {"memory_bytes": 0},
        {"max_batch": 10**9},
        {"clock": 3},
    ],
)
def test_impossible_engines_are_refused(options, make_lm):
    with pytest.raises(UserError, match=next(iter(options))):
        Engine(make_lm(), **options)


def test_more_memory_than_there_is_is_said(make_lm):
    results = Engine(make_lm()).generate([[1, 2]], TWELVE, FixedDepth(10**14))
    with pytest.raises(UserError, match=r"No memory for 16 positions.* GiB"):
        next(results)


def test_a_text_that_is_not_unicode_is_refused(text_engine):
    with pytest.raises(UserError, match="Prompt 0: The prompt is not valid Unicode text at character 4"):
        text_engine[0].generate(["the \udcff"])


WRONG_TYPES = [
    ('engine.generate([["a"]])', "Prompt 0: The prompt has 'a' where a token id should be"),
    ("engine.generate([[[1]]])", "Prompt 0: The prompt has [1] where"),
    ("engine.generate([[1.7]])", "Prompt 0: The prompt has 1.7 where"),
    ("engine.generate([[True]])", "Prompt 0: The prompt has True where"),
    ('engine.generate([b"ab"])', "Prompt 0: The prompt is b'ab'"),
    ('engine.generate(b"ab")', "The prompts are b'ab'"),
    ("engine.generate([1, 2])", "Prompt 0: The prompt is 1"),
    ("engine.generate(5)", "The prompts are 5"),
    ("engine.generate([[1]], {})", "sampling is {}"),
    ("engine.generate([[1]], None, QuantileExit)", "exit is <class"),
    ("engine.generate([[1]], None, [QuantileExit])", "exit is [<class"),
    ("SamplingParams(stop=5)", "stop is 5"),
    ("SamplingParams(stop=[5])", "stop holds 5"),
    ('SamplingParams(stop="\\ud800")', "stop is not valid Unicode"),
    ("SamplingParams(stop_token_ids=5)", "stop_token_ids is 5"),
    ('SamplingParams(stop_token_ids="5")', "stop_token_ids is '5'"),
    ("SamplingParams(stop_token_ids=[1.5])", "stop_token_ids has 1.5"),
    ("Engine(None)", "The model is a NoneType"),
    ('Engine("stdlib-small")', "The model is a str"),
    ('Engine(engine.model, "name")', "tokenizer is 'name'"),
    ('Engine(LM(config).to("meta"))', "meta device"),
]


def test_values_of_the_wrong_type_are_refused():
    """In a process of its own: here the shape checker would refuse them first."""
    code = f"""
from torch import nn
from looplm.errors import UserError
from looplm.inference import Engine, QuantileExit, SamplingParams
from looplm.model.config import LoopedConfig
from looplm.model.looped import LoopedTransformer

class LM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.model, self.lm_head = LoopedTransformer(config), nn.Linear(8, 9)

config = LoopedConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                      num_key_value_heads=1, head_dim=8, num_loops=2, max_position_embeddings=80)
engine = Engine(LM(config))
for call in {[call for call, _ in WRONG_TYPES]!r}:
    try:
        print("accepted", eval(call))
    except UserError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert len(lines) == len(WRONG_TYPES), done.stdout + done.stderr
    for line, (_, message) in zip(lines, WRONG_TYPES, strict=True):
        assert line.startswith(message) or message == "meta device" and message in line


# --- A broken model ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("shape", ["ouro", "prelude_coda"])
@pytest.mark.parametrize("max_batch", [1, 2, 4])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_one_request_breaks_and_the_others_go_on(shape, max_batch, poison, make_lm):
    """With two slots, the third request takes over the broken one's, and reads as far as the long first one's keys."""
    lm = make_lm(shape)
    lm.model.embed_tokens.weight.data[7] = poison
    prompts = [[1, 2] * 10, [3, 7, 4, 5, 6, 8, 9, 10, 11], [5, 6, 2], [4]]
    results = list(Engine(lm, max_batch=max_batch).generate(prompts, TWELVE, QuantileExit(0.5)))
    assert results[1].finish_reason == "error"
    assert results[1].token_ids == results[1].loops == []
    for i in (0, 2, 3):
        (alone,) = Engine(lm).generate([prompts[i]], TWELVE, QuantileExit(0.5))
        assert results[i].token_ids == alone.token_ids and results[i].loops == alone.loops
        # A token that embeds to NaN may also be drawn; then the text ends there.
        assert results[i].finish_reason == ("error" if 7 in alone.token_ids else "length")
