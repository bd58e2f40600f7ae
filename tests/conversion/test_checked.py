"""Convert, upcycle and export as whole jobs: what they write, what they report, and that failure leaves nothing."""

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import looplm
from looplm.conversion import checked
from looplm.conversion.checked import convert_checkpoint, export_checkpoint, upcycle_checkpoint
from looplm.conversion.dense_to_looped import Looping, build_looped, dense_to_looped
from looplm.data.tokenizer import train_tokenizer
from looplm.errors import UserError
from looplm.hf.modeling import LoopLMForCausalLM, OuroForCausalLM

IDS = torch.tensor([[5, 9, 2, 7, 31, 30, 4, 4, 11, 20, 1, 36]])
GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- Convert --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"core": (1, 4), "lora_rank": 2}, {"injection": "none"}], ids=str)
@torch.no_grad()
def test_convert(save_dense, tmp_path, options):
    source = save_dense("qwen3")
    report = convert_checkpoint(source, tmp_path / "looped", Looping(**options))
    model = looplm.load(tmp_path / "looped")
    assert model.model.config == report.config
    assert (report.is_exact, report.on_text, report.num_tokens) == (True, False, 64)
    assert report.comparison.first_parting is None
    (row,) = report.comparison.logits
    assert (row.num_loops, row.top1_agreement) == (1, 1.0)
    assert row.largest < 1e-4
    assert len(report.losses) == 3
    assert report.losses[0] == pytest.approx(row.loss[0], abs=1e-5)
    assert report.losses[1] != pytest.approx(row.loss[0], abs=1e-5)
    if not options:
        assert torch.equal(model(IDS).logits, dense_to_looped(source)(IDS).logits)
    assert left_in(tmp_path) == ["dense_qwen3", "looped"]


def test_convert_ties_layers(save_dense, tmp_path):
    looping = Looping(lora_from="svd", lora_rank=2, injection="none")
    report = convert_checkpoint(save_dense("llama"), tmp_path / "looped", looping)
    assert not report.is_exact
    assert report.comparison.logits[0].num_loops == 3
    assert report.comparison.first_parting is not None
    assert report.config.num_hidden_layers == 2


def test_convert_takes_tokenizer_and_text_along(save_dense, tmp_path):
    tokenizer = train_tokenizer(["loops within loops", "a model that thinks"] * 8, vocab_size=280)
    source = save_dense("llama", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(source)
    text = tmp_path / "text.txt"
    text.write_text("a model that loops within loops")
    report = convert_checkpoint(source, tmp_path / "looped", Looping(), text=text)
    assert report.on_text
    assert report.num_tokens == len(tokenizer(text.read_text())["input_ids"])
    again = looplm.load_tokenizer(tmp_path / "looped")
    assert again("a model that thinks")["input_ids"] == tokenizer("a model that thinks")["input_ids"]


def test_convert_rounds_and_shards(save_dense, tmp_path):
    """In a narrower dtype the comparison is with the dense model of the same rounded weights: exact again."""
    report = convert_checkpoint(
        save_dense("llama"), tmp_path / "looped", Looping(), dtype="bf16", max_shard_size="20KB"
    )
    assert report.comparison.logits[0].largest < 1e-4
    assert len(list((tmp_path / "looped").glob("*.safetensors"))) > 1
    assert looplm.load(tmp_path / "looped").dtype == torch.bfloat16


def test_a_failed_parity_check_leaves_nothing(save_dense, tmp_path, monkeypatch):
    source = save_dense("llama")

    def wrong(*args, **kwargs):
        model = build_looped(*args, **kwargs)
        with torch.no_grad():
            model.model.layers[3].mlp.down_proj.weight.mul_(2)
        return model

    monkeypatch.setattr(checked, "build_looped", wrong)
    with pytest.raises(UserError, match="parts from the dense model at loop 1, layer 4"):
        convert_checkpoint(source, tmp_path / "looped", Looping())
    assert left_in(tmp_path) == ["dense_llama"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("disk full")])
