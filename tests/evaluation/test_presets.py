"""Presets name what the installed lm-eval has: tasks, metrics and filters."""

from pathlib import Path

import pytest
import yaml

pytest.importorskip("lm_eval", reason="needs the extra `eval`")

import lm_eval
from lm_eval.tasks import TaskManager

from looplm.errors import UserError
from looplm.evaluation.presets import load_preset, preset_names

FOLDERS = [
    "mmlu/default", "mmlu_pro", "bbh/cot_fewshot", "arc", "hellaswag", "winogrande", "gsm8k", "minerva_math",
    "commonsense_qa", "humaneval", "mbpp", "aime", "gpqa/cot_zeroshot", "drop", "super_glue/boolq", "cruxeval",
]  # fmt: skip
CODE_METRICS = {"pass@1", "pass_at_1"}
"""What lm-eval's own functions for generated code call their results."""


@pytest.fixture(scope="module")
def index():
    """The index of lm-eval that the presets need: building the whole takes many seconds."""
    root = Path(lm_eval.__file__).parent / "tasks"
    return TaskManager(include_path=[str(root / folder) for folder in FOLDERS], include_defaults=False).task_index


def test_the_presets_of_the_papers():
    assert preset_names() == ["closing_the_loop", "ouro_base", "ouro_thinking"]
    assert len(load_preset("closing_the_loop").tasks) == 12
    thinking = load_preset("ouro_thinking")
    assert (thinking.generation, thinking.samples) == ({"temperature": 1.0, "top_p": 0.7}, 10)
    shots = {one.task: one.num_fewshot for one in load_preset("ouro_base").tasks}
    # Ouro, arXiv 2510.25741: Table 16, and the shots of Tables 10 and 11.
    assert [shots[task] for task in ("mmlu", "mmlu_pro", "bbh_cot_fewshot", "gsm8k_cot")] == [5, 5, 3, 3]
    assert [shots[task] for task in ("arc_challenge", "arc_easy", "commonsense_qa", "hellaswag", "winogrande")] == [
        25, 8, 10, 10, 5
    ]  # fmt: skip
    with pytest.raises(UserError, match="Did you mean ouro_base"):
        load_preset("ouro_bas")


@pytest.mark.parametrize("name", ["closing_the_loop", "ouro_base", "ouro_thinking"])
def test_lm_eval_has_every_task_with_its_metric(index, name):
    root = Path(lm_eval.__file__).parent / "tasks"
    for one in load_preset(name).tasks:
        if one.task == "minerva_math":  # a group in a folder of groups
            config = yaml.safe_load((root / "benchmarks" / "minerva_math.yaml").read_text(encoding="utf-8"))
            assert config["group"] == "minerva_math"
            metrics = {row["metric"]: row for row in config["aggregate_metric_list"]}
            assert one.metric in metrics
            continue
        config = index[one.task].cfg
        metric, _, filtered = one.metric.partition(",")
        listed = config.get("aggregate_metric_list") or config.get("metric_list") or []
        names = {str(row["metric"]) for row in listed}
        filters = {row["name"] for row in config.get("filter_list") or []}
        filters |= {row["filter_list"] for row in listed if isinstance(row.get("filter_list"), str)}
        assert one.runs_code == bool(config.get("unsafe_code")), one
        if one.runs_code:
            assert metric in CODE_METRICS
        elif config.get("group") is None or config.get("aggregate_metric_list"):
            assert metric in names, (one, names)
        if filtered:
            assert filtered in filters, (one, filters)
        else:
            assert not filters or one.runs_code, (one, filters)
