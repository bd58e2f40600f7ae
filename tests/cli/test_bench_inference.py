"""The commands that measure generation run at tiny size, and say what they have measured."""

import json

import pytest

from looplm.cli import bench_cache, bench_inference
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.hf.save import save_checkpoint
from looplm.lab.fold import FoldTask
from looplm.lab.fold_recipe import fold_config
from looplm.lab.task import task_tokenizer


@pytest.fixture
def run(run_command):
    """Runs one of the commands."""
    return run_command


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (bench_inference.decode, ["batch 1, bf16", "tokens/s, transformers"]),
        (bench_inference.early_exit, ["lock-step", "fill", "x fewer passes", "of what is promised"]),
        (bench_inference.batch, ["context 8, batch 1", "context 16, batch 2", "ms a token", "expected"]),
        (bench_inference.memory, ["per_loop", "last", "of per_loop"]),
    ],
)
def test_a_smoke_run_prints_and_writes_its_figures(command, said, run, tmp_path):
    status, out, err = run(command, "--smoke", "--json", tmp_path / "figures.json")
    assert (status, err) == (0, "")
    for text in said:
        assert text in out
    report = json.loads((tmp_path / "figures.json").read_text())
    assert report["figures"] and all(figure["number"] > 0 for figure in report["figures"])


def test_drafts_are_measured_on_the_shipped_checkpoint(run):
    status, out, err = run(
        bench_inference.speculative, "--max-tokens", 10, "--repeats", 1, "--draft-tokens", "2,0", "--texts", 2
    )
    assert (status, err) == (0, "")
    assert "draft loop 1, 2 tokens" in out and "adaptive" in out and "accepted; 2 of 2 texts have the same" in out


def test_exits_are_measured_on_questions_of_a_task(run, tmp_path):
    """Prompts are the beginnings of fold's questions; depths those of the gate."""
    task = FoldTask()
    model = LoopLMForCausalLM(fold_config(task))
    save_checkpoint(model, tmp_path / "fold", task_tokenizer(task))
    options = ["--checkpoint", tmp_path / "fold", "--prompt-tokens", 2, "--max-tokens", 4, "--repeats", 1]
    asked = ["--generator", "looplm.lab.fold:documents", "--arguments", '{"max_k": 4, "seed": 1}']
    status, out, err = run(bench_inference.early_exit, *options, *asked, "--batch-sizes", "1,8", "--quality", "")
    assert (status, err) == (0, "")
    for text in ("batch 1, lock-step", "batch 8, per_loop", "batch 8, fill", "batch 8, last", "mean depth"):
        assert text in out


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (bench_inference.decode, ["--batch-sizes", "1,x"], "--batch-sizes is '1,x'"),
        (bench_inference.decode, ["--batch-sizes", "0"], "from 1"),
        (bench_inference.batch, ["--contexts", ""], "--contexts is ''"),
        (bench_inference.memory, ["--dtype", "int8"], "--dtype is 'int8'"),
        (bench_inference.speculative, ["--max-tokens", "100000"], "more than the context"),
        (bench_inference.early_exit, ["--generator", "looplm.lab.fold:documents"], "give a --checkpoint with it"),
    ],
)
def test_bad_options_are_a_message_and_status_2(command, options, message, run):
    status, _, err = run(command, *options)
    assert status == 2 and message in err


def test_caches_are_compared_on_text_and_on_fold(run, tmp_path):
    """Tiny: three short texts of the user's own, a fold model of a few steps."""
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"Return the number of {name}. " * 30, encoding="utf-8")
    status, out, _ = run(
        bench_cache.cache, "--data", tmp_path / "*.txt", "--texts", 3, "--prompt-tokens", 6, "--scored-tokens", 4,
        "--fold-steps", 2, "--json", tmp_path / "figures.json",
    )  # fmt: skip
    assert status == 0
    for text in ("3 texts of 6 + 4 tokens from 3 documents", "Held-out text, all 4 loops", "exit threshold 0.3",
                 "fold, all 4 loops", "fold, exit threshold 0.5"):  # fmt: skip
        assert text in out
    report = json.loads((tmp_path / "figures.json").read_text())
    assert [len(points) for points in report.values()] == [10, 10, 5, 5]
    assert {point["strategy"] for point in report["fold, FixedDepth(num_loops=4)"]} == {
        "per_loop", "fill", "last", "mean", "first"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "no/such/*.txt"], "no/such"),
        (["--scored-tokens", "100000", "--no-fold"], "No held-out text has 100064 tokens"),
        (["--exit-threshold", "-1", "--no-fold"], "exit threshold is -1"),
        (["--json", "/no/such/folder/figures.json"], "cannot be written"),
    ],
)
def test_bad_options_of_cache_are_a_message_and_status_2(options, message, run):
    status, _, err = run(bench_cache.cache, *options)
    assert status == 2 and message in err
