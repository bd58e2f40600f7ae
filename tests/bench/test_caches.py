"""Tables and figures of the cache strategies, on a task and a text of tiny models."""

import pytest
import torch
from rich.console import Console

from looplm.bench import caches
from looplm.bench.caches import exit_quality, task_quality, task_table, text_table
from looplm.evaluation.bootstrap import Interval
from looplm.evaluation.cache_quality import CachePoint
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.inference import FixedDepth, QuantileExit
from looplm.lab.fold import FoldTask
from looplm.lab.fold_recipe import fold_config


def printed(table):
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@pytest.fixture
def model():
    return LoopLMForCausalLM(fold_config(FoldTask(), num_loops=3)).eval()


def test_a_task_is_scored_as_a_forward_scores_it_under_the_exact_cache(model):
    task = FoldTask(max_k=2)
    exact, last = task_quality(model, task, FixedDepth(2), ["per_loop", "last"], count=20)
    for level, share in zip(task.levels, exact.accuracy, strict=True):
        rows = task.questions(level, 20, 0)
        with torch.no_grad():
            logits = model(rows[:, :-1], num_loops=2).logits[:, -1]
        assert share == (logits.argmax(-1) == rows[:, -1]).double().mean()
    assert exact.mean_loops == last.mean_loops == 2
    text = printed(task_table(task, [exact, last], FixedDepth(2)))
    assert "fold, all 2 loops" in text and "k = 2" in text and f"{exact.mean_accuracy:.1%}" in text


def test_a_line_for_each_strategy_and_way_of_reading_the_prompt():
    points = [
        CachePoint(
            strategy=strategy,
            prompt_shares=shares,
            bytes_per_token=6144,
            bits_per_byte=1.25,
            increase_bits_per_byte=Interval(-0.123, -0.234, -0.012),
            accuracy=0.5,
            mean_loops=3.25,
        )
        for shares in (False, True)
        for strategy in ("per_loop", "mean")
    ]
    lines = printed(text_table(points, QuantileExit(0.3))).splitlines()
    assert lines[0].strip() == "Held-out text, exit threshold 0.3"
    rows = [line.split() for line in lines if line.strip().startswith(("per_loop", "mean"))]
    assert [row[:2] for row in rows] == [
        ["per_loop", "read"], ["mean", "read"], ["per_loop", "decoded"], ["mean", "decoded"]
    ]  # fmt: skip
    assert rows[1][2:] == ["6,144", "1.250", "-0.123", "(-0.234,", "-0.012)", "50.0%", "3.25"]
    assert len(rows[0]) == 6


def test_the_loss_of_quality_is_that_of_the_shipped_checkpoint(monkeypatch):
    """At the exits it saves; two short texts are enough here."""
    whole = caches.load_texts
    monkeypatch.setattr(caches, "load_texts", lambda tokenizer, data, *_: whole(tokenizer, data, 3, 8, 4))
    fill, last = exit_quality("stdlib-small", ("fill", "last"))
    assert "fill, loss of quality on stdlib-small, exit threshold 0.3" in fill.what
    assert abs(fill.number) < 0.05 < last.number
    assert "above 1." in last.value or "above 2." in last.value
