"""The sections of `benchmarks/gpu.py`, and the script itself on the CPU: no part of it is first run on a GPU."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from looplm.bench import utilisation as module
from looplm.bench.decode import decode, weight_bytes
from looplm.bench.devices import Peak
from looplm.bench.figures import checked
from looplm.bench.sizes import SMOKE
from looplm.bench.utilisation import utilisation
from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.model.flops import training_flops

ROOT = Path(__file__).resolve().parent.parent.parent
CPU = torch.device("cpu")
LATER = time.monotonic() + 1e6


def run_script(tmp_path: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict]:
    """The script's result and what it wrote."""
    file = tmp_path / "gpu.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--smoke", "--json", str(file), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return done, json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.slow
def test_the_whole_script_runs_on_the_cpu(tmp_path):
    done, report = run_script(tmp_path, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    sections = [figure["section"] for figure in report["figures"]]
    assert list(dict.fromkeys(sections)) == ["agreement", "training", "decoding"]
    assert sum(figure["verdict"] == "ok" for figure in report["figures"]) == 7
    for section in ("training", "decoding"):
        assert section in done.stdout


def test_a_section_that_fails_costs_the_others_nothing(tmp_path):
    """There is no such device: each section ends with its error, and the table is printed all the same."""
    done, report = run_script(tmp_path, "--device", "cpu:nonsense", "--sections", "training,decoding")
    assert done.returncode == 1
    failed = [figure["section"] for figure in report["figures"] if figure["verdict"] == "FAILED"]
    assert {"training", "decoding"} == set(failed)
    assert "RuntimeError" in done.stdout


def test_a_section_out_of_time_is_stopped(tmp_path):
    done, report = run_script(tmp_path, "--device", "cpu", "--sections", "decoding", "--seconds", "0.5")
    assert done.returncode == 1
    assert "stopped after 0 seconds" in report["figures"][-1]["value"] and "decoding" in done.stdout


def test_an_unknown_section_is_status_2(tmp_path):
    done, report = run_script(tmp_path, "--sections", "everything")
    assert (done.returncode, report) == (2, {}) and "agreement, training, decoding" in done.stderr


def test_a_figure_that_exceeds_its_bound_or_is_not_a_number_fails():
    assert checked("s", "w", 1e-4, 1e-3).verdict == "ok"
    assert checked("s", "w", 2e-3, 1e-3).verdict == "FAILED"
    assert checked("s", "w", float("nan"), 1e-3).verdict == "FAILED"


@pytest.fixture
def speeds(monkeypatch):
    """Tokens per second by (compile, recompute, rows); what is not listed has no memory."""
    known: dict[tuple[str, str, int], float] = {}
    tried: list[tuple[str, str, int]] = []

    def measure(sizes, compile, checkpointing, device, repeats):
        key = (compile, checkpointing, sizes.batch_size)
        tried.append(key)
        if key not in known:
            raise torch.OutOfMemoryError("no memory")
        return known[key], 2**30

    monkeypatch.setattr(module, "_measure", measure)
    return known, tried


def test_the_micro_batch_doubles_until_it_does_not_pay_or_fit(speeds):
    known, tried = speeds
    known.update({("none", "layer", 2): 10.0, ("none", "layer", 4): 20.0})
    known.update({("blocks", "none", 2): 30.0, ("blocks", "none", 4): 30.5, ("blocks", "none", 8): 99.0})
    choices = (("none", "layer"), ("blocks", "none"), ("none", "none"))
    peak = Peak(1e-9 * training_flops(SMOKE.model_config(), 1), 1.0)  # a thousand tokens a second
    figures = list(utilisation(SMOKE, CPU, peak, until=LATER, choices=choices))
    assert tried == [
        ("none", "layer", 2), ("none", "layer", 4), ("none", "layer", 8), ("blocks", "none", 2), ("blocks", "none", 4),
        ("none", "none", 2),
    ]  # fmt: skip
    assert [figure.number for figure in figures] == [20.0, 30.5, None, 30.5]
    assert "2.0% of peak, 4 x 16, 1.00 GiB" in figures[0].value
    assert "no memory for one row" in figures[2].value
    assert figures[3].what == "best: compile blocks, recompute none" and "3.0% of peak" in figures[3].value


def test_nothing_is_begun_when_the_time_is_over(speeds):
    figures = list(utilisation(SMOKE, CPU, None, until=time.monotonic() - 1))
    assert all("out of time" in figure.value for figure in figures) and len(figures) == len(module.CHOICES)
    assert speeds[1] == []
    late = list(decode(SMOKE, CPU, None, until=time.monotonic() - 1))
    assert [figure.number is None for figure in late] == [False, True, True]


def test_a_token_reads_the_core_once_a_loop_and_the_head_once():
    model = LoopLMForCausalLM(LoopLMConfig.from_model_config(SMOKE.model_config()))
    layer = 4 * 32 * 32 + 3 * 32 * 48 + 2 * 32
    assert weight_bytes(model) == 4 * (2 * layer + 64 * 32)


def test_decoding_is_compared_to_the_bandwidth():
    few = {"batch_sizes": (1, 3), "max_tokens": 3, "prompt_tokens": 2, "repeats": 1}
    read, *figures = decode(SMOKE, CPU, Peak(1.0, 1e-3), until=LATER, **few)
    for figure, batch_size in zip(figures, few["batch_sizes"], strict=True):
        share = figure.number / (batch_size * 1e6 / read.number)
        assert figure.what == f"{batch_size} at a time" and f"{share:.1%} of the" in figure.value
