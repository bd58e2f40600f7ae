"""The runner: finished cells are read back, failed ones named, killed ones resumed.

Real processes, one of which fails, are in tests/cli/test_lab.py.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from looplm.errors import UserError
from looplm.lab import study_cell, study_run
from looplm.lab.study import Plan, plan_study
from looplm.lab.study_cell import CELL, FAILED, RUN, Told, curve, main, oscillation, scaling_rows
from looplm.lab.study_figures import GENERAL, kind_of
from looplm.lab.study_files import FOUND, locked
from looplm.lab.study_run import (
    StudyStopped,
    check_directory,
    make_directory,
    prepare_cells,
    run_study,
    slots_of_machine,
)
from looplm.training.trainer import Trainer

QUIET = Console(quiet=True)

FINISHED = json.dumps(dict(num_layers=1, num_loops=1, num_parameters=1, core_parameters=1, scaling=[], train_loss=2.0))
"""Of a cell that trained nothing."""


def prepared(study: Path, out: Path, seeds: int = 1) -> Plan:
    plan = plan_study(study, "small", seeds=seeds)
    make_directory(out)
    check_directory(plan, out)
    prepare_cells(plan, plan.cells, out, QUIET)
    return plan


def figures(directory: Path) -> dict:
    found = json.loads((directory / FOUND).read_text())
    return {name: value for name, value in found.items() if name != "seconds"}


def test_a_finished_cell_is_not_trained_again_and_seeds_can_be_added(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, started = tmp_path / "out", []
    plan = prepared(study, out)
    for cell in plan.cells:
        (out / "cells" / cell.name / FOUND).write_text(FINISHED)

    def start(directory: Path, slot: study_run.Slot) -> "subprocess.Popen[bytes]":
        started.append(directory.name)
        (directory / FOUND).write_text(FINISHED)
        return subprocess.Popen(["true"])

    monkeypatch.setattr(study_run, "_start", start)
    assert run_study(plan, out, console=QUIET) == {} and started == []
    assert run_study(plan_study(study, "small", seeds=2), out, console=QUIET) == {}
    assert sorted(started) == ["0.01-deep-seed1", "0.01-shallow-seed1"]


def test_a_process_that_is_killed_is_named_and_the_others_go_on(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(directory: Path, slot: study_run.Slot) -> "subprocess.Popen[bytes]":
        if "deep" in directory.name:
            return subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
        (directory / FOUND).write_text(FINISHED)
        return subprocess.Popen(["true"])

    monkeypatch.setattr(study_run, "_start", start)
    failed = run_study(plan_study(study, "small", seeds=1), tmp_path / "out", console=QUIET)
    assert failed == {"0.01-deep-seed0": "its process was killed by signal 9"}


def test_asked_to_stop_the_runner_stops_its_cells_and_says_so(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = ("import pathlib, signal, sys, time\n"
            "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1], 'saved').touch(), sys.exit(143)))\n"
            "pathlib.Path(sys.argv[1], 'up').touch()\ntime.sleep(60)")  # fmt: skip
    monkeypatch.setattr(study_run, "_start", lambda directory, slot: subprocess.Popen(
        [sys.executable, "-c", code, str(directory)]))  # fmt: skip
    out = tmp_path / "out"

    def stop() -> None:
        while len(list(out.glob("cells/*/up"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(StudyStopped) as stopped:
        run_study(plan_study(study, "small", seeds=1), out, processes=2, console=QUIET)
    assert stopped.value.exit_status == 143 and len(list(out.glob("cells/*/saved"))) == 2


def test_a_cell_that_dies_goes_on_from_its_checkpoint_to_the_same_figures(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = prepared(study, tmp_path / "straight")
    straight = tmp_path / "straight" / "cells" / plan.cells[1].name
    assert main(straight) == 0
    prepared(study, tmp_path / "died")
    died = tmp_path / "died" / "cells" / plan.cells[1].name
    step, steps = Trainer.train_step, []

    def dies(self: Trainer):
        steps.append(self.step)
        if self.step == 2:
            raise RuntimeError("the power went out")
        return step(self)

    monkeypatch.setattr(Trainer, "train_step", dies)
    assert main(died) == 2
    assert (died / FAILED).read_text() == "RuntimeError: the power went out" and not (died / FOUND).exists()
    monkeypatch.setattr(Trainer, "train_step", lambda self: (steps.append(self.step), step(self))[1])
    assert main(died) == 0 and not (died / FAILED).exists()
    assert steps == [0, 1, 2, 2]
    assert figures(died) == figures(straight)


def test_the_figures_are_those_that_telemetry_and_model_tell(study: Path, tmp_path: Path) -> None:
    plan = prepared(study, tmp_path / "out")
    directory = tmp_path / "out" / "cells" / plan.cells[1].name
    assert plan.cells[1].levels["depth"] == "deep" and main(directory) == 0
    found = figures(directory)
    told = [json.loads(line) for line in (directory / "run" / "telemetry.jsonl").read_text().splitlines()]
    steps = [entry for entry in told if "loss" in entry]
    assert found["train_loss_by_loop"] == steps[-1]["loop_losses"] and found["num_loops"] == 4
    assert found["gain_by_loop"] == pytest.approx(
        [a - b for a, b in zip(steps[-1]["loop_losses"], steps[-1]["loop_losses"][1:], strict=False)]
    )
    assert found["peak_grad_norm"] == max(entry["grad_norm"] for entry in steps)
    held_out = [entry["held_out"] for entry in told if "held_out" in entry][-1]
    assert found["held_out_by_loop"] == held_out["loop_losses"] and len(held_out["loop_losses"]) == 6
    assert found["held_out_loss"] == held_out["loop_losses"][3]
    assert [row["tokens"] for row in found["scaling"]] == [64, 96]
    absent = ("state_gradients", "gradient_decades")  # the recipe measures none
    assert {name: kind_of(value) for name, value in (found | {"warnings": ["one"]}).items()} == {
        name: kind for name, kind in GENERAL.items() if name not in (*absent, "seconds")
    }
    # Ends of the gate's frontier are the fixed depths.
    for name, by_loop in (("accuracy", found["accuracy_by_loop"]), ("loss", held_out["loop_losses"])):
        line = found[f"frontier_{name}"]
        assert (line["x"][0], line["x"][-1]) == (1, 4)
        assert (line["y"][0], line["y"][-1]) == pytest.approx((by_loop[0], by_loop[3]), rel=1e-4)
    # Where the figures are damaged, they are found again without training again.
    (directory / FOUND).write_text("{")
    assert main(directory) == 0 and figures(directory) == found
    assert len((directory / "run" / "telemetry.jsonl").read_text().splitlines()) == len(told)


# --- Alone, moved, orphaned -----------------------------------------------------------------------------------------


def test_a_cell_that_another_process_trains_says_so(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_cell, "PATIENCE_SECONDS", 0.1)
    directory = tmp_path / "out" / "cells" / prepared(study, tmp_path / "out").cells[0].name
    with locked(directory, "busy"):
        assert main(directory) == 2
    reason = (directory / FAILED).read_text()
    assert reason.startswith("another process is still training in") and "--resume" not in reason


def test_a_reason_that_the_disk_does_not_take_is_no_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(study_cell, "train_and_measure", full)
    assert main(tmp_path) == 2 and "No space left" in (tmp_path / FAILED).read_text()
    monkeypatch.setattr(study_cell, "write_whole", full)
    assert main(tmp_path) == 2 and list(tmp_path.iterdir()) == []


def test_a_study_that_was_moved_goes_on(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, name = prepared(study, tmp_path / "out"), "0.01-deep-seed0"
    step = Trainer.train_step

    def dies(self: Trainer):
        if self.step == 2:
            raise RuntimeError("the power went out")
        return step(self)

    monkeypatch.setattr(Trainer, "train_step", dies)
    assert main(tmp_path / "out" / "cells" / name) == 2
    monkeypatch.undo()
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    prepare_cells(plan, plan.cells, moved, QUIET)
    assert main(moved / "cells" / name) == 0, (moved / "cells" / name / FAILED).read_text()


def test_a_cell_stops_and_saves_when_its_runner_is_killed(study: Path, tmp_path: Path) -> None:
    base = study.with_name("base.yaml")
    base.write_text(base.read_text().replace("checkpoints: {every: 1,", "checkpoints: {every: 100000,"))
    study.write_text(study.read_text().replace("num_steps=3", "num_steps=100000"))
    directory = tmp_path / "out" / "cells" / prepared(study, tmp_path / "out").cells[0].name
    code = ("import os, pathlib, subprocess, sys, time\n"
            "command = [sys.executable, '-m', 'looplm.lab.study_cell', sys.argv[1], str(os.getpid())]\n"
            "pathlib.Path(sys.argv[1], 'pid').write_text(str(subprocess.Popen(command).pid))\n"
            "time.sleep(600)")  # fmt: skip
    runner = subprocess.Popen([sys.executable, "-c", code, str(directory)], stdout=subprocess.DEVNULL)
    telemetry = directory / RUN / "telemetry.jsonl"
    try:
        wait_for(lambda: telemetry.exists() and telemetry.read_bytes().count(b"\n") > 2)
        runner.kill()
        runner.wait()
        with locked(directory, "it trains on without its runner", patience=60):
            assert list((directory / RUN / "checkpoints").iterdir())
    except BaseException:  # then it is still there
        runner.kill()
        os.kill(int((directory / "pid").read_text()), signal.SIGKILL)
        raise


def wait_for(condition: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


# --- Directories ----------------------------------------------------------------------------------------------------


def test_cells_share_one_tokenizer_and_one_set_of_tokens(study: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepared(study, out, seeds=2)
    recipes = [(directory / "recipe.yaml").read_text() for directory in (out / "cells").iterdir()]
    assert len(recipes) == 4
    (tokenizer,) = out.glob("tokenizer-*")
    for recipe in recipes:
        assert f"path: {tokenizer}" in recipe and f"data_cache: {out / 'tokens'}" in recipe


def test_another_text_or_size_has_a_tokenizer_of_its_own(study: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    text = study.read_text().replace(
        "  depth:\n", "  read: {key: tokenizer.max_bytes, values: [20000, 40000]}\n  depth:\n", 1
    )
    study.write_text(text)
    plan = prepared(study, out)
    assert len(list(out.glob("tokenizer-*"))) == 2 and len(plan.cells) == 4


def test_a_directory_of_something_else_is_refused(study: Path, tmp_path: Path) -> None:
    plan, out = plan_study(study, "small"), tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").touch()
    with pytest.raises(UserError, match="is not empty and holds no study"):
        run_study(plan, out, console=QUIET)
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]


def test_another_study_or_other_values_are_refused(study: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepared(study, out)
    changed = plan_study(study, "small", overrides=["stages.0.num_steps=9"])
    with pytest.raises(UserError, match="with other values"):
        run_study(changed, out, console=QUIET)
    other = study.with_name("other.yaml")
    other.write_text(study.read_text())
    with pytest.raises(UserError, match="holds the study own"):
        run_study(plan_study(other, "small"), out, console=QUIET)


def test_a_directory_of_a_version_with_fewer_settings_goes_on(study: Path, tmp_path: Path) -> None:
    plan, out = plan_study(study, "small"), tmp_path / "out"
    prepared(study, out)
    path = out / "cells" / plan.cells[0].name / CELL
    job = json.loads(path.read_text())
    assert "    smoothing: 0.0\n" in job["recipe"]
    path.write_text(json.dumps(job | {"recipe": job["recipe"].replace("    smoothing: 0.0\n", "")}))
    check_directory(plan, out)


def test_a_task_brings_its_own_tokenizer_and_the_measure_its_arguments(tmp_path: Path) -> None:
    plan = plan_study("capo", "small", seeds=1, overrides=["stages.0.data.sources.0.arguments.num_people=20"])
    out = tmp_path / "out"
    prepare_cells(plan, plan.cells[:1], out, QUIET)
    directory = out / "cells" / plan.cells[0].name
    job = json.loads((directory / CELL).read_text())
    assert job["arguments"]["num_people"] == 20 and job["measure"] == "looplm.lab.capo_evaluation:measure"
    assert (directory / "tokenizer" / "tokenizer.json").exists()


# --- Small things ---------------------------------------------------------------------------------------------------


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(study_run.torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def threads(processes: int | None) -> list[str]:
        return [slot.environment["OMP_NUM_THREADS"] for slot in slots_of_machine(processes)]

    assert threads(None) == ["1"] * 8 and threads(3) == ["2"] * 3 and threads(20) == ["1"] * 20
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads(2) == ["1", "1"]
    with pytest.raises(UserError, match="at least one"):
        slots_of_machine(0)


def test_every_process_gets_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_run.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots_of_machine(None)] == ["3", "5"]
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots_of_machine(3)] == ["3", "5", "3"]


def test_oscillation_is_blind_to_a_trend_and_sees_a_swing() -> None:
    line = [10 - 0.01 * i for i in range(400)]
    assert oscillation(line[:300]) < 0.05
    swing = [value + (-1) ** i for i, value in enumerate(line)]
    assert oscillation(swing) == pytest.approx(1.0, rel=0.05)
    early = [value + (-1) ** i * (i < 150) for i, value in enumerate(line)]
    assert oscillation(early) < 0.06  # what happens at the start does not count


def test_a_long_curve_is_thinned_by_means() -> None:
    steps = [{"step": i} for i in range(1, 11)]
    assert curve(steps, list(range(10)), most=4) == {"x": [2, 5, 8, 10], "y": [1, 4, 7, 9]}


def test_scaling_rows_pair_a_measurement_with_its_own_step() -> None:
    told = Told(
        steps=[{"step": 1, "tokens": 10, "exit_pdf": [1.0]}, {"step": 2, "tokens": 20, "exit_pdf": [0.5]}],
        held_out=[{"step": 2, "loop_losses": [3.0]}],
        warnings=[],
    )
    assert scaling_rows(told) == [{"tokens": 20, "loop_losses": [3.0], "exit_pdf": [0.5]}]
