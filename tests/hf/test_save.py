"""Saving: the same files again and again, the released layout, and nothing half-written."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open

import looplm
from looplm.data.tokenizer import train_tokenizer
from looplm.errors import UserError
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.hf.save import put_in_place

IDS = torch.tensor([[1, 2, 3, 4]])


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": True, "injection": "concat", "lora_rank": 2},
        {"injection": "scalar", "qk_norm": True, "attention_bias": True, "attention_output_bias": True},
        {"num_prelude_layers": 1, "num_coda_layers": 1, "norm_placement": "sandwich", "final_norm": "frms"},
        {"norm_placement": "magic", "final_norm": "none", "mlp_bias": True},
        {"norm_placement": "post", "injection": "add", "loop_state": "raw"},
    ],
    ids=str,
)
@torch.no_grad()
def test_save_load_save_gives_identical_files(make_config, tmp_path, fields):
    model = LoopLMForCausalLM(make_config(**fields)).eval()
    for parameter in model.parameters():
        parameter.normal_()
    first = looplm.save_checkpoint(model, tmp_path / "first")
    again = looplm.load(first)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    second = looplm.save_checkpoint(again, tmp_path / "second")
    assert contents(first) == contents(second)
    assert sorted(contents(first)) == ["config.json", "generation_config.json", "model.safetensors"]
    model.save_pretrained(tmp_path / "third")
    assert contents(first) == contents(tmp_path / "third")


def test_ouro_directory_is_saved_as_one(golden, tmp_path):
    """The very weights file, and every key of the config: alphabetical names, no head when it is tied."""
    saved = looplm.save_checkpoint(golden.model, tmp_path / "saved")
    before, after = contents(golden.path), contents(saved)
    assert after["model.safetensors"] == before["model.safetensors"]
    config = json.loads(after["config.json"])
    assert config.pop("transformers_version")
    assert config == json.loads(before["config.json"])
    with safe_open(saved / "model.safetensors", framework="pt") as opened:
        names = list(opened.keys())  # noqa: SIM118 (not a dict)
    assert names == sorted(names)
    assert ("lm_head.weight" in names) == (not golden.model.config.tie_word_embeddings)


def test_dtype_is_written_under_its_old_name(tied_ouro, tmp_path):
    saved = looplm.save_checkpoint(looplm.load(tied_ouro, dtype="bfloat16"), tmp_path / "saved")
    config = json.loads((saved / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert "dtype" not in config
    assert {p.dtype for p in looplm.load(saved).parameters()} == {torch.bfloat16}


def test_sharded_by_transformers(tied_ouro, tmp_path):
    model = looplm.load(tied_ouro)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(looplm.load(tmp_path)(IDS).logits, model(IDS).logits)


def test_a_gathered_state_dict_is_what_is_written(tied_ouro, tmp_path):
    model = looplm.load(tied_ouro)
    gathered = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    gathered["lm_head.weight"] = gathered["model.embed_tokens.weight"]
    again = looplm.load(looplm.save_checkpoint(model, tmp_path / "saved", state_dict=gathered))
    assert torch.equal(again.model.norm.weight, model.model.norm.weight + 1)


def test_tokenizer_goes_along(make_config, tmp_path):
    model = LoopLMForCausalLM(make_config(vocab_size=264))
    tokenizer = train_tokenizer(["loops within loops"] * 4, vocab_size=264)
    saved = looplm.save_checkpoint(model, tmp_path / "new" / "deep" / "saved", tokenizer)
    assert looplm.load_tokenizer(saved)("within")["input_ids"] == tokenizer("within")["input_ids"]


def test_an_old_checkpoint_is_replaced(make_config, tmp_path):
    """Its weights go, shards included; the tokenizer and notes beside them stay."""
    target = tmp_path / "checkpoint"
    LoopLMForCausalLM(make_config()).save_pretrained(target, max_shard_size="2KB")
    (target / "notes.md").write_text("kept")
    assert len(list(target.glob("*.safetensors"))) > 1
    looplm.save_checkpoint(LoopLMForCausalLM(make_config(num_hidden_layers=1)), target)
    assert looplm.load(target).config.num_hidden_layers == 1
    names = ["config.json", "generation_config.json", "model.safetensors", "notes.md"]
    assert sorted(contents(target)) == names
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
    ids=["OSError", "SafetensorError"],
)
def test_a_full_disk_costs_nothing(make_config, tmp_path, monkeypatch, failure):
    target = tmp_path / "checkpoint"
    looplm.save_checkpoint(LoopLMForCausalLM(make_config()), target)
    before = contents(target)
    model = LoopLMForCausalLM(make_config(num_hidden_layers=1))

    def fill_up(directory: Path, **_: object) -> None:
        (directory / "config.json").write_text("{")
        raise failure

    monkeypatch.setattr(model, "save_pretrained", fill_up)
    with pytest.raises(UserError, match="could not be written to .*No space left on device.*Nothing was changed"):
        looplm.save_checkpoint(model, target)
    with pytest.raises(UserError, match="could not be written"):
        looplm.save_checkpoint(model, tmp_path / "new" / "deep" / "checkpoint")
    assert contents(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_is_full_at_the_tokenizer(make_config, tmp_path, monkeypatch):
    """The tokenizers library has no error of its own for it."""
    model, write = LoopLMForCausalLM(make_config()), LoopLMForCausalLM.save_pretrained

    def fill_up(self: LoopLMForCausalLM, directory: Path, **arguments: object) -> None:
        write(self, directory, **arguments)
        (directory / "tokenizer.json").symlink_to("/dev/full")

    monkeypatch.setattr(LoopLMForCausalLM, "save_pretrained", fill_up)
    tokenizer = train_tokenizer(["a model that loops"] * 8, vocab_size=260)
    with pytest.raises(UserError, match="could not be written to .*No space left on device"):
        looplm.save_checkpoint(model, tmp_path / "checkpoint", tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_another_failure_of_the_tokenizer_is_not_taken_for_the_disk_s(make_config, tmp_path):
    class Broken:
        def save_pretrained(self, directory: Path) -> None:
            raise LookupError("no such token")

    with pytest.raises(LookupError, match="no such token"):
        looplm.save_checkpoint(LoopLMForCausalLM(make_config()), tmp_path / "checkpoint", Broken())  # pyright: ignore
    assert list(tmp_path.iterdir()) == []


def test_a_failed_rename_puts_the_old_one_back(make_config, tmp_path, monkeypatch):
    target = tmp_path / "checkpoint"
    looplm.save_checkpoint(LoopLMForCausalLM(make_config()), target)
    before, rename = contents(target), Path.rename

    def fail_once(self: Path, to: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(UserError, match="Input/output error"):
        looplm.save_checkpoint(LoopLMForCausalLM(make_config(num_hidden_layers=1)), target)
    assert contents(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


class Killed(BaseException):
    """What no handler of ours catches: the process is gone."""


@pytest.fixture
def killed(make_config, tmp_path, monkeypatch) -> Path:
    """A checkpoint of two layers whose replacement, of one layer, was killed between the two renames."""
    target, fresh = tmp_path / "checkpoint", tmp_path / ".checkpoint.0123abcd.partial"
    looplm.save_checkpoint(LoopLMForCausalLM(make_config()), target)
    LoopLMForCausalLM(make_config(num_hidden_layers=1)).save_pretrained(fresh)
    rename = Path.rename

    def die(self: Path, to: Path) -> Path:
        if self == fresh:
            raise Killed
        return rename(self, to)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "rename", die)
        put_in_place(fresh, target)
    names = [".checkpoint.0123abcd.old", ".checkpoint.0123abcd.partial"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    return target


def test_a_kill_between_the_renames_loses_nothing(killed):
    assert looplm.load(killed).config.num_hidden_layers == 2
    assert looplm.load(killed).config.num_hidden_layers == 2


def test_the_newest_one_set_aside_is_put_back(killed, make_config):
    older, broken = killed.with_name(".checkpoint.00000000.old"), killed.with_name(".checkpoint.ffffffff.old")
    LoopLMForCausalLM(make_config(num_hidden_layers=3)).save_pretrained(older)
    os.utime(older, (1, 1))
    broken.mkdir()  # the newest, and half deleted
    assert looplm.load(killed).config.num_hidden_layers == 2


def test_the_save_after_a_kill_keeps_what_was_there_and_clears_up(killed, make_config, tmp_path):
    (killed.with_name(".checkpoint.0123abcd.old") / "notes.md").write_text("kept")
    others = [tmp_path / ".checkpoint.9.0123abcd.old", tmp_path / ".checkpoints.0123abcd.partial"]
    for other in others:
        other.mkdir()
    looplm.save_checkpoint(LoopLMForCausalLM(make_config(num_hidden_layers=3)), killed)
    assert looplm.load(killed).config.num_hidden_layers == 3
    assert (killed / "notes.md").read_text() == "kept"
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", *(other.name for other in others)}


def test_one_set_aside_that_cannot_be_put_back(killed, monkeypatch):
    def refuse(*_: object) -> Path:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(UserError, match="set aside by a save that was killed.*Read-only file system"):
        looplm.load(killed)


def test_targets_that_are_not_ours_to_replace(make_config, tmp_path):
    model = LoopLMForCausalLM(make_config())
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match="is a file; a checkpoint needs a directory"):
        looplm.save_checkpoint(model, file)
    with pytest.raises(UserError, match="could not be written"):
        looplm.save_checkpoint(model, file / "below")
    with pytest.raises(UserError, match=r"holds files, but no config\.json"):
        looplm.save_checkpoint(model, tmp_path)
    target = looplm.save_checkpoint(model, tmp_path / "checkpoint")
    (target / "runs").mkdir()
    with pytest.raises(UserError, match="holds the folders runs"):
        looplm.save_checkpoint(model, target)
    shutil.rmtree(target)
    target.mkdir()  # empty
    assert looplm.load(looplm.save_checkpoint(model, target)).config.num_loops == 3
