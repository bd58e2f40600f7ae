"""`looplm train` and `looplm gate` as commands: statuses, messages, plans, signals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import looplm
from looplm.cli import main as cli
from looplm.cli.train import SHIPPED, find_recipe
from looplm.cli.train_plan import count, print_plan, size
from looplm.errors import UserError
from looplm.training.interrupt import Interrupted
from looplm.training.plan import plan_run
from looplm.training.recipe_file import load_recipe

Run = Callable[..., tuple[int, str, str]]

TINY = """\
name: tiny
model:
  kind: new
  architecture: {hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2,
                 num_key_value_heads: 2, head_dim: 8, num_loops: 2, tie_word_embeddings: true}
tokenizer: {kind: train, vocab_size: 280}
stages:
  - name: first
    num_steps: 3
    seq_len: 16
    batch_tokens: 32
    objective: {kind: expected_loss, beta: 0.1}
    optimizer: {lr: 1e-2}
    data: {sources: [{kind: files, paths: [TEXTS]}]}
telemetry: {tensorboard: false}
"""


@pytest.fixture
def looplm_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process; returns status, stdout and stderr."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["looplm", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "170")
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("\n".join(f"one word and {i % 7} more, {i % 3}" for i in range(200)))
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.replace("TEXTS", str(tmp_path / "*.txt")))
    return path


def refused(result: tuple[int, str, str]) -> str:
    status, _, err = result
    assert status == 2 and "Traceback" not in err
    return err


# --- Plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["ouro_1p4b", "ouro_2p6b", "two_stage_1p4b", "dense_1p4b", "dense_3p9b", "convert_qwen3_1p7b", "ouro_sft"]
)
def test_the_large_recipes_pass_plan(looplm_command: Run, name: str) -> None:
    status, out, _ = looplm_command("train", name, "--plan", "--devices", "64", "--device-memory", "192GB")
    assert status == 0 and "(!)" not in out and name in out


def test_a_plan_as_a_table_and_as_json(looplm_command: Run) -> None:
    _, out, _ = looplm_command("train", "dense_3p9b", "--plan")
    assert "3,901,294,592" in out and "FLOPs: 7.0627e21," in out and "without the exit gate" in out
    _, out, _ = looplm_command("train", "two_stage_1p4b", "--plan", "--json", "stages.mid-train.num_steps=1000")
    plan = json.loads(out)
    assert plan["stages"][0]["num_parameters"] == 1_434_652_673 and plan["num_steps"] == 101_000
    assert plan["stages"][0]["memory"]["total"] == sum(
        value for name, value in plan["stages"][0]["memory"].items() if name != "total"
    )
    _, out, _ = looplm_command("train", "ouro_sft", "--plan")
    assert "counts in epochs" in out


@pytest.mark.parametrize("columns", ["80", None])
@pytest.mark.parametrize("file", sorted(SHIPPED.rglob("*.yaml")), ids=lambda file: file.stem)
def test_a_plan_is_legible_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, file: Path, columns: str | None
) -> None:
    """None: piped, where rich takes 80; then on one device, else on as many as share every batch."""
    num_devices = 1 if columns is None else 3 if file.stem == "convert_smollm2" else 2
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)
    overrides = []
    if file.relative_to(SHIPPED).as_posix() == "small/ouro_sft.yaml":  # starts from a run of another recipe
        checkpoint = Path(looplm.__file__).parent / "checkpoints" / "stdlib-small"
        overrides = [f"model.path={checkpoint}", f"tokenizer.path={checkpoint}"]
    plan = plan_run(load_recipe(file, overrides), num_devices, 80 * 10**9)
    print_plan(plan, as_json=False)
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "…" not in out and max(map(len, lines)) <= 80
    for stage in plan.stages:
        assert sum(line.split()[0] == stage.name for line in lines if line.strip()) == 4, "a name broken in two"
        dense = stage.num_loops == "1"
        assert f"{stage.num_parameters_without_gate if dense else stage.num_parameters:,}" in out
        assert f"{stage.num_trained:,}" in out
    if plan.num_steps is not None:
        assert f"Steps: {plan.num_steps:,}" in lines and f"Tokens: {plan.num_tokens:,}" in lines
        exact = [f"{flops:.4e}".replace("e+", "e") for flops in (plan.flops, plan.flops_with_attention)]
        assert f"FLOPs: {exact[0]}, with attention {exact[1]}" in lines


def test_the_exact_totals_of_a_plan(looplm_command: Run) -> None:
    _, out, _ = looplm_command("train", "ouro_1p4b", "--plan", "--devices", "64", "--device-memory", "80GB")
    for line in ("Parameters stored: 1,434,652,673", "Parameters trained: 1,434,652,673", "Steps: 938,861",
                 "Tokens: 7,720,020,213,760", "FLOPs: 3.4321e23, with attention 4.2691e23"):  # fmt: skip
        assert line in out.splitlines()
    assert "1.43B" in out and "3.00T" in out and "89.7 MB" in out and "4.19M -> 8.39M" in out
    _, out, _ = looplm_command("train", "ouro_2p6b", "--plan", "--devices", "64")
    stages = "1b-pretrain, 2-anneal, 3-long, 4-mid-train"
    assert f"Parameters stored: 1,434,652,673 (1a-pretrain), 2,667,974,657 ({stages})" in out


def test_a_plan_says_plainly_that_a_stage_does_not_fit(looplm_command: Run) -> None:
    status, out, _ = looplm_command("train", "small/ouro_1p4b", "--plan", "--device-memory", "1MB")
    assert status == 0 and out.count("(!) Does not fit: stage ") == 5
    assert "stage 3-long needs" in out and "with 1 row of 1,024 tokens, and 900 kB of 1.00 MB can be used" in out
    assert "Does not fit" not in looplm_command("train", "small/ouro_1p4b", "--plan")[1]


def test_a_plan_of_drawn_loops_and_long_names(
    looplm_command: Run, recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "a-stage-whose-name-is-as-long-as-a-line-" * 2
    drawn = load_recipe(recipe, [f"stages.0.name={name}", "stages.0.num_loops={kind: uniform, min: 1, max: 4}"])
    monkeypatch.setenv("COLUMNS", "80")
    print_plan(plan_run(drawn), as_json=False)
    out = capsys.readouterr().out
    assert "…" not in out and max(map(len, out.splitlines())) <= 80
    assert "uniform to 4, mean 2.5." in out and "(*)" in out


@pytest.mark.parametrize(
    ("value", "as_count", "as_size"),
    [(0, "0", "0"), (129, "129", "129 B"), (999, "999", "999 B"), (1000, "1,000", "1.00 kB"),
     (99_999, "99,999", "100 kB"), (100_000, "100k", "100 kB"), (999_499, "999k", "999 kB"),
     (999_500, "1.00M", "1.00 MB"), (9_996_000, "10.0M", "10.0 MB"), (1_434_652_673, "1.43B", "1.43 GB"),
     (3 * 10**12, "3.00T", "3.00 TB")],
)  # fmt: skip
def test_numbers_are_shown_to_three_digits(value: int, as_count: str, as_size: str) -> None:
    assert (count(value), size(value)) == (as_count, as_size)


def test_a_plan_of_twins(looplm_command: Run) -> None:
    plain, twins = ("train", "small/convert_smollm2", "--plan", "baseline=null", "compare_loops=null"), (
        "train", "small/convert_smollm2", "--plan")  # fmt: skip
    assert looplm_command(*plain)[1].count("1 stages on 1 device") == 1
    _, out, _ = looplm_command(*twins)
    assert out.count("1 stages on 1 device") == 2 and "small_convert_smollm2-dense" in out
    _, out, _ = looplm_command(*twins, "--json")
    plan = json.loads(out)
    assert plan["dense"]["num_tokens"] == plan["num_tokens"] and plan["dense"]["stages"][0]["num_loops"] == "1"
    assert plan["dense"]["stages"][0]["memory"]["total"] > 0


def test_a_plan_writes_nothing(looplm_command: Run, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recipe.parent)
    before = sorted(recipe.parent.iterdir())
    assert looplm_command("train", recipe, "--plan")[0] == 0
    assert sorted(recipe.parent.iterdir()) == before


# --- Runs -----------------------------------------------------------------------------------------------------------


def test_a_run_and_its_default_directory(looplm_command: Run, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recipe.parent)
    status, out, _ = looplm_command("train", recipe, "stages.first.num_steps=2")
    assert status == 0 and "Done. The model is in runs/tiny/first." in out
    assert looplm.load(recipe.parent / "runs/tiny/first").config.num_loops == 2
    assert "is not empty" in refused(looplm_command("train", recipe, "stages.first.num_steps=2"))
    assert looplm_command("train", recipe, "stages.first.num_steps=2", "--resume")[0] == 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("beta: 0.1", "betta: 0.1", "stages.0.objective.betta (line 12): unknown key; did you mean beta?"),
        ("seq_len: 16", "seq_len: 16\n    seq_len: 32", "line 11: the key seq_len is given twice"),
        ("    seq_len: 16", "\tseq_len: 16", "line 10: the line is indented with a tab"),
        ("batch_tokens: 32", "batch_tokens: 33", "batch_tokens 33 is not a multiple of seq_len 16"),
        ("num_loops: 2", "num_loops: 0", "num_loops is 0"),
        ("optimizer:", "schedule: {warmup_steps: 4}\n    optimizer:", "warmup_steps 4 is longer than the stage (3)"),
        ("vocab_size: 280", "vocab_size: 20", "tokenizer.vocab_size (line 6): is 20; it must be at least 259"),
        ("num_loops: 2", "num_loops: 2, vocab_size: 100", "100"),
        ("*.txt", "*.nothing", "nothing"),
    ],
)  # fmt: skip
def test_bad_input_is_status_2_without_a_traceback(
    looplm_command: Run, recipe: Path, old: str, new: str, said: str
) -> None:
    recipe.write_text(recipe.read_text().replace(old, new))
    assert said in refused(looplm_command("train", recipe, "--out", recipe.parent / "run"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no text|empty|no documents"),
        (b'{"text": "a"}\n{"text" "b"}\n', "line 2"),
        (b'{"text": "\xff"}\n', "UTF-8"),
    ],
)
def test_bad_data_files(looplm_command: Run, recipe: Path, content: bytes, said: str) -> None:
    import re

    (recipe.parent / "data.jsonl").write_bytes(content)
    err = refused(looplm_command(
        "train", recipe, f"stages.0.data.sources.0.paths=[{recipe.parent}/data.jsonl]", "--out", recipe.parent / "run"
    ))  # fmt: skip
    assert re.search(said, err), err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ouro_1p4"], "did you mean ouro_1p4b?"),
        ([""], "The recipe is an empty word"),
        (["x" * 5000], "no recipe file xxx"),
        (["zzz.yaml"], "no recipe file zzz.yaml, and no shipped recipe of that name; shipped are"),
        (["ouro_1p4b", "--json"], "belong to --plan"),
        (["ouro_1p4b", "--plan", "--device-memory", "lots"], "no amount of memory"),
        (["ouro_1p4b", "--plan", "--devices", "3"], "cannot share evenly"),
        (["ouro_1p4b", "--plan", "seed"], "is no override"),
        (["ouro_1p4b", "--device", "tpu"], "--device is 'tpu'"),
    ],
)
def test_bad_arguments(looplm_command: Run, arguments: list[str], said: str) -> None:
    assert said in refused(looplm_command("train", *arguments))


def test_shipped_recipes_go_by_name() -> None:
    assert find_recipe("two_stage_1p4b") == SHIPPED / "two_stage_1p4b.yaml"
    assert find_recipe("small/ouro_1p4b.yaml") == SHIPPED / "small" / "ouro_1p4b.yaml"
    with pytest.raises(UserError, match="did you mean small/ouro_2p6b"):
        find_recipe("small/ouro_2p6")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_ends_in_the_status_of_its_signal(
    looplm_command: Run, recipe: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int
) -> None:
    def stopped(*_: object) -> None:
        raise Interrupted(number, 7, Path("run/checkpoints/0-first-00000007"))

    monkeypatch.setattr("looplm.training.run.run", stopped)
    found, _, err = looplm_command("train", recipe, "--out", recipe.parent / "run")
    assert found == status and f"Stopped by {number.name} after step 7; saved in run/checkpoints/0-first" in err
    assert "--resume goes on" in err and "looplm: interrupted" not in err


def test_one_rank_speaks_for_all(looplm_command: Run, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise UserError("wrong")

    monkeypatch.setattr("looplm.training.run.run", fails)
    assert "wrong" in refused(looplm_command("train", recipe))
    monkeypatch.setenv("RANK", "1")
    assert refused(looplm_command("train", recipe)) == ""


@pytest.mark.slow
def test_a_signal_saves_and_leaves_and_resume_goes_on(recipe: Path, looplm_command: Run) -> None:
    number = signal.SIGTERM
    out = recipe.parent / "run"
    arguments = ["train", str(recipe), "stages.0.num_steps=100000", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "looplm", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    began = time.monotonic()
    while not (out / "telemetry.jsonl").exists() and process.poll() is None and time.monotonic() - began < 120:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number and "Traceback" not in err
    assert f"Stopped by {number.name} after step" in err and "--resume goes on" in err
    (saved,) = (out / "checkpoints").iterdir()
    step = int(saved.name.rsplit("-", 1)[1])
    assert step >= 1
    changed = refused(looplm_command("train", recipe, f"stages.0.num_steps={step + 1}", "--out", out, "--resume"))
    assert f"stages.0.num_steps: 100000 -> {step + 1}" in changed


# --- The gate -------------------------------------------------------------------------------------------------------


def test_the_gate_alone(looplm_command: Run, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "with-gate"
    checkpoint = Path(looplm.__file__).parent / "checkpoints" / "stdlib-small"
    options = ["--data", tmp_path / "text.txt", "--num-steps", 3, "--seq-len", 32, "--batch-rows", 2, "--lr", "0.05"]
    status, printed, _ = looplm_command("gate", checkpoint, "--out", out, *options)
    assert status == 0 and "entropy, nats" in printed and "spread of depth" in printed
    before, after = looplm.load(checkpoint), looplm.load(out)
    assert before.dtype == after.dtype
    differ = {
        name for name, weight in after.state_dict().items() if not torch.equal(before.state_dict()[name], weight)
    }
    assert differ == {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}
    again = looplm_command("gate", checkpoint, "--out", tmp_path / "next", "--label-shift", "next", *options)
    assert again[0] == 0
    assert not torch.equal(
        looplm.load(tmp_path / "next").model.early_exit_gate.weight, after.model.early_exit_gate.weight
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--label-shift", "later"], "choose paper or next"),
        (["--dtype", "int8"], "choose fp32 or bf16"),
        (["--data", "/nowhere/at/all.txt"], "nowhere"),
        (["--lr", "-1"], "optimizer.lr: is -1.0; it must be above 0"),
        (["--seq-len", "1000000"], "--seq-len is 1,000,000, and the context of"),
        (["--data", "hub:"], "names no dataset"),
    ],
)
def test_what_the_gate_refuses(looplm_command: Run, tmp_path: Path, options: list[str], said: str) -> None:
    checkpoint = Path(looplm.__file__).parent / "checkpoints" / "stdlib-small"
    assert said in refused(looplm_command("gate", checkpoint, "--out", tmp_path / "out", *options))
    assert not (tmp_path / "out").exists()


def test_the_gate_overwrites_nothing_and_looks_before_it_trains(
    looplm_command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("trained first")

    monkeypatch.setattr("looplm.training.trainer.Trainer.run", fail)
    monkeypatch.setattr("looplm.cli.gate.statistics", fail)
    checkpoint = Path(looplm.__file__).parent / "checkpoints" / "stdlib-small"
    taken = shutil.copytree(checkpoint, tmp_path / "taken")
    before = {path.name: path.read_bytes() for path in taken.iterdir()}
    assert "nothing is overwritten" in refused(looplm_command("gate", checkpoint, "--out", taken))
    assert {path.name: path.read_bytes() for path in taken.iterdir()} == before
    assert "cannot be written" in refused(looplm_command("gate", checkpoint, "--out", "/proc/gate"))
