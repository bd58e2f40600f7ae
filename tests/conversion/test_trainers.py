"""A converted model under the trainers people use: transformers' own, PEFT's LoRA, TRL's supervised fine-tuning."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import looplm
from looplm.conversion.checked import convert_checkpoint, export_checkpoint
from looplm.conversion.dense_to_looped import Looping
from looplm.data.tokenizer import train_tokenizer

TEXTS = ["loops within loops", "a model that thinks", "loops", "within a model"]


@pytest.fixture
def converted(save_dense, tmp_path: Path) -> Path:
    """A tiny converted checkpoint with its tokenizer."""
    tokenizer = train_tokenizer(TEXTS * 8, vocab_size=280)
    source = save_dense("qwen3", vocab_size=len(tokenizer), num_hidden_layers=2, eos_token_id=0, pad_token_id=0)
    tokenizer.save_pretrained(source)
    convert_checkpoint(source, tmp_path / "converted", Looping(num_loops=2))
    return tmp_path / "converted"


def arguments(directory: Path, **more: Any) -> dict[str, Any]:
    """Two steps on the CPU, nothing reported or saved."""
    plain = {"max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 1e-2}
    quiet = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    return {"output_dir": str(directory), "dataloader_pin_memory": False, **plain, **quiet, **more}


def changed(before: dict[str, torch.Tensor], model: torch.nn.Module) -> set[str]:
    """Names of the parameters that are not what they were."""
    return {name for name, now in model.state_dict().items() if name in before and not torch.equal(before[name], now)}


def copy_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def test_transformers_trainer(converted, tmp_path, capsys):
    looplm.UserError  # noqa: B018 (the first use of a public name registers the architecture)
    model = AutoModelForCausalLM.from_pretrained(converted)
    tokenizer = looplm.load_tokenizer(converted)
    rows = [{"input_ids": ids, "labels": ids} for ids in (tokenizer("loops within loops")["input_ids"],) * 4]
    before = copy_of(model)
    trainer = Trainer(model=model, args=TrainingArguments(**arguments(tmp_path / "run")), train_dataset=rows)
    trainer.train()
    assert trainer.state.log_history[1]["loss"] < trainer.state.log_history[0]["loss"]
    moved = changed(before, model)
    assert {"model.injection.logit", "model.early_exit_gate.bias", "model.layers.1.self_attn.q_norm.weight"} <= moved


@pytest.mark.filterwarnings("default")  # PEFT calls what transformers has renamed
def test_peft_lora(converted, tmp_path, capsys):
    peft = pytest.importorskip("peft", reason="needs peft")
    model = looplm.load(converted)
    ids = torch.tensor([looplm.load_tokenizer(converted)("loops within loops")["input_ids"]])
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    before = copy_of(adapted)
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = adapted(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[2] < losses[0]
    assert all("lora_" in name for name in changed(before, adapted))
    # Merged, it is a looped model like any other: saved, loaded, exported.
    logits = adapted.eval()(input_ids=ids).logits
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, logits, rtol=0, atol=1e-4)
    saved = looplm.save_checkpoint(merged, tmp_path / "merged")
    export_checkpoint(saved, tmp_path / "exported", "hf")
    assert torch.equal(looplm.load(tmp_path / "exported")(ids).logits, merged(ids).logits)


@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.filterwarnings("default")  # TRL warns of what it is about to change
def test_trl_supervised_fine_tuning(converted, tmp_path, capsys, with_lora):
    pytest.importorskip("trl", reason="needs trl")
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    lora = None
    if with_lora:
        peft = pytest.importorskip("peft", reason="needs peft")
        lora = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = looplm.load(converted)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**arguments(tmp_path / "run", bf16=False)),
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=looplm.load_tokenizer(converted),
        compute_loss_func=model.expected_loss,
        peft_config=lora,
    )
    before = copy_of(trainer.model)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert all(loss == loss for loss in losses)
    moved = changed(before, trainer.model)
    assert moved
    assert with_lora == all("lora_" in name for name in moved)
