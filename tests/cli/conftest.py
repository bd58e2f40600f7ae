"""A tiny checkpoint and the command `looplm generate` on it."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import typer

from looplm.cli import main as cli
from looplm.cli.generate import generate
from looplm.data.tokenizer import train_tokenizer
from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.hf.save import save_checkpoint

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A random model with a trained tokenizer, context 64, whose gate mixes depths."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["the cat sat on the mat. " * 20], 280)
    config = LoopLMConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_loops=3,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    return save_checkpoint(LoopLMForCausalLM(config), tmp_path_factory.mktemp("models") / "tiny", tokenizer)


@pytest.fixture
def run_command(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Runs a function of the command line with arguments; returns exit status, stdout and stderr."""

    def call(command: Callable[..., None], *arguments: object) -> tuple[int, str, str]:
        app = typer.Typer(pretty_exceptions_enable=False)
        app.command()(command)
        monkeypatch.setattr(cli, "app", app)
        monkeypatch.setattr(sys, "argv", ["looplm", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def run(run_command) -> Run:
    """Runs `looplm generate ARGUMENTS`."""
    return partial(run_command, generate)


@pytest.fixture
def prompts(tmp_path) -> Path:
    """Five prompts in a file."""
    path = tmp_path / "prompts.jsonl"
    texts = ["the cat", "the mat", "on", "ça 🙂", "the cat sat on the mat."]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    return path