def test_a_full_disk_leaves_nothing(save_dense, tmp_path, monkeypatch, error):
    source = save_dense("llama")

    def save(self, directory, **kwargs):
        (Path(directory) / "model-00001-of-00002.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(LoopLMForCausalLM, "save_pretrained", save)
    for job in (
        lambda out: convert_checkpoint(source, out, Looping()),
        lambda out: upcycle_checkpoint(GOLDEN / "gqa", out, 6),
        lambda out: export_checkpoint(GOLDEN / "gqa", out, "hf"),
    ):
        with pytest.raises(UserError, match="could not be written"):
            job(tmp_path / "new" / "looped")
        assert left_in(tmp_path) == ["dense_llama"]


def test_a_target_in_use_is_left_alone(save_dense, tmp_path):
    source, target = save_dense("llama"), tmp_path / "target"
    target.mkdir()
    (target / "thesis.txt").write_text("mine")
    jobs = (
        lambda: convert_checkpoint(source, target, Looping()),
        lambda: upcycle_checkpoint(GOLDEN / "gqa", target, 6),
        lambda: export_checkpoint(GOLDEN / "gqa", target, "hf"),
    )
    for job in jobs:
        with pytest.raises(UserError, match="exists and is not an empty directory"):
            job()
    assert (target / "thesis.txt").read_text() == "mine"
    (target / "thesis.txt").unlink()
    jobs[2]()  # an empty directory is as good as none
    assert looplm.load(target).config.model_type == "looplm"


# --- Sources that are refused ---------------------------------------------------------------------------------------


def edit_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, 'architecture "mamba", which cannot be converted.*llama, qwen2, qwen3'),
        ({"model_type": "ouro"}, "looped already"),
        ({"model_type": None}, "architecture"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_parameters"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "are quantised"),
        ({"num_hidden_layers": 7}, r"missing: model.layers.6.input_layernorm.weight \[16\], model.layers.6.post_att"),
        ({"num_hidden_layers": 5}, r"unexpected: model.layers.5.input_layernorm.weight \[16\]"),
        ({"intermediate_size": 25}, r"another shape: .*up_proj.weight \[24, 16\] instead of \[25, 16\]"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
    ids=str,
)
def test_configs_that_cannot_be_followed(save_dense, tmp_path, changes, message):
    source = save_dense("llama")
    edit_config(source, **changes)
    with pytest.raises(UserError, match=message):
        convert_checkpoint(source, tmp_path / "looped", Looping())
    assert left_in(tmp_path) == ["dense_llama"]


def test_a_sliding_window_is_refused(save_dense, tmp_path):
    source = save_dense("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2)
    with pytest.raises(UserError, match="use_sliding_window = True; layer_types"):
        convert_checkpoint(source, tmp_path / "looped", Looping())


def test_pickles_and_missing_tensors(save_dense, tmp_path):
    source = save_dense("llama")
    weights = load_file(source / "model.safetensors")
    for name in ("model.norm.weight", "lm_head.weight"):
        weights.pop(name)
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"missing: model.norm.weight \[16\], lm_head.weight \[37, 16\]"):
        convert_checkpoint(source, tmp_path / "looped", Looping())
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(UserError, match="safetensors only, since a pickle"):
        convert_checkpoint(source, tmp_path / "looped", Looping())
    assert left_in(tmp_path) == ["dense_llama"]


def test_a_tied_head_that_is_stored(save_dense):
    """Equal to the embedding it is left out, as transformers leaves it; another one is a contradiction."""
    source = save_dense("llama_tied")
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    assert dense_to_looped(source).config.tie_word_embeddings
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="not the embedding"):
        dense_to_looped(source)


# --- Upcycle --------------------------------------------------------------------------------------------------------


def test_upcycle_reports_equivalent_depths(make_looped, tmp_path):
    source = looplm.save_checkpoint(make_looped(final_norm="none"), tmp_path / "source")
    report = upcycle_checkpoint(source, tmp_path / "grown", 4)
    assert [(loops, before) for loops, before, _ in report.equivalent] == [(1, 2), (2, 4)]
    assert max(apart for *_, apart in report.equivalent) < 1e-10
    assert report.losses_after[:2] == pytest.approx([report.losses_before[1], report.losses_before[3]], abs=1e-9)
    assert report.num_tensors == len(load_file(tmp_path / "grown" / "model.safetensors"))
    interleaved = upcycle_checkpoint(source, tmp_path / "interleaved", 4, "interleaved")
    assert interleaved.equivalent is None


def test_upcycle_of_an_ouro_checkpoint(tmp_path):
    model = looplm.load(GOLDEN / "gqa")
    report = upcycle_checkpoint(GOLDEN / "gqa", tmp_path / "grown", 2 * model.model.config.num_hidden_layers)
    assert isinstance(looplm.load(tmp_path / "grown"), OuroForCausalLM)
    assert report.equivalent is None
    assert len(report.losses_before) == len(report.losses_after) == model.config.num_loops


