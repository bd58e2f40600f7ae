"""`looplm info`: the released models' exact figures, from the config alone; and what it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from looplm.cli import main as cli
from looplm.cli.info import info
from looplm.errors import UserError

KEPT = Path(__file__).resolve().parents[1] / "golden" / "tied_mqa"
OURO = {
    "model_type": "ouro",
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 65536,
    "rope_theta": 1000000.0,
    "total_ut_steps": 4,
}
"""What Ouro-1.4B and 2.6B have in common."""
FIGURES = {
    "Ouro-1.4B": (24, 1_434_652_673, 269, 786_432),
    "Ouro-2.6B": (48, 2_667_974_657, 533, 1_572_864),
    "Ouro-2.6B-Thinking": (48, 2_667_974_657, 533, 1_572_864),
}
"""Layers, parameters, tensors, cache bytes per token in bfloat16."""


@pytest.fixture
def run() -> Callable[..., Result]:
    """Runs the command with the given arguments; what it raises is raised."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(info)

    def call(*arguments: str | Path) -> Result:
        return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False, env={"COLUMNS": "120"})

    return call


def check_figures(report: dict[str, Any], name: str) -> None:
    layers, parameters, tensors, cache_bytes = FIGURES[name]
    assert report["parameters"]["total"] == parameters
    assert report["parameters"]["total_separate_head"] == parameters
    assert report["parameters"]["num_tensors"] == tensors
    assert [depth["effective_depth"] for depth in report["depths"]] == [layers, 2 * layers, 3 * layers, 4 * layers]
    per_token = {name: cost["bytes_per_token"]["decode"] for name, cost in report["cache"].items()}
    shared = cache_bytes // 4
    assert per_token == {
        "per_loop": cache_bytes, "fill": cache_bytes, "last": shared, "mean": shared, "first": shared
    }  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_released_configs(run, shared_dir, name):
    result = run(shared_dir / "ouro" / "released_configs" / f"{name}.config.json", "--json")
    check_figures(json.loads(result.stdout), name)


@pytest.mark.parametrize("name", ["Ouro-1.4B", "Ouro-2.6B"])
def test_the_same_figures_anywhere(run, tmp_path, name):
    """A directory with a config and no weights is enough."""
    (tmp_path / "config.json").write_text(json.dumps(OURO | {"num_hidden_layers": FIGURES[name][0]}))
    report = json.loads(run(tmp_path, "--json").stdout)
    check_figures(report, name)
    assert (report["model_type"], report["weights"], report["cache_dtype"]) == ("ouro", None, "bf16")
    text = run(tmp_path).stdout
    layers, parameters, tensors, cache_bytes = FIGURES[name]
    assert f"{parameters:,}" in text
    assert f"in {tensors} tensors" in text
    for strategy, expected in (("per_loop", cache_bytes), ("last", cache_bytes // 4)):
        [line] = [line for line in text.splitlines() if line.split()[:1] == [strategy]]
        assert f"{expected:,}" in line
    assert "weights: not looked at" in text
    for depth in report["depths"]:
        assert f"{depth['flops'] / 1e9:,.3f} G" in text
    assert [depth["flops"] for depth in report["depths"]] == sorted({depth["flops"] for depth in report["depths"]})


def test_weights_are_checked_and_a_tied_head_counted_once(run):
    report = json.loads(run(KEPT, "--json", "--dtype", "fp32").stdout)
    assert report["weights"] == "F32"
    assert report["parameters"]["total"] == sum(t.numel() for t in load_file(KEPT / "model.safetensors").values())
    assert report["parameters"]["total_separate_head"] == report["parameters"]["total"] + 128 * 48
    assert report["cache"]["per_loop"]["bytes_per_token"]["decode"] == 2 * 2 * 2 * 16 * 4  # k and v, R, L, d, bytes
    text = run(KEPT).stdout
    assert "total with a head of its own" in text
    assert "F32, names and shapes fit the config" in text


def test_weights_that_do_not_fit(run, tmp_path):
    shutil.copy(KEPT / "config.json", tmp_path)
    weights = load_file(KEPT / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][:40]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.norm\.weight \[40\] instead of \[48\]"):
        run(tmp_path)


def test_integer_weights_are_refused_as_load_refuses_them(run, tmp_path):
    shutil.copy(KEPT / "config.json", tmp_path)
    weights = {name: tensor.long() for name, tensor in load_file(KEPT / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="stored as I64; looplm reads F64"):
        run(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_link_to_weights_that_are_gone(run, tmp_path, name):
    shutil.copy(KEPT / "config.json", tmp_path)
    (tmp_path / name).symlink_to("gone")
    with pytest.raises(UserError, match=f"{name} is a link to gone, which does not exist"):
        run(tmp_path)


def test_pickled_weights_only(run, tmp_path):
    shutil.copy(KEPT / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"as pytorch_model\.bin\. looplm reads safetensors only"):
        run(tmp_path)
    assert json.loads(run(tmp_path / "config.json", "--json").stdout)["weights"] is None
    shutil.copy(KEPT / "model.safetensors", tmp_path)
    assert json.loads(run(tmp_path, "--json").stdout)["weights"] == "F32"


@pytest.mark.parametrize("keep_bytes", [0, 4, 200, 100_000])
def test_truncated_weights_exit_2(tmp_path, monkeypatch, capsys, keep_bytes):
    shutil.copy(KEPT / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes((KEPT / "model.safetensors").read_bytes()[:keep_bytes])
    monkeypatch.setattr("sys.argv", ["looplm", "info", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "cannot be read as safetensors" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/at/all"], "There is no directory nowhere/at/all"),
        ([KEPT / "model.safetensors"], "is a file; give the checkpoint's directory"),
        (["~no-such-user-at-all/x"], "~no-such-user-at-all/x cannot be looked up"),
        (["x" * 5000], "^x{100} cannot be looked up: File name too long"),
        ([""], "'' names no checkpoint. Give a checkpoint's directory or a hub name"),
        ([KEPT, "--dtype", "int4"], "--dtype is 'int4'; choose one of bf16"),
    ],
)
def test_bad_arguments(run, arguments, message):
    with pytest.raises(UserError, match=message):
        run(*arguments)


def test_unknown_architecture(run, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "huginn_raven"}')
    with pytest.raises(UserError, match="an architecture looplm does not know"):
        run(tmp_path / "config.json")
