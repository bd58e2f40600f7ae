"""lm-eval's adapter against direct computation, the oracle and the engine."""

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the extra `eval`")

from lm_eval.api.instance import Instance

from looplm.errors import UserError
from looplm.evaluation.lm_eval_adapter import Batching, LoopLMAdapter, Work, sampling_of
from looplm.evaluation.setting import Setting
from looplm.hf.load import load, load_tokenizer
from looplm.hf.save import save_checkpoint
from looplm.inference import (
    ConfidenceExit,
    Deadline,
    Engine,
    FixedDepth,
    HiddenDiffExit,
    QuantileExit,
    SamplingParams,
)
from looplm.inference.exit_policy import exit_loops
from looplm.inference.reference import prompt_logprobs
from looplm.model.flops import inference_flops
from looplm.quickstart.shipped import shipped_directory

TEXTS = [("def add(a, b):\n    return", " a + b\n"), ("", "import os"), ("class A:\n", "    pass\n"), ("x = ", "1")]
SETTINGS = [FixedDepth(1), FixedDepth(2), FixedDepth(6), QuantileExit(0.3), QuantileExit(0.7), QuantileExit(1.0)]
STATES = [HiddenDiffExit(6.0), HiddenDiffExit(12.0)]


@pytest.fixture(scope="module")
def model():
    return load(shipped_directory(), dtype="float64")


@pytest.fixture
def adapter(model):
    return LoopLMAdapter(model, load_tokenizer(shipped_directory()), batch_size=3)


def asked(kind, *arguments):
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


@pytest.mark.parametrize("exit", [*SETTINGS, *STATES], ids=str)
def test_log_likelihoods_are_those_of_the_oracle(adapter, model, exit):
    adapter.setting = Setting(exit)
    found = adapter.loglikelihood(asked("loglikelihood", *TEXTS), disable_tqdm=True)
    for (context, continuation), (likelihood, greedy) in zip(TEXTS, found, strict=True):
        start, rest = adapter.pair(context, continuation)
        each = prompt_logprobs(model, [*start, *rest], exit)[-len(rest) :]
        assert likelihood == pytest.approx(sum(each), abs=1e-5)
        written = next(
            iter(Engine(model).generate([start], SamplingParams(max_tokens=len(rest), ignore_eos=True), exit))
        )
        assert greedy == (written.token_ids == rest)


def test_all_depths_take_one_forward(adapter, model, monkeypatch):
    calls = []
    forward = type(model.model).forward
    monkeypatch.setattr(type(model.model), "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    adapter.batching = Batching(4, 6)
    scores = []
    for exit in SETTINGS:
        adapter.setting = Setting(exit)
        scores.append(adapter.loglikelihood(asked("loglikelihood", *TEXTS), disable_tqdm=True))
    assert len(calls) == 1
    assert scores[0] != scores[1] != scores[2]
    assert scores[5] == [pytest.approx(one) for one in _at(adapter, FixedDepth(model.config.num_loops))]
    assert adapter.work.mean_loops is not None


def _at(adapter, exit):
    adapter.setting = Setting(exit)
    return adapter.loglikelihood(asked("loglikelihood", *TEXTS), disable_tqdm=True)


def test_texts_longer_than_the_context_are_predicted_once(adapter, model, monkeypatch):
    text = "def add(a, b):\n    return a + b\n" * 3
    whole = adapter.loglikelihood_rolling(asked("loglikelihood_rolling", (text,)), disable_tqdm=True)
    ids = [adapter.prefix_token_id, *adapter.tok_encode(text)]
    each = prompt_logprobs(model, ids, adapter.setting.exit)
    assert whole[0] == pytest.approx(sum(each), abs=1e-5)
    monkeypatch.setattr(type(adapter), "max_length", 16)
    cut = adapter.loglikelihood_rolling(asked("loglikelihood_rolling", (text,)), disable_tqdm=True)
    assert cut[0] < whole[0]


@pytest.mark.parametrize(
    "setting", [Setting(FixedDepth(2)), Setting(QuantileExit(0.5)), Setting(FixedDepth(4), "last")]
)
def test_generation_is_the_engine_s(adapter, model, setting):
    adapter.setting = setting
    arguments = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.7}
    prompts = ["def add(a, b):\n", "import "]
    found = adapter.generate_until(asked("generate_until", *((one, arguments) for one in prompts)))
    engine = Engine(model, adapter.tokenizer, kv_cache=setting.kv_cache)
    ids = [adapter.tok_encode(one) for one in prompts]
    expected = engine.generate(ids, SamplingParams(max_tokens=12, stop=["\n\n"]), setting.exit)
    assert found == [result.text for result in expected]


def test_generation_arguments():
    sampled = sampling_of({"until": "x", "do_sample": True, "top_p": 0.7})
    assert (sampled.temperature, sampled.top_p, sampled.stop, sampled.max_tokens) == (1.0, 0.7, ("x",), 256)
    with pytest.raises(UserError, match="num_beams"):
        sampling_of({"num_beams": 4})


