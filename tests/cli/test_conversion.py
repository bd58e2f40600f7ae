"""convert, upcycle, export and parity on the command line: what they print, and how they end."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from typer.testing import CliRunner, Result

import looplm
from looplm.cli.convert import convert
from looplm.cli.export import export
from looplm.cli.info import info
from looplm.cli.parity import parity
from looplm.cli.upcycle import upcycle
from looplm.errors import UserError
from looplm.hf.adapter import add_adapter, save_adapter

GOLDEN = Path(__file__).resolve().parents[1] / "golden"

app = typer.Typer(pretty_exceptions_enable=False)
for command in (convert, upcycle, export, parity, info):
    app.command(command.__name__)(command)


def run(*arguments: Any) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code in (0, 1), result.output
    return result


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A tiny dense Llama directory."""
    config = LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def test_convert_prints_its_parity_check(dense, tmp_path):
    result = run("convert", dense, "--out", tmp_path / "looped", "--core", "1:3", "--lora-rank", 2, "--num-loops", 2)
    assert "1 layers before, 2 layers in the core, 1 after, 2 loops, injection scalar" in result.output
    assert "100.00%" in result.output  # same top token
    assert "Loss before any training, nats per token: dense" in result.output
    assert "loop 2:" in result.output
    assert "One loop computes what the dense model does." in result.output
    assert run("parity", dense, tmp_path / "looped").exit_code == 0


def test_convert_with_tied_layers(dense, tmp_path):
    options = ("--num-loops", 2, "--injection", "none", "--lora-from", "svd", "--lora-rank", 1)
    result = run("convert", dense, "--out", tmp_path / "looped", *options)
    assert "2 loops approximate the dense model" in result.output
    apart = run("parity", dense, tmp_path / "looped")
    assert apart.exit_code == 1
    assert "They part at loop 1, layer 1: by" in apart.output


def test_upcycle_and_export(tmp_path):
    layers = looplm.load(GOLDEN / "gqa").config.num_hidden_layers
    result = run("upcycle", GOLDEN / "gqa", "--out", tmp_path / "grown", "--num-layers", 2 * layers)
    assert f"{2 * layers} layers" in result.output
    assert "each identical to the one it copies" in result.output
    result = run(
        "export", tmp_path / "grown", "--out", tmp_path / "ours", "--format", "hf", "--max-shard-size", "20KB"
    )
    assert "read back identical" in result.output
    result = run("parity", tmp_path / "grown", tmp_path / "ours", "--tolerance", 0)
    assert "No place differs" in result.output


def test_parity_with_states_of_another_implementation():
    result = run("parity", GOLDEN / "gqa", GOLDEN / "gqa" / "expected.safetensors", "--tolerance", 2e-4)
    assert result.exit_code == 0
    assert "tokens of the file of states" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("convert", "{dense}", "--out", "{tmp}/out", "--core", "1-3"), "--core is '1-3'; give two layer numbers"),
        (("convert", "{dense}", "--out", "{tmp}/out", "--injection", "twice"), "injection is 'twice'"),
        (("convert", "{dense}", "--out", "{tmp}/out", "--loop-state", "cooked"), "loop_state is 'cooked'"),
        (("convert", "{dense}", "--out", "{tmp}/out", "--lora-from", "thin air"), "lora_from is 'thin air'"),
        (("convert", "{dense}", "--out", "{tmp}/out", "--start-depth", "3"), "between 1 and 3 loops"),
        (("convert", "{dense}", "--out", "{dense}"), "not an empty directory"),
        (("convert", "{tmp}/nowhere", "--out", "{tmp}/out"), "There is no directory"),
        (("export", "{golden}", "--out", "{tmp}/out", "--format", "gguf"), "format is 'gguf'"),
        (("upcycle", "{golden}", "--out", "{tmp}/out", "--num-layers", "7"), "give a multiple"),
        (("upcycle", "{golden}", "--out", "{tmp}/out", "--num-layers", "8", "--order", "up"), "order is 'up'"),
        (("parity", "{dense}", "{golden}"), "neither can be compared with it"),
        (("info", "{dense}"), "dense model"),
    ],
    ids=range(12),
)
def test_mistakes_are_said_and_leave_nothing(dense, tmp_path, arguments, message):
    places = {"dense": str(dense), "tmp": str(tmp_path), "golden": str(GOLDEN / "gqa")}
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, [argument.format(**places) for argument in arguments], catch_exceptions=False)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_info_prints_both_totals_of_the_papers_shape(tmp_path):
    """Closing the Loop, 4.4: Qwen3-1.7B on three loops with rank 32, from its config alone."""
    from looplm.conversion.dense_source import dense_shape
    from looplm.conversion.dense_to_looped import Looping, looped_config
    from looplm.hf.config import LoopLMConfig

    qwen3 = Qwen3Config(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
    )
    config = looped_config(dense_shape(qwen3), Looping(lora_rank=32))
    LoopLMConfig.from_model_config(config).save_pretrained(tmp_path)
    printed = run("info", tmp_path / "config.json").output
    for total in ("104,595,456", "2,136,339,458", "1,825,174,530"):
        assert total in printed
    parameters = json.loads(run("info", tmp_path / "config.json", "--json").output)["parameters"]
    assert (parameters["lora"], parameters["total"]) == (104_595_456, 1_825_174_530)
    assert parameters["total_separate_head"] == 2_136_339_458


@torch.no_grad()
def test_qwen3_class_defaults_are_those_of_transformers(tmp_path):
    """A key that config.json leaves out has the family's own default, not ours."""
    config = Qwen3Config(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    config.num_key_value_heads, config.head_dim = 2, 8
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    path = tmp_path / "dense" / "config.json"
    fields = json.loads(path.read_text())
    for name in ("rms_norm_eps", "rope_parameters", "attention_bias", "tie_word_embeddings"):
        fields.pop(name)
    path.write_text(json.dumps(fields))
    assert run("convert", tmp_path / "dense", "--out", tmp_path / "looped").exit_code == 0


def test_export_merges_an_adapter(dense, tmp_path):
    run("convert", dense, "--out", tmp_path / "looped", "--num-loops", 2)
    model = looplm.load(tmp_path / "looped")
    add_adapter(model, 2)
    for name, weight in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(weight)
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        expected = model(ids).logits
    save_adapter(model, tmp_path / "adapter", str(tmp_path / "looped"))
    run(
        "export",
        tmp_path / "looped",
        "--adapter",
        tmp_path / "adapter",
        "--format",
        "hf",
        "--out",
        tmp_path / "merged",
    )
    with torch.no_grad():
        torch.testing.assert_close(looplm.load(tmp_path / "merged")(ids).logits, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="holds no adapter"):
        run("export", tmp_path / "looped", "--adapter", tmp_path, "--format", "hf", "--out", tmp_path / "other")
    assert not (tmp_path / "other").exists()
