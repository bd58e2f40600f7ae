"""`looplm.load`: what it reads, and one clear message for everything that is wrong with a checkpoint."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import looplm
from looplm.errors import UserError
from looplm.hf.modeling import OuroForCausalLM

IDS = torch.tensor([[1, 2, 3, 4]])


@pytest.fixture
def checkpoint(tied_ouro: Path, tmp_path: Path) -> Path:
    """A copy of a small Ouro checkpoint, to be damaged."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tied_ouro / name, directory / name)
    return directory


@pytest.fixture
def change_weights(checkpoint: Path) -> Callable[[Callable[[dict[str, Tensor]], Any]], None]:
    """Rewrites the weights after a function has changed the dictionary of tensors in place."""

    def change(edit: Callable[[dict[str, Tensor]], Any]) -> None:
        weights = load_file(checkpoint / "model.safetensors")
        edit(weights)
        save_file(weights, checkpoint / "model.safetensors")

    return change


def change_config(checkpoint: Path, **changes: Any) -> None:
    """Sets keys of config.json; ... removes one."""
    fields = json.loads((checkpoint / "config.json").read_text()) | changes
    kept = {name: value for name, value in fields.items() if value is not ...}
    (checkpoint / "config.json").write_text(json.dumps(kept))


def shard(checkpoint: Path) -> None:
    """Splits the weights into two files and an index."""
    weights = load_file(checkpoint / "model.safetensors")
    names = sorted(weights)
    files = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, checkpoint / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    (checkpoint / "model.safetensors").unlink()


@torch.no_grad()
def test_sharded_checkpoint(checkpoint):
    whole = looplm.load(checkpoint)
    shard(checkpoint)
    assert torch.equal(looplm.load(checkpoint)(IDS).logits, whole(IDS).logits)


def test_a_loaded_model(checkpoint):
    model = looplm.load(str(checkpoint))
    assert isinstance(model, OuroForCausalLM)
    assert not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.config.dtype == torch.float32
    assert model.generation_config.eos_token_id == 0


@torch.no_grad()
def test_file_may_be_replaced_while_the_model_lives(checkpoint):
    model = looplm.load(checkpoint)
    before = model(IDS).logits
    (checkpoint / "model.safetensors").write_bytes(b"")
    assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_dtype_is_that_of_the_file_unless_given(checkpoint, change_weights, stored):
    """config.json says float32 in both cases; the tensors decide."""
    change_weights(lambda weights: weights.update({k: v.to(stored) for k, v in weights.items()}))
    assert {p.dtype for p in looplm.load(checkpoint).parameters()} == {stored}
    assert {p.dtype for p in looplm.load(checkpoint, dtype=torch.float64).parameters()} == {torch.float64}
    assert looplm.load(checkpoint, dtype="bfloat16").config.dtype == torch.bfloat16


def test_mixed_dtypes_become_the_widest(checkpoint, change_weights):
    change_weights(lambda weights: weights.update({"model.norm.weight": weights["model.norm.weight"].double()}))
    assert {p.dtype for p in looplm.load(checkpoint).parameters()} == {torch.float64}


@pytest.mark.parametrize("dtype", ["int8", "float31", torch.int64])
def test_dtypes_that_are_none(checkpoint, dtype):
    with pytest.raises(UserError, match="choose one of float32, bfloat16"):
        looplm.load(checkpoint, dtype=dtype)


@pytest.mark.parametrize("device", ["no-such-device", "cuda:99", "xpu"])
def test_devices_that_are_not_there(checkpoint, device):
    with pytest.raises(UserError, match=f"device '{device}' cannot be used here"):
        looplm.load(checkpoint, device=device)


def test_integer_weights_are_refused(checkpoint, change_weights):
    change_weights(lambda weights: weights.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(UserError, match="stored as I8"):
        looplm.load(checkpoint)


def test_wrong_tensors_are_all_named(checkpoint, change_weights):
    def damage(weights: dict[str, Tensor]) -> None:
        del weights["model.norm.weight"], weights["model.layers.1.mlp.up_proj.weight"]
        weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2, 2)
        weights["lm_head.weight"] = torch.zeros(1)
        weights["model.early_exit_gate.weight"] = torch.zeros(2, 48)

    change_weights(damage)
    with pytest.raises(UserError) as error:
        looplm.load(checkpoint)
    message = str(error.value)
    missing, unexpected, wrong = message.partition("Tensors ")[2].split("; ")
    assert missing == "missing: model.layers.1.mlp.up_proj.weight [112, 48], model.norm.weight [48]"
    assert unexpected == "unexpected: lm_head.weight [1], model.layers.2.mlp.up_proj.weight [2, 2]"
    assert wrong == "of another shape: model.early_exit_gate.weight [2, 48] instead of [1, 48]."


def test_missing_tensors_of_a_shard(checkpoint):
    shard(checkpoint)
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks the weight files model-00002-of-00002\.safetensors"):
        looplm.load(checkpoint)


