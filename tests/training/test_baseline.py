"""The dense twin of a run: the same but for the loops, resumable with it, and compared on the same held-out text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

import looplm
from looplm.data.tokenizer import train_tokenizer
from looplm.errors import UserError
from looplm.strict import parse
from looplm.training.baseline import dense_twin
from looplm.training.recipe import RunRecipe
from looplm.training.recipe_file import dump_recipe, load_recipe
from looplm.training.run import run
from looplm.training.trainer import Trainer


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for i in range(60):
        (folder / f"document{i}.txt").write_text("\n".join(f"word{(i * j) % 17} and {(i + j) % 7}" for j in range(20)))
    return folder


def twins(texts: Path, num_loops: int = 3, **changes: Any) -> dict[str, Any]:
    """Four steps of Stage I, then two of Stage II, which no dense model has."""
    data = {"sources": [{"kind": "files", "paths": [f"{texts}/*.txt"], "part": "train"}]}
    stage = {"seq_len": 16, "batch_tokens": 64, "data": data, "num_loops": num_loops, "log_every": 1}
    first = {
        "name": "first", "num_steps": 4, "optimizer": {"lr": 1e-2}, "freeze": ["injection.*"] if num_loops > 1 else [],
        "objective": {"kind": "expected_loss", "beta": 0.1, "smoothing": 0.05},
    }  # fmt: skip
    gate = {"name": "gate", "num_steps": 2, "objective": {"kind": "gate_loss"}, "optimizer": {"lr": 1e-2}}
    recipe = {
        "name": "tiny", "baseline": "dense",
        "model": {"kind": "new", "architecture": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 8, "num_loops": num_loops, "tie_word_embeddings": True,
            "injection": "scalar" if num_loops > 1 else "none",
        }},
        "tokenizer": {"kind": "train", "vocab_size": 280},
        "stages": [stage | first] + [stage | gate] * (num_loops > 1),
        "evaluation": {"every": 2, "max_tokens": 200},
        "checkpoints": {"every": 1, "keep_last": 1, "asynchronous": False},
        "telemetry": {"tensorboard": False},
    }  # fmt: skip
    return recipe | changes


LOADED = {"kind": "load", "path": "somewhere"}


def recipe_of(data: dict[str, Any]) -> RunRecipe:
    return parse(RunRecipe, data, "twins")


def compared(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "comparison.json").read_text())


@pytest.fixture(scope="module")
def straight(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    run(recipe_of(twins(texts, compare_loops=2)), run_dir)
    return run_dir


def test_a_model_of_one_loop_is_its_own_twin(texts: Path, tmp_path: Path) -> None:
    """Data, order, steps, optimizer and start are the same: nothing differs where nothing loops."""
    run(recipe_of(twins(texts, num_loops=1)), tmp_path / "run")
    looped, dense = (looplm.load(path / "first") for path in (tmp_path / "run", tmp_path / "run" / "dense"))
    for name, weight in looped.state_dict().items():
        assert torch.equal(weight, dense.state_dict()[name]), name
    assert compared(tmp_path / "run")["difference"] == 0.0


def test_the_twin_is_the_one_loop_recipe(straight: Path, texts: Path, tmp_path: Path) -> None:
    by_hand = twins(texts, num_loops=1)
    del by_hand["baseline"]
    run(recipe_of(by_hand), tmp_path / "by_hand")
    dense, expected = (looplm.load(path / "first") for path in (straight / "dense", tmp_path / "by_hand"))
    assert dense.model.config.num_loops == 1 and dense.model.injection is None
    for name, weight in expected.state_dict().items():
        assert torch.equal(weight, dense.state_dict()[name]), name
    assert not (straight / "dense" / "gate").exists() and not (straight / "dense" / "tokens").exists()
    assert (straight / "dense" / "tokenizer" / "tokenizer.json").read_bytes() == (
        straight / "tokenizer" / "tokenizer.json"
    ).read_bytes()


def test_what_is_compared(straight: Path) -> None:
    found = compared(straight)
    told = [json.loads(line) for line in (straight / "telemetry.jsonl").read_text().splitlines()]
    losses = [entry["held_out"]["loop_losses"] for entry in told if "held_out" in entry and entry["stage"] == "first"]
    assert found["looped"]["loop_losses"] == losses[-1] and len(losses[-1]) == 5
    assert found["difference"] == losses[-1][1] - found["dense"]["loop_losses"][0]
    assert list(found["dense"]["steps"]) == ["2", "4"] == list(found["looped"]["steps"])
    assert found["compare_loops"] == 2 and found["stage"] == "first" and found["num_tokens"] > 100
    # One injection of a vector and a scalar, and the gate, are what the loops have cost in parameters.
    assert found["looped"]["num_parameters"] - found["dense"]["num_parameters"] == (16 + 1) + (16 + 1)
    assert found["looped"]["inference_flops"][0] == found["dense"]["inference_flops"][0]


@pytest.mark.parametrize("num_steps", [2, 5, 7, 9])
def test_in_pieces_it_is_the_same(
    straight: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    """Killed in Stage I, in Stage II, in the twin, and resumed; at the end it is finished, and says so."""
    recipe, run_dir = recipe_of(twins(texts, compare_loops=2)), tmp_path / "run"
    left, real = num_steps, Trainer.train_step

    def step(self: Trainer) -> Any:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        return real(self)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Trainer, "train_step", step)
        run(recipe, run_dir)
    run(recipe, run_dir, resume=True)
    assert compared(run_dir) == compared(straight)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "train_step", None)
        console = Console(record=True, width=120)
        run(recipe, run_dir, resume=True, console=console)
    assert console.export_text().count("is finished") == 2


def test_a_baseline_may_come_later(texts: Path, straight: Path, tmp_path: Path) -> None:
    alone = twins(texts)
    del alone["baseline"]
    run(recipe_of(alone), tmp_path / "run")
    run(recipe_of(twins(texts, compare_loops=2)), tmp_path / "run", resume=True)
    assert compared(tmp_path / "run") == compared(straight)


def test_the_table(texts: Path, straight: Path) -> None:
    console = Console(record=True, width=120)
    run(recipe_of(twins(texts, compare_loops=2)), straight, resume=True, console=console)
    lines, found = console.export_text().splitlines(), compared(straight)
    row = next(line for line in lines if "looped, loop 2 (fixed exit)" in line)
    assert f"{found['difference']:+.4f}" in row and f"{found['looped']['loop_losses'][1]:.4f}" in row


def test_the_twin_of_a_conversion_is_its_source(texts: Path, tmp_path: Path) -> None:
    tokenizer = train_tokenizer((path.read_text() for path in sorted(texts.iterdir())), 280)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=280, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    data = twins(texts, tokenizer={"kind": "load", "path": str(tmp_path / "dense")})
    data["model"] = {
        "kind": "convert", "source": str(tmp_path / "dense"), "core": "1:3", "start_depth": 1.5,
        "architecture": data["model"]["architecture"] | {
            "vocab_size": 280, "num_hidden_layers": 2, "num_prelude_layers": 1, "num_coda_layers": 1,
            "coda_input": "raw", "loop_state": "raw", "norm_placement": "pre", "max_position_embeddings": 64,
        },
    }  # fmt: skip
    data["stages"] = [data["stages"][0] | {"optimizer": {"lr": 1e-12, "weight_decay": 0.0}}]
    recipe = recipe_of(data)
    run(recipe, tmp_path / "run")
    found = compared(tmp_path / "run")
    assert found["looped"]["loop_losses"][0] == pytest.approx(found["dense"]["loop_losses"][0], abs=1e-5)
    dense = looplm.load(tmp_path / "run" / "dense" / "first").model.config
    assert (dense.num_hidden_layers, dense.num_layers, dense.num_loops) == (4, 4, 1)


def test_tied_layers_are_untied_in_the_twin(texts: Path) -> None:
    data = twins(texts, tokenizer=LOADED)
    data["model"] = {
        "kind": "convert", "source": "somewhere", "lora_from": "svd",
        "architecture": data["model"]["architecture"] | {"injection": "none", "lora_rank": 4, "num_hidden_layers": 2},
    }  # fmt: skip
    architecture = dense_twin(recipe_of(data), Path("run")).model.architecture  # type: ignore[union-attr]
    assert (architecture.num_hidden_layers, architecture.lora_rank, architecture.num_loops) == (6, 0, 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"baseline": None, "compare_loops": 2}, "give baseline: dense too"),
        ({"evaluation": None}, "needs an evaluation section"),
        ({"model": {"kind": "checkpoint", "path": "somewhere"}, "tokenizer": LOADED}, "has no dense twin"),
        ({"compare_loops": 6}, "evaluation measures 5 loops"),
        ({"baseline": "sparse"}, "dense"),
    ],
)
def test_refused(texts: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        recipe_of(twins(texts, **changes))


def test_a_gate_stage_in_between_is_refused(texts: Path) -> None:
    data = twins(texts)
    data["stages"] = [*data["stages"], data["stages"][0] | {"name": "more"}]
    with pytest.raises(UserError, match="stand behind all others"):
        recipe_of(data)


def test_the_twin_is_a_recipe_like_any_other(texts: Path, tmp_path: Path) -> None:
    twin = dense_twin(recipe_of(twins(texts)), Path("run"))
    (tmp_path / "twin.yaml").write_text(dump_recipe(twin))
    assert load_recipe(tmp_path / "twin.yaml") == twin
