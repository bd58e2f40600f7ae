"""The shell under TRL's supervised fine-tuning: packed rows, and the expected loss in place of TRL's own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from looplm.data.tokenizer import train_tokenizer
from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM

pytest.importorskip("trl", reason="needs trl")
pytestmark = pytest.mark.filterwarnings("default")  # TRL warns of what it is about to change

TEXTS = ["loops within loops", "a model that thinks", "loops"]


def fine_tune(directory: Path, expected: bool, **arguments: Any) -> tuple[LoopLMForCausalLM, LoopLMForCausalLM, float]:
    """One step on all three texts. Returns the model before and after it, and the loss that was logged."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer = train_tokenizer(TEXTS * 8, vocab_size=280)
    config = LoopLMConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.3,
    )
    before, model = LoopLMForCausalLM(config), LoopLMForCausalLM(config)
    model.load_state_dict(before.state_dict())
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(directory),
            max_steps=1,
            per_device_train_batch_size=3,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **arguments,
        ),
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer,
        compute_loss_func=model.expected_loss if expected else None,
    )
    trainer.train()
    return before, model, trainer.state.log_history[0]["loss"]


@pytest.mark.parametrize("arguments", [{}, {"padding_free": True, "max_length": None}, {"packing": True}], ids=str)
@pytest.mark.parametrize("expected", [True, False])
def test_one_step(tmp_path, expected, arguments, capsys):
    """Rows packed into one give the loss of the rows apart: documents do not see each other."""
    before, after, loss = fine_tune(tmp_path, expected, **arguments)
    tokenizer = train_tokenizer(TEXTS * 8, vocab_size=280)
    total, count = 0.0, 0
    for text in TEXTS:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        out = before(ids, labels=ids, num_items_in_batch=1)
        last = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:], reduction="sum")
        total, count = total + (out.loss if expected else last).item(), count + ids.shape[1] - 1
    assert loss == pytest.approx(total / count, rel=1e-4)
    gate = "model.early_exit_gate.weight"
    assert torch.equal(before.get_parameter(gate), after.get_parameter(gate)) != expected
