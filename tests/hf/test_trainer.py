"""The shell under transformers' own Trainer: two steps of the expected loss, and an evaluation."""

import copy
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from looplm.hf.modeling import LoopLMForCausalLM
from looplm.objectives import expected_loss

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

ROWS = [torch.randint(1, 37, (length,), generator=torch.Generator().manual_seed(length)) for length in (5, 9, 3, 12)]

CHECKPOINTING = "activation_checkpointing"
if CHECKPOINTING not in {field.name for field in fields(TrainingArguments)}:
    CHECKPOINTING = "gradient_checkpointing"  # its name in transformers 5.0


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Right-pads. Labels of padding are -100, and so is the first of each row: no position predicts it, but old
    releases of the Trainer count it among the tokens of the batch."""
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row["input_ids"]) for row in rows], batch_first=True)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def make_trainer(model: LoopLMForCausalLM, output_dir: Path, **arguments: Any) -> Trainer:
    settings: dict[str, Any] = {
        "max_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(output_dir), **(settings | arguments)),
        train_dataset=[{"input_ids": row} for row in ROWS],  # pyright: ignore
        eval_dataset=[{"input_ids": row} for row in ROWS],  # pyright: ignore
        data_collator=collate,
    )


def two_plain_steps(model: LoopLMForCausalLM) -> list[float]:
    """The same two steps by hand, on the whole data at once."""
    batch = collate([{"input_ids": row} for row in ROWS])
    losses = []
    for _ in range(2):
        model.zero_grad()
        out = model(batch["input_ids"], attention_mask=batch["attention_mask"])
        loss, _ = expected_loss(model, out, batch["labels"], beta=model.config.beta)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-2 * parameter.grad
    return losses


@pytest.mark.parametrize(
    "arguments",
    [
        {"per_device_train_batch_size": 4},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 4, CHECKPOINTING: True},
    ],
    ids=["one batch", "accumulated", "checkpointed"],
)
def test_two_steps(make_model, tmp_path, arguments, capsys):
    """However the batch is cut up, rows of unequal length included, the steps are those of the whole."""
    model = make_model(tie_word_embeddings=True)
    plain = copy.deepcopy(model)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    trainer = make_trainer(model, tmp_path, **arguments)
    trainer.train()
    losses = two_plain_steps(plain.train())
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, abs=1e-4)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-9, atol=1e-11)
        assert not torch.equal(parameter, before[name]), name


def test_evaluation_gathers_the_last_logits_only(make_model, tmp_path, capsys):
    shapes: list[tuple[int, ...]] = []

    def measure(prediction: Any) -> dict[str, float]:
        shapes.append(prediction.predictions.shape)
        return {"rows": float(len(prediction.predictions))}

    trainer = make_trainer(make_model(), tmp_path, per_device_eval_batch_size=4)
    trainer.compute_metrics = measure
    metrics = trainer.evaluate()
    assert shapes == [(4, 12, 37)]
    assert metrics["eval_rows"] == 4
    assert math.isfinite(metrics["eval_loss"])


def test_a_saved_trainer_checkpoint_loads(make_model, tmp_path, capsys):
    import looplm

    trainer = make_trainer(make_model(), tmp_path, per_device_train_batch_size=4, save_strategy="steps", save_steps=2)
    trainer.train()
    again = looplm.load(tmp_path / "checkpoint-2")
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