# --- Export ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gqa", "tied_mqa"])
def test_export_there_and_back_is_identical(name, tmp_path):
    first = export_checkpoint(GOLDEN / name, tmp_path / "ours", "hf", max_shard_size="20KB")
    assert len(first.files) > 1
    ours = looplm.load(tmp_path / "ours")
    assert type(ours) is LoopLMForCausalLM
    again = export_checkpoint(tmp_path / "ours", tmp_path / "ouro", "ouro")
    assert again.files == ["model.safetensors"]
    golden, back = load_file(GOLDEN / name / "model.safetensors"), load_file(tmp_path / "ouro" / "model.safetensors")
    assert golden.keys() == back.keys()
    assert all(torch.equal(golden[key], back[key]) for key in golden)
    assert first.num_tensors == again.num_tensors == len(golden)
    # All that the released code reads of the config is there again.
    before, after = (json.loads((d / "config.json").read_text()) for d in (GOLDEN / name, tmp_path / "ouro"))
    written_anew = ("transformers_version", "auto_map", "max_window_layers")
    for key, value in before.items():
        assert key in written_anew or after[key] == value
    assert after["max_window_layers"] == after["num_hidden_layers"]  # as released


def test_export_carries_the_settings(make_looped, tmp_path):
    model = make_looped(exit_threshold=0.7, beta=0.1, bos_token_id=1, eos_token_id=2)
    source = looplm.save_checkpoint(model, tmp_path / "source")
    export_checkpoint(source, tmp_path / "ouro", "ouro", dtype="bf16")
    ouro = looplm.load(tmp_path / "ouro")
    assert (ouro.config.exit_threshold, ouro.config.beta, ouro.config.eos_token_id) == (0.7, 0.1, 2)
    assert ouro.dtype == torch.bfloat16
    assert torch.equal(ouro(IDS).logits, looplm.load(source, dtype="bf16")(IDS).logits)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"injection": "scalar"}, "injection scalar"),
        ({"injection": "concat_layers"}, "injection concat_layers"),
        ({"lora_rank": 2}, "LoRA banks of rank 2"),
        ({"num_prelude_layers": 1, "num_coda_layers": 2}, "a prelude of 1 layers, a coda of 2 layers"),
        ({"norm_placement": "pre", "final_norm": "frms"}, "norm_placement pre, final_norm frms"),
        ({"loop_state": "raw"}, "loop_state raw"),
        ({"qk_norm": True, "mlp_bias": True}, "biases, q/k norms"),
        ({"position_scaling": {"rope_type": "linear", "factor": 2.0}}, "scaled rotary positions"),
    ],
    ids=str,
)
def test_what_the_ouro_format_cannot_carry_is_named(make_looped, tmp_path, fields, named):
    source = looplm.save_checkpoint(make_looped(**fields), tmp_path / "source")
    with pytest.raises(UserError, match=f"cannot carry {named}\\. "):
        export_checkpoint(source, tmp_path / "ouro", "ouro")
    assert left_in(tmp_path) == ["source"]
    export_checkpoint(source, tmp_path / "hf", "hf")


def test_export_of_another_format_or_size(tmp_path):
    with pytest.raises(UserError, match="format is 'gguf'; choose ouro or hf"):
        export_checkpoint(GOLDEN / "gqa", tmp_path / "out", "gguf")
    for size in ("0", "5 bananas", "-1GB"):
        with pytest.raises(UserError, match="max_shard_size"):
            export_checkpoint(GOLDEN / "gqa", tmp_path / "out", "hf", max_shard_size=size)
    assert left_in(tmp_path) == []


def test_a_changed_tensor_is_found(make_looped, tmp_path, monkeypatch):
    source = looplm.save_checkpoint(make_looped(), tmp_path / "source")
    write = checked.write_model

    def damaging(directory, model, *args, **kwargs):
        write(directory, model, *args, **kwargs)
        weights = load_file(directory / "model.safetensors")
        weights["model.norm.weight"][0] += 1e-9
        save_file(weights, directory / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(checked, "write_model", damaging)
    for job in (lambda out: export_checkpoint(source, out, "hf"), lambda out: upcycle_checkpoint(source, out, 4)):
        with pytest.raises(UserError, match="not those written: model.norm.weight"):
            job(tmp_path / "out")
    assert left_in(tmp_path) == ["source"]