def test_impossible_settings_are_refused(adapter, model):
    with pytest.raises(UserError, match="give one of them"):
        LoopLMAdapter(model, adapter.tokenizer, num_loops=1, exit_threshold=0.5)
    with pytest.raises(UserError, match="no argument trust_remote_code"):
        LoopLMAdapter(model, adapter.tokenizer, trust_remote_code=True)
    adapter.setting = Setting(Deadline(3.0))
    with pytest.raises(UserError, match="not available for log-likelihoods"):
        adapter.loglikelihood(asked("loglikelihood", *TEXTS), disable_tqdm=True)
    adapter.setting = Setting(QuantileExit(0.5), stage_one=True)
    with pytest.raises(UserError, match="--stage-one CHECKPOINT"):
        adapter.loglikelihood(asked("loglikelihood", *TEXTS), disable_tqdm=True)
    adapter.setting = Setting(FixedDepth(1))
    with pytest.raises(UserError, match="nothing would be left for the question"):
        adapter.generate_until(asked("generate_until", ("x", {"max_gen_toks": 4096})))


def test_rules_that_look_at_logits_decide_on_every_token(adapter, model):
    exit = ConfidenceExit(kl=0.5)
    adapter.setting = Setting(exit)
    (found,) = adapter.loglikelihood(asked("loglikelihood", TEXTS[0]), disable_tqdm=True)
    start, rest = adapter.pair(*TEXTS[0])
    output = model.model(torch.tensor([[*start, *rest]]))
    logits = model.lm_head(torch.stack(output.loop_hidden_states))[:, 0, len(start) - 1 : -1]  # (R, n, V)
    loops = exit_loops(exit, output.gate_logits[:, 0, len(start) - 1 : -1], 4, logits=logits)
    log_p = logits.log_softmax(-1)
    assert found[0] == pytest.approx(sum(log_p[r - 1, i, rest[i]].item() for i, r in enumerate(loops.tolist())))
    assert 1 < adapter.work.mean_loops < 4
    assert adapter.work.loops == loops.sum()


def test_the_gate_of_another_checkpoint(adapter, model, tmp_path):
    other = load(shipped_directory(), dtype="float64")
    with torch.no_grad():
        other.model.early_exit_gate.bias += 3
    save_checkpoint(other, tmp_path / "stage_one", load_tokenizer(shipped_directory()))
    adapter.add_stage_one(str(tmp_path / "stage_one"))
    exit = QuantileExit(0.7)
    found = {}
    for stage_one, lm in ((False, model), (True, other)):
        adapter.setting = Setting(exit, stage_one=stage_one)
        found[stage_one] = adapter.loglikelihood(asked("loglikelihood", TEXTS[0]), disable_tqdm=True)[0][0]
        start, rest = adapter.pair(*TEXTS[0])
        assert found[stage_one] == pytest.approx(sum(prompt_logprobs(lm, [*start, *rest], exit)[-len(rest) :]))
        text = adapter.generate_until(asked("generate_until", ("def f(", {"max_gen_toks": 8})))
        (expected,) = Engine(lm, adapter.tokenizer).generate(["def f("], SamplingParams(max_tokens=8), exit)
        assert (text, adapter.written[0].loops) == ([expected.text], expected.loops)
    assert found[False] != found[True]
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    save_checkpoint(other, tmp_path / "another", load_tokenizer(shipped_directory()))
    with pytest.raises(UserError, match="is another language model"):
        adapter.add_stage_one(str(tmp_path / "another"))


def test_work_is_counted_as_it_is_done(adapter, model):
    config = model.model.config
    adapter.setting = Setting(FixedDepth(2))
    adapter.loglikelihood(asked("loglikelihood", TEXTS[0]), disable_tqdm=True)
    start, rest = adapter.pair(*TEXTS[0])
    positions = len(start) + len(rest) - 1
    assert adapter.work.prompt_flops == pytest.approx(
        positions * inference_flops(config, 2, 0)
        + len(rest) * (inference_flops(config, 1) - inference_flops(config, 1, 0))
    )
    adapter.work = Work()
    adapter.generate_until(asked("generate_until", ("import os\n", {"max_gen_toks": 5})))
    (result,) = adapter.written
    assert adapter.work.decode_flops == pytest.approx((len(result.token_ids) - 1) * inference_flops(config, 2))
    assert adapter.work.prompt_flops == pytest.approx(
        len(result.prompt_token_ids) * inference_flops(config, 2, 1 / len(result.prompt_token_ids))
    )
    adapter.work = Work()
    adapter.setting = Setting(FixedDepth(2), max_gen_toks=3)
    adapter.generate_until(asked("generate_until", ("import os\n" * 1500, {"max_gen_toks": 500})))
    assert len(adapter.written[0].token_ids) <= 3
    assert len(adapter.written[0].prompt_token_ids) == adapter.max_length - 3
    assert adapter.work.cut_prompts == 1