def test_an_index_cannot_reach_outside(checkpoint, tmp_path):
    shutil.move(checkpoint / "model.safetensors", tmp_path / "elsewhere.safetensors")
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="lacks the weight files"):
        looplm.load(checkpoint)


@pytest.mark.parametrize("keep_bytes", [0, 4, 200, 100_000])
def test_truncated_weights(checkpoint, keep_bytes):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep_bytes])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read as safetensors.*cut short"):
        looplm.load(checkpoint)


def test_pickled_weights_are_refused(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin\. looplm reads safetensors only"):
        looplm.load(checkpoint)


def test_no_weights_at_all(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(UserError, match="holds no weights"):
        looplm.load(checkpoint)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"config\.json is missing"),
        (b'{"model_type": "ouro", ', "not valid JSON.*cut short"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[1, 2]", "holds a list"),
        (b"{}", 'no "model_type"'),
        (b'{"model_type": "llama"}', "dense model .*looped checkpoints"),
        (b'{"model_type": "huginn_raven"}', '"huginn_raven", an architecture looplm does not know'),
        (b'{"model_type": "looplm"}', "lacks vocab_size"),
        (b'{"model_type": "ouro", "head_dim": 7}', "head_dim is 7"),
        (b'{"model_type": "ouro", "self": 7}', "holds a value that cannot be read: .*self"),
    ],
)
def test_bad_configs(checkpoint, content, message):
    file = checkpoint / "config.json"
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        looplm.load(checkpoint)


def test_a_broken_generation_config(checkpoint):
    (checkpoint / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json is not valid JSON"):
        looplm.load(checkpoint)


def test_generation_config_is_read(checkpoint):
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [0, 2], "temperature": 0.7}')
    config = looplm.load(checkpoint).generation_config
    assert (config.eos_token_id, config.temperature) == ([0, 2], 0.7)


def test_places_that_are_no_checkpoint(tmp_path, checkpoint):
    with pytest.raises(UserError, match="There is no directory .*nowhere"):
        looplm.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is a file; give the checkpoint's directory"):
        looplm.load(checkpoint / "config.json")
    with pytest.raises(UserError, match=r"config\.json is missing"):
        looplm.load(tmp_path)
    with pytest.raises(UserError, match="There is no directory"):
        looplm.load("./owner/model")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "None names no checkpoint"),
        ("", "'' names no checkpoint"),
        (3, "3 names no checkpoint"),
        ("~no-such-user-at-all/x", "~no-such-user-at-all/x cannot be looked up"),
        ("x" * 5000, "^x{100} cannot be looked up: File name too long"),
    ],
    ids=repr,
)
def test_what_cannot_be_a_path(source, message):
    for read in (looplm.load, looplm.load_tokenizer):
        with pytest.raises(UserError, match=message):
            read(source)


def test_links_in_a_circle(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UserError, match="cannot be looked up"):
        looplm.load(tmp_path / "a")


def test_a_tokenizer_config_that_is_no_object(checkpoint):
    from looplm.data.tokenizer import train_tokenizer

    train_tokenizer(["loops within loops"] * 4, vocab_size=264).save_pretrained(checkpoint)
    (checkpoint / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"tokenizer_config\.json holds a list; it must be a JSON object"):
        looplm.load_tokenizer(checkpoint)


def test_hub_name_without_a_network():
    with pytest.raises(UserError, match="hub could not provide a model of that name .*download the model beforehand"):
        looplm.load("no-such-owner/no-such-model")


def test_hub_files_hold_no_code(monkeypatch, checkpoint):
    """What is asked of the hub is exactly the patterns below; the local copy is then read like any directory."""
    asked: list[Any] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(checkpoint)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert looplm.load("owner/model").config.name_or_path == "owner/model"
    [(name, patterns)] = asked
    assert name == "owner/model"
    assert not any(Path("modeling_ouro.py").match(pattern) for pattern in patterns)
    assert not any(Path("pytorch_model.bin").match(pattern) for pattern in patterns)
    assert any(Path("model-00001-of-00002.safetensors").match(pattern) for pattern in patterns)


def test_tokenizer(tmp_path, checkpoint):
    from looplm.data.tokenizer import train_tokenizer

    with pytest.raises(UserError, match=r"has no tokenizer: .*give token ids instead of text"):
        looplm.load_tokenizer(checkpoint)
    tokenizer = train_tokenizer(["loops within loops"] * 4, vocab_size=264)
    tokenizer.save_pretrained(checkpoint)
    again = looplm.load_tokenizer(checkpoint)
    assert again("loops within")["input_ids"] == tokenizer("loops within")["input_ids"]
    assert (again.eos_token_id, again.chat_template) == (tokenizer.eos_token_id, tokenizer.chat_template)
    (checkpoint / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer of .* cannot be read"):
        looplm.load_tokenizer(checkpoint)
