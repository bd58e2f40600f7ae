"""Whole runs of a tiny recipe of two stages: the recipe, what it tells, and a run that is killed on the way."""

import json
from pathlib import Path
from typing import Any

import pytest

from looplm.strict import parse
from looplm.training.recipe import RunRecipe
from looplm.training.run import run
from looplm.training.trainer import Trainer


def tiny(texts: Path, **changes: Any) -> dict[str, Any]:
    """Two stages of four steps: the second has twice the layers, rows twice as long, drawn depth and accumulation."""
    data = {"sources": [{"kind": "files", "paths": [f"{texts}/*.txt"], "part": "train"}]}
    stage = {"batch_tokens": 64, "objective": {"kind": "expected_loss", "beta": 0.1}, "optimizer": {"lr": 1e-2}}
    first = stage | {"name": "first", "num_steps": 4, "seq_len": 16, "num_loops": 2, "data": data, "log_every": 1}
    second = stage | {
        "name": "second", "num_steps": 4, "seq_len": 32, "num_loops": {"kind": "uniform", "min": 1, "max": 3},
        "rope_theta": 50_000, "upcycle": {"num_layers": 2}, "micro_batch_rows": 1, "log_every": 1,
        "data": {"sources": [
            data["sources"][0] | {"weight": 2}, {"kind": "files", "paths": [f"{texts}/*9.txt"], "weight": 1},
        ]},
    }  # fmt: skip
    recipe = {
        "name": "tiny",
        "model": {"kind": "new", "architecture": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 8, "num_loops": 3, "tie_word_embeddings": True,
        }},
        "tokenizer": {"kind": "train", "vocab_size": 280},
        "stages": [first, second],
        "evaluation": {"every": 3, "max_tokens": 200, "seq_len": 16},
        "checkpoints": {"every": 2, "keep_last": 1},
        "telemetry": {"tensorboard": False},
    }  # fmt: skip
    return recipe | changes


def recipe_of(data: dict[str, Any]) -> RunRecipe:
    return parse(RunRecipe, data, "tiny")


def told(run_dir: Path) -> list[dict[str, Any]]:
    """Telemetry without what a clock or the machine decides."""
    timed = ("seconds", "tokens_per_second", "memory_bytes")
    lines = map(json.loads, (run_dir / "telemetry.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in timed} for line in lines]


class Killed(Exception):
    """Stands for a process that ends without a word."""


def run_until(recipe: RunRecipe, run_dir: Path, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs, resuming, until `num_steps` steps are done."""
    left = num_steps
    real = Trainer.train_step

    def step(self: Trainer) -> Any:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        return real(self)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "train_step", step)
        with pytest.raises(Killed):
            run(recipe, run_dir, resume=True)
