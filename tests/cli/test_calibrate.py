"""`looplm calibrate` on a copy of the shipped checkpoint."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import looplm
from looplm.cli.calibrate import calibrate, parse_share, save_exit
from looplm.cli.main import app as main
from looplm.errors import UserError
from looplm.quickstart.shipped import shipped_directory

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(calibrate)


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def checkpoint(tmp_path):
    shutil.copytree(shipped_directory(), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def text(tmp_path):
    """Held-out text of several documents."""
    lines = [
        json.dumps({"text": f"def f{i}(x):\n    '''Return {i} and x.'''\n    return {i} + x\n" * 4}) for i in range(12)
    ]
    (tmp_path / "held.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path / "held.jsonl"


def test_a_depth_is_saved_and_read_back(checkpoint, text):
    before = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    result = run(checkpoint, "--data", text, "--target-loops", 2.5, "--json")
    found = json.loads(result.output)
    assert found["mean_loops"] == pytest.approx(2.5, abs=0.1)
    assert looplm.load(checkpoint).config.exit_threshold == found["threshold"]
    after = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    assert {k: v for k, v in after.items() if k != "exit_threshold"} == {
        k: v for k, v in before.items() if k != "exit_threshold"
    }
    assert not list(checkpoint.glob(".config*"))


def test_a_price_and_the_words_for_it(checkpoint, text):
    result = run(checkpoint, "--data", text, "--max-loss-increase", "5%", "--dry-run")
    assert "Not saved (--dry-run)" in result.output
    assert "with all loops" in result.output


def test_an_epsilon_is_saved_and_generation_leaves_by_it(checkpoint, text):
    result = run(checkpoint, "--data", text, "--target-loops", 3, "--exit", "hidden-diff", "--json")
    found = json.loads(result.output)
    assert found["mean_loops"] == pytest.approx(3, abs=0.1)
    assert found["saved"]
    model = looplm.load(checkpoint)
    assert (model.config.exit_epsilon, model.config.exit_threshold) == (found["epsilon"], 1.0)
    engine = looplm.Engine(model)
    assert engine.default_exit == looplm.HiddenDiffExit(found["epsilon"])
    prompts = [list(range(5, 25))]
    (by_default,) = engine.generate(prompts)
    (asked,) = engine.generate(prompts, exit=looplm.HiddenDiffExit(found["epsilon"]))
    assert (by_default.token_ids, by_default.loops) == (asked.token_ids, asked.loops)
    assert min(by_default.loops) < 4
    told = CliRunner().invoke(main, ["generate", str(checkpoint), "--prompt", "import ", "--max-tokens", "2"])
    assert f"hidden-diff:{found['epsilon']:g}, saved as the default" in told.stderr
    told = CliRunner().invoke(
        main, ["generate", str(checkpoint), "--prompt", "x", "--max-tokens", "1", "--num-loops", "1"]
    )
    assert "hidden-diff" not in told.stderr
    # A threshold chosen later takes its place, and the other way round.
    run(checkpoint, "--data", text, "--target-loops", 2.5)
    assert looplm.load(checkpoint).config.exit_epsilon is None
    assert 0 < looplm.load(checkpoint).config.exit_threshold < 1
    result = run(checkpoint, "--data", text, "--max-loss-increase", "5%", "--exit", "hidden-diff")
    assert "Saved in" in result.output and "Epsilon" in result.output


def test_what_cannot_be_reached_changes_nothing(checkpoint, text):
    before = (checkpoint / "config.json").read_bytes()
    with pytest.raises(UserError, match="cannot be reached"):
        run(checkpoint, "--data", text, "--target-loops", 99)
    with pytest.raises(UserError, match="Allow more"):
        run(checkpoint, "--data", text, "--max-loss-increase", "-90%")
    with pytest.raises(UserError, match="either"):
        run(checkpoint, "--data", text)
    with pytest.raises(UserError, match="no local checkpoint"):
        run("ByteDance/Ouro-1.4B", "--target-loops", 2)
    with pytest.raises(UserError, match="--exit is"):
        run(checkpoint, "--target-loops", 2, "--exit", "kl")
    assert (checkpoint / "config.json").read_bytes() == before


def test_an_interrupted_save_leaves_the_config_whole(checkpoint, monkeypatch):
    before = (checkpoint / "config.json").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UserError, match="No space left"):
        save_exit(checkpoint / "config.json", "gate", 0.5)
    assert (checkpoint / "config.json").read_bytes() == before
    assert not list(checkpoint.glob(".config*"))


def test_an_ouro_directory_keeps_its_own_name_for_it(tmp_path):
    golden = Path(__file__).resolve().parents[1] / "golden" / "gqa"
    shutil.copytree(golden, tmp_path / "ouro")
    save_exit(tmp_path / "ouro" / "config.json", "gate", 0.625)
    assert looplm.load(tmp_path / "ouro").config.exit_threshold == 0.625
    assert "exit_threshold" not in json.loads((tmp_path / "ouro" / "config.json").read_text(encoding="utf-8"))


def test_shares():
    assert parse_share("1%") == pytest.approx(0.01)
    assert parse_share("0.01") == pytest.approx(0.01)
    with pytest.raises(UserError, match="1% or 0.01"):
        parse_share("a lot")
