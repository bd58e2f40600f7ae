"""lm-eval's adapter against direct computation, the oracle and the engine."""

import json

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the extra `eval`")

from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from looplm.errors import UserError
from looplm.evaluation import task_sweep
from looplm.evaluation.lm_eval_adapter import Batching, LoopLMAdapter, Setting, sampling_of
from looplm.evaluation.task_sweep import TaskPlan, sweep
from looplm.hf.load import load, load_tokenizer
from looplm.inference import Engine, FixedDepth, HiddenDiffExit, QuantileExit, SamplingParams
from looplm.inference.reference import prompt_logprobs
from looplm.quickstart.shipped import shipped_directory

TEXTS = [("def add(a, b):\n    return", " a + b\n"), ("", "import os"), ("class A:\n", "    pass\n"), ("x = ", "1")]
SETTINGS = [FixedDepth(1), FixedDepth(2), FixedDepth(6), QuantileExit(0.3), QuantileExit(0.7), QuantileExit(1.0)]


@pytest.fixture(scope="module")
def model():
    return load(shipped_directory(), dtype="float64")


@pytest.fixture
def adapter(model):
    return LoopLMAdapter(model, load_tokenizer(shipped_directory()), batch_size=3)


def asked(kind, *arguments):
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


@pytest.mark.parametrize("exit", SETTINGS, ids=str)
def test_log_likelihoods_are_those_of_the_oracle(adapter, model, exit):
    adapter.setting = Setting(exit)
    found = adapter.loglikelihood(asked("loglikelihood", *TEXTS), disable_tqdm=True)
    for (context, continuation), (likelihood, greedy) in zip(TEXTS, found, strict=True):
        if context:
            start, rest = adapter._encode_pair(context, continuation)
        else:
            start, rest = [adapter.prefix_token_id], adapter.tok_encode(continuation)
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
    assert adapter.depths.mean is not None


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
    adapter.setting = Setting(HiddenDiffExit(0.1))
    with pytest.raises(UserError, match="not available for log-likelihoods"):
        adapter.loglikelihood(asked("loglikelihood", *TEXTS), disable_tqdm=True)


CHOICES = [" return a", " import os", " pass", " self.x = x"]


@pytest.fixture
def four_questions(tmp_path):
    """A folder with a YAML task of four questions, the first choice right, the second, and so on."""
    lines = [json.dumps({"q": f"def f{i}(x):\n   ", "choices": CHOICES, "right": i}) for i in range(4)]
    (tmp_path / "four.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "four.yaml").write_text(
        "task: four\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
        f"    test: {tmp_path / 'four.jsonl'}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_target: right\n"
        "doc_to_choice: choices\ntarget_delimiter: ''\nmetric_list:\n  - metric: acc\n    aggregation: mean\n"
        "    higher_is_better: true\nmetadata:\n  version: 1\n",
        encoding="utf-8",
    )
    return tmp_path


def test_a_task_of_four_questions_scores_as_by_hand_and_resumes(adapter, model, four_questions, tmp_path, monkeypatch):
    plan = TaskPlan(checkpoint="x", tasks=("four",), include_path=str(four_questions))
    settings = [Setting(FixedDepth(depth)) for depth in (1, 2, 3, 4)]
    adapter.batching = Batching(4, 4)
    found = sweep(adapter, plan, settings, tmp_path / "out", say=lambda line: None)
    for depth, one in enumerate(found, start=1):
        right = 0
        for i in range(4):
            start = adapter.tok_encode(f"def f{i}(x):\n   ")
            sums = []
            for choice in CHOICES:
                context, rest = adapter._encode_pair(f"def f{i}(x):\n   ", choice)
                logits = model.model(torch.tensor([[*context, *rest]]), num_loops=depth).loop_hidden_states[-1]
                log_p = model.lm_head(logits)[0].log_softmax(-1)
                sums.append(sum(log_p[len(context) - 1 + j, token].item() for j, token in enumerate(rest)))
            right += max(range(4), key=sums.__getitem__) == i
            assert start
        assert [(score.task, score.metric, score.value) for score in one.scores] == [("four", "acc", right / 4)]
        assert one.num_samples == 4
        assert one.mean_loops == depth
    adapter.looped = None
    again = sweep(adapter, plan, settings, tmp_path / "out", say=lambda line: None)
    assert again == found
    with pytest.raises(UserError, match="limit differ"):
        sweep(adapter, TaskPlan(checkpoint="x", tasks=("four",), include_path=str(four_questions), limit=1), settings,
              tmp_path / "out")  # fmt: skip
    with pytest.raises(UserError, match="no task nowhere"):
        monkeypatch.setattr(
            task_sweep,
            "TaskManager",
            lambda **_: TaskManager(include_path=str(four_questions), include_defaults=False),
        )
        sweep(adapter, TaskPlan(checkpoint="x", tasks=("nowhere",)), settings, tmp_path / "out")
