"""Whole tasks of one's own: scores by hand at every depth, chosen levels, samples, categories, resuming."""

import copy
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the extra `eval`")

import lm_eval
from lm_eval.tasks import TaskManager

from looplm.errors import UserError
from looplm.evaluation import task_plan, task_sweep
from looplm.evaluation.lm_eval_adapter import Batching, LoopLMAdapter
from looplm.evaluation.setting import Setting, all_settings
from looplm.evaluation.task_gains import category_gains
from looplm.evaluation.task_plan import TaskChoice, TaskPlan, task_manager
from looplm.evaluation.task_sweep import Curve, Sweep
from looplm.hf.load import load, load_tokenizer
from looplm.inference import FixedDepth, QuantileExit
from looplm.quickstart.shipped import shipped_directory

CHOICES = [" return a", " import os", " pass", " self.x = x"]
DEPTHS = [Setting(FixedDepth(depth)) for depth in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def model():
    return load(shipped_directory(), dtype="float64")


@pytest.fixture
def adapter(model):
    made = LoopLMAdapter(model, load_tokenizer(shipped_directory()))
    made.batching = Batching(8, 4)
    return made


@pytest.fixture
def tasks(tmp_path):
    """A folder with two YAML tasks: four questions with given answers, and four to be written."""
    lines = [
        json.dumps(
            {"q": f"def f{i}(x):\n   ", "choices": CHOICES, "right": i, "kind": "even" if i % 2 == 0 else "odd"}
        )
        for i in range(4)
    ]
    (tmp_path / "four.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    head = (
        f"dataset_path: json\ntest_split: test\ndataset_kwargs:\n  data_files:\n    test: {tmp_path / 'four.jsonl'}\n"
    )
    tail = "    aggregation: mean\n    higher_is_better: true\nmetadata:\n  version: 1\n"
    (tmp_path / "four.yaml").write_text(
        f"task: four\n{head}output_type: multiple_choice\ndoc_to_text: '{{{{q}}}}'\ndoc_to_target: right\n"
        f"doc_to_choice: choices\ntarget_delimiter: ''\nmetric_list:\n  - metric: acc\n{tail}",
        encoding="utf-8",
    )
    (tmp_path / "written.yaml").write_text(
        f"task: written\n{head}output_type: generate_until\ndoc_to_text: 'import '\ndoc_to_target: 'os'\n"
        'generation_kwargs:\n  until: ["\\n", "."]\n  max_gen_toks: 4\n  do_sample: false\n'
        f"metric_list:\n  - metric: exact_match\n{tail}",
        encoding="utf-8",
    )
    return tmp_path


def plan_of(folder, *names, **rest):
    return TaskPlan(
        checkpoint="x", tasks=tuple(TaskChoice(task=name) for name in names), include_path=str(folder), **rest
    )


def run(adapter, plan, settings, out, curve=None):
    return Sweep(adapter, plan, out, say=lambda line: None).run(settings, curve)


def likelihoods(model, adapter, depth):
    """Sum of log-probabilities of every choice of every question, and each token's, by plain forwards."""
    sums, tokens = [], []
    for i in range(4):
        sums.append([])
        for number, choice in enumerate(CHOICES):
            context, rest = adapter.pair(f"def f{i}(x):\n   ", choice)
            logits = model.model(torch.tensor([[*context, *rest]]), num_loops=depth).loop_hidden_states[-1]
            log_p = model.lm_head(logits)[0].log_softmax(-1)
            each = [log_p[len(context) - 1 + j, token].item() for j, token in enumerate(rest)]
            sums[-1].append(sum(each))
            if number == i:
                tokens += each
    return sums, tokens


def test_four_questions_score_as_by_hand_at_every_depth(adapter, model, tasks, tmp_path):
    found = run(adapter, plan_of(tasks, "four"), DEPTHS, tmp_path / "out")
    losses = []
    for depth, one in enumerate(found, start=1):
        sums, tokens = likelihoods(model, adapter, depth)
        losses.append(torch.tensor(tokens, dtype=torch.float64))
        right = [float(max(range(4), key=row.__getitem__) == i) for i, row in enumerate(sums)]
        assert one.values == tuple(right)
        assert (one.task, one.metric, one.value) == ("four", "acc", sum(right) / 4)
        assert one.stderr == pytest.approx(torch.tensor(right).std().item() / 2)
        assert (one.num_questions, one.mean_loops) == (4, depth)
    for change, before, after in zip(found[0].loop_changes, losses[:-1], losses[1:], strict=True):
        assert change.mean_nats == pytest.approx((before - after).mean().item())
        assert change.worse_share == pytest.approx((after < before).double().mean().item())
        assert change.num_tokens == len(before)
        assert 0 < change.stderr < 1


def test_a_sweep_goes_on_where_it_stopped(adapter, tasks, tmp_path, monkeypatch):
    plan = plan_of(tasks, "four", "written")
    scored = []
    real = task_sweep.score_task

    def failing(*arguments):
        if len(scored) == 5:
            raise KeyboardInterrupt
        scored.append(arguments[2:4])
        return real(*arguments)

    monkeypatch.setattr(task_sweep, "score_task", failing)
    with pytest.raises(KeyboardInterrupt):
        run(adapter, plan, DEPTHS, tmp_path / "out")
    scored.pop()  # room for one more
    monkeypatch.setattr(task_sweep, "score_task", lambda *a: scored.append(a[2:4]) or real(*a))
    found = run(adapter, plan, DEPTHS, tmp_path / "out")
    assert [(choice.task, setting.name) for choice, setting in scored[4:]] == [
        ("written", "loops 2"), ("written", "loops 3"), ("written", "loops 4")
    ]  # fmt: skip
    monkeypatch.setattr(task_sweep, "score_task", None)
    assert run(adapter, plan, DEPTHS, tmp_path / "out") == found
    with pytest.raises(UserError, match="limit differ"):
        run(adapter, plan_of(tasks, "four", limit=1), DEPTHS, tmp_path / "out")


def test_levels_are_chosen_on_the_answers_and_remembered(adapter, tasks, tmp_path):
    curve = Curve(("gate", "hidden-diff", "kl"), 2)
    for task in ("four", "written"):
        found = run(adapter, plan_of(tasks, task), [Setting(FixedDepth(1))], tmp_path / task, curve)
        by_rule = {}
        for one in found:
            by_rule.setdefault(one.rule, []).append(one.mean_loops)
        assert set(by_rule) == {"loops", "threshold", "hidden-diff", "kl"}, by_rule
        assert all(1 < depth < 4 for rule, depths in by_rule.items() if rule != "loops" for depth in depths), by_rule
        full = json.loads((tmp_path / task / task / "loops_4.json").read_text(encoding="utf-8"))
        assert full["mean_loops"] == 4
    adapter.looped = None
    again = run(adapter, plan_of(tasks, "four"), [Setting(FixedDepth(1))], tmp_path / "four", curve)
    assert [one.setting for one in again][1:] == [one.setting for one in again if one.rule != "loops"]


def test_each_gate_has_levels_of_its_own(adapter, model, tasks, tmp_path):
    adapter.stage_one = copy.deepcopy(model.model.early_exit_gate)
    with torch.no_grad():
        adapter.stage_one.bias += 3
    for task in ("four", "written"):
        plan = plan_of(tasks, task, stage_one="earlier")
        found = run(adapter, plan, [Setting(FixedDepth(1))], tmp_path / task, Curve(("gate", "kl"), 2))
        by_rule = {}
        for one in found:
            by_rule.setdefault(one.rule, []).append(one)
        assert set(by_rule) == {"loops", "threshold", "stage-one threshold", "kl"}
        for rule in ("threshold", "stage-one threshold"):
            assert all(1 < one.mean_loops < 4 for one in by_rule[rule]), [one.mean_loops for one in by_rule[rule]]
        assert min(one.level for one in by_rule["stage-one threshold"]) > min(
            one.level for one in by_rule["threshold"]
        )


def test_several_samples_of_an_answer(adapter, tasks, tmp_path):
    plan = plan_of(tasks, "written", samples=5, generation={"temperature": 1.5}, seed=3)
    setting = Setting(FixedDepth(4), max_gen_toks=2)
    (found,) = run(adapter, plan, [setting], tmp_path / "out")
    assert {(score.kind, score.n) for score in found.samples} == {
        (k, n) for k in ("pass", "majority") for n in (1, 2, 4, 5)
    }
    by_n = {(score.kind, score.n): score.value for score in found.samples}
    # All questions are the same text: twenty samples in all, in groups of five.
    texts = [result.text for result in adapter.written]
    right = [text == "os" for text in texts]
    assert len(set(texts)) > 3
    assert by_n["pass", 1] == pytest.approx(sum(right) / 20) == found.value
    assert by_n["pass", 5] == sum(any(right[i : i + 5]) for i in range(0, 20, 5)) / 4
    assert found.values == tuple(sum(right[i : i + 5]) / 5 for i in range(0, 20, 5))
    assert max(len(result.token_ids) for result in adapter.written) <= 2
    (once,) = run(adapter, plan_of(tasks, "written"), [setting], tmp_path / "once")
    assert found.prompt_flops == pytest.approx(once.prompt_flops)  # a question is read once, however many answers
    assert 0 < found.decode_flops <= once.decode_flops
    asked = plan_of(tasks, "four", samples=5, generation={"temperature": 1.0})
    (chosen,) = run(adapter, asked, [Setting(FixedDepth(1))], tmp_path / "out")
    assert chosen.samples == ()
    assert chosen.prompt_flops == run(adapter, plan_of(tasks, "four"), DEPTHS[:1], tmp_path / "x")[0].prompt_flops


def test_gains_by_category(adapter, model, tasks, tmp_path):
    found = run(adapter, plan_of(tasks, "four", category_field="kind"), DEPTHS, tmp_path / "out")
    gains = {one.category: one for one in category_gains(found, 4)}
    assert set(gains) == {"all", "even", "odd"}
    assert gains["even"].num_questions == 2
    first, last = found[0].values, found[3].values
    for name, rows in {"all": range(4), "even": (0, 2), "odd": (1, 3)}.items():
        a, b = (sum(one[i] for i in rows) / len(rows) for one in (first, last))
        assert gains[name].gain == (None if a == 0 else pytest.approx((b - a) / a))
        assert [score for _, score, _ in gains[name].by_loop][0] == a
    assert category_gains(found[1:], 4) == []


def test_lm_eval_s_own_task_on_a_file_of_ours(adapter, tasks, tmp_path, monkeypatch):
    (tmp_path / "math.jsonl").write_text(
        "".join(
            json.dumps({"question": f"What is {i} + 1?", "answer": f"Add.\n#### {i + 1}"}) + "\n" for i in range(3)
        )
    )
    monkeypatch.setattr(task_plan, "TaskManager", own_index)
    choice = TaskChoice(
        task="gsm8k_cot", num_fewshot=2, metric="exact_match,strict-match", data={"test": str(tmp_path / "math.jsonl")}
    )
    plan = TaskPlan(checkpoint="x", tasks=(choice,))
    monkeypatch.setattr(type(adapter), "generate_until", lambda self, asked: [answer(one.args[0]) for one in asked])
    (found,) = run(adapter, plan, [Setting(FixedDepth(1))], tmp_path / "out")
    assert found.values == (1.0, 1.0, 0.0)
    assert found.num_questions == 3
    for data, wrong in (({"test": "nowhere.jsonl"}, "is no file"), ({"train": __file__}, "has no split train")):
        plan = TaskPlan(checkpoint="x", tasks=(TaskChoice(task="gsm8k_cot", data=data),))
        with pytest.raises(UserError, match=wrong):
            run(adapter, plan, [Setting(FixedDepth(1))], tmp_path / "other")


GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k_test.jsonl"


@pytest.mark.skipif(not GSM8K.is_file(), reason="GSM8K's test questions are not beside the repository")
def test_gsm8k_itself(adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(task_plan, "TaskManager", own_index)
    choice = TaskChoice(task="gsm8k_cot", num_fewshot=1, data={"test": str(GSM8K)})
    plan = TaskPlan(checkpoint="x", tasks=(choice,), limit=3)
    settings = [Setting(exit, max_gen_toks=4) for exit in (FixedDepth(1), FixedDepth(4), QuantileExit(0.3))]
    found = run(adapter, plan, settings, tmp_path / "out")
    assert [one.num_questions for one in found] == [3, 3, 3]
    assert [one.value for one in found] == [0, 0, 0]  # four tokens hold no answer
    assert (found[0].mean_loops, found[1].mean_loops) == (1, 4)
    assert 1 < found[2].mean_loops < 4


def own_index(**_):
    """lm-eval's index of one folder of its tasks: the whole takes many seconds."""
    return TaskManager(include_path=str(Path(lm_eval.__file__).parent / "tasks" / "gsm8k"), include_defaults=False)


def answer(prompt):
    """Right twice, and after two worked examples."""
    assert prompt.count("The answer is") == 2
    question = prompt.rsplit("Q: ", 1)[1]
    return {"What is 0": "The answer is 1.", "What is 1": "So the answer is 7. The answer is 2.", "What is 2": "3"}[
        question[:9]
    ]


def test_unknown_tasks_and_metrics(adapter, tasks, tmp_path, monkeypatch):
    monkeypatch.setattr(task_plan, "TaskManager", own_index)
    with pytest.raises(UserError, match="no task nowhere"):
        task_manager(plan_of(tasks, "nowhere"))
    monkeypatch.undo()
    plan = TaskPlan(checkpoint="x", tasks=(TaskChoice(task="four", metric="f1"),), include_path=str(tasks))
    with pytest.raises(UserError, match="has no metric f1; it has acc"):
        run(adapter, plan, [Setting(FixedDepth(1))], tmp_path / "out")


def test_scores_belong_to_the_questions_in_the_file_and_not_to_its_name(adapter, tasks, tmp_path):
    settings = [Setting(FixedDepth(1))]
    (first,) = run(adapter, plan_of(tasks, "four"), settings, tmp_path / "out")
    assert run(adapter, plan_of(tasks, "four"), settings, tmp_path / "out") == [first]
    data = tmp_path / "four.jsonl"
    data.write_text(data.read_text().replace('"right": 1', '"right": 2'))
    with pytest.raises(UserError, match=r"files differ"):
        run(adapter, plan_of(tasks, "four"), settings, tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "could not load the task gsm8k_cot"),
        ("nojson", "could not load the task gsm8k_cot"),
        ('{"zz": 1}', "does not fit the task's template|could not load"),
    ],
)
def test_questions_that_are_none_are_said(content, said, adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(task_plan, "TaskManager", own_index)
    (tmp_path / "data.jsonl").write_text(content)
    choice = TaskChoice(task="gsm8k_cot", num_fewshot=0, data={"test": str(tmp_path / "data.jsonl")})
    with pytest.raises(UserError, match=said):
        run(adapter, TaskPlan(checkpoint="x", tasks=(choice,)), [Setting(FixedDepth(1))], tmp_path / "out")


def test_a_folder_a_task_a_file_and_a_field_that_are_none_are_named(adapter, tasks, tmp_path):
    settings, out = [Setting(FixedDepth(1))], tmp_path / "out"
    with pytest.raises(UserError, match="nowhere is no folder"):
        run(adapter, plan_of(tasks / "nowhere", "four"), settings, out)
    with pytest.raises(UserError, match="has no such field, but q, choices, right, kind"):
        run(adapter, plan_of(tasks, "four", category_field="colour"), settings, out)
    run(adapter, plan_of(tasks, "four"), settings, out)
    next((out / "four").glob("*.json")).write_text('{"a')
    with pytest.raises(UserError, match=r"\.json is damaged; delete it"):
        run(adapter, plan_of(tasks, "four"), settings, out)
    (out / "four" / "levels.json").write_text("[")
    with pytest.raises(UserError, match=r"levels\.json is damaged"):
        run(adapter, plan_of(tasks, "four"), settings, out, Curve(("gate",), 2))
    (tasks / "broken.yaml").write_text("task: [four\n")
    with pytest.raises(UserError, match=r"broken\.yaml is no YAML"):
        run(adapter, plan_of(tasks, "four"), settings, tmp_path / "other")


def test_settings_have_names_of_their_own():
    found = all_settings([FixedDepth(2), QuantileExit(0.5)], ["per_loop", "last"], [None, 64], stage_one=True)
    names = [one.name for one in found]
    assert len(set(names)) == len(names) == 12
    assert names[:3] == ["loops 2", "threshold 0.5", "stage-one threshold 0.5"]
    assert names[-1] == "stage-one threshold 0.5, last, 64 tokens"
