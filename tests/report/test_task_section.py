"""Tables and plots of task scores."""

import pytest

pytest.importorskip("lm_eval", reason="needs the extra `eval`")

from looplm.evaluation.task_gains import category_gains
from looplm.evaluation.task_scores import LoopChange, SampleScore
from looplm.evaluation.task_sweep import TaskResult
from looplm.hf.load import load
from looplm.model.flops import cache_bytes_per_token
from looplm.quickstart.shipped import shipped_directory
from looplm.report.task_section import markdown, task_tables, tasks_section

CHANGES = (LoopChange(loop=1, mean_nats=-0.5, stderr=0.1, worse_share=0.25, worse_stderr=0.05, num_tokens=40),)


def result(rule="loops", level=1.0, kv_cache="per_loop", task="t", **rest):
    name = f"{rule} {level:g}" + ("" if kv_cache == "per_loop" else f" {kv_cache}")
    values = {
        "task": task, "setting": name, "rule": rule, "level": level, "kv_cache": kv_cache, "max_gen_toks": None,
        "metric": "acc", "value": 0.5, "stderr": 0.1, "mean_loops": level, "prompt_flops": 1e9, "decode_flops": 2e9,
        "num_questions": 2, "cut_prompts": 0, "seconds": 1.0, "scores": (), "values": (0.0, 1.0),
        "categories": ("a", "b"), "samples": (), "loop_changes": (),
    }  # fmt: skip
    return TaskResult(**(values | rest))


@pytest.fixture(scope="module")
def config():
    return load(shipped_directory()).model.config


def made(found, config):
    tasks = dict.fromkeys(one.task for one in found)
    gains = {task: category_gains([one for one in found if one.task == task], 4) for task in tasks}
    return task_tables(found, gains, config)


def test_every_table_has_its_rows(config):
    found = [
        result(level=1), result(level=4, value=0.75, values=(1.0, 1.0)), result(level=6, value=0.25),
        result("threshold", 0.5, mean_loops=2.5), result(level=4, kv_cache="last", value=0.6),
        result(task="u", level=1, loop_changes=CHANGES),
    ]  # fmt: skip
    samples = (SampleScore("pass", 4, 0.9, 0.05), SampleScore("majority", 4, 0.7, None))
    found.append(result(task="u", level=4, samples=samples, cut_prompts=3))
    depth, rules, cache, several, gain, _, change = made(found, config)
    assert depth.columns == ("Loops", "t acc", "u acc")
    assert depth.rows[-1] == ("6 (untrained)", "0.2500 ± 0.1000", "")
    assert [row[0] for row in depth.rows] == ["1", "4", "6 (untrained)"]
    assert rules.rows[3][:5] == ("t", "threshold 0.5", "2.50", "0.5000 ± 0.1000", "3")
    assert rules.rows[-1][-1] == "3"
    one_set = cache_bytes_per_token(config, "last").decode / cache_bytes_per_token(config, "per_loop").decode
    assert [row[1:] for row in cache.rows] == [
        ("loops 4", "0.7500 ± 0.1000", "1.00"), ("loops 4 last", "0.6000 ± 0.1000", f"{one_set:.2f}")
    ]  # fmt: skip
    assert several.rows == (("u", "loops 4", "4", "0.9000 ± 0.0500", "0.7000", "9"),)
    assert gain.columns[-1] == "(L4 - L1) / L1"
    assert gain.rows[0][:2] == ("all", "2")
    assert gain.rows[0][-1].startswith("+100.0 % ±")
    assert change.rows == (("u", "1 to 2", "-0.5000 ± 0.1000", "25.0% ± 5.0%", "40"),)
    text = markdown(depth)
    assert text.splitlines()[2:4] == ["| Loops | t acc | u acc |", "| --- | --- | --- |"]


def test_plots_show_rules_and_costs(config):
    samples = tuple(SampleScore(kind, n, 0.4, 0.1) for kind in ("pass", "majority") for n in (1, 4))
    found = [
        result(level=1), result("stage-one threshold", 0.5), result("hidden-diff", 2.0),
        result(level=4, max_gen_toks=64, samples=samples), result(level=4, max_gen_toks=256),
    ]  # fmt: skip
    page = tasks_section(found, made(found, config))
    for label in ("stage-one threshold", "hidden-diff", "majority of n, loops 4", "longer answers, loops 4"):
        assert f">{label}<" in page
    assert page.count("<svg") == 2
    assert ">mean loops<" in page and ">FLOPs a question<" in page
    assert tasks_section([], [])
