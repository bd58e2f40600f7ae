"""Tiny float64 models with a gate and head, in which every parameter is random, and batches for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.model.looped import LoopedOutput

VOCAB_SIZE = 13


@pytest.fixture
def make_model() -> Callable[..., LoopLMForCausalLM]:
    """A model of three loops; keywords override config fields."""

    def make(**overrides: Any) -> LoopLMForCausalLM:
        tiny: dict[str, Any] = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 8,
            "intermediate_size": 12,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 4,
            "num_loops": 3,
        }
        model = LoopLMForCausalLM(LoopLMConfig(**(tiny | overrides))).double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(std=0.5)
        return model

    return make


@pytest.fixture
def make_batch() -> Callable[..., tuple[Tensor, Tensor]]:
    """input_ids and labels (B, S), some of which are to be ignored: a different number in every row."""

    def make(num_rows: int = 2, seq_len: int = 7) -> tuple[Tensor, Tensor]:
        ids = torch.randint(VOCAB_SIZE, (num_rows, seq_len))
        labels = ids.clone()
        for row in range(num_rows):
            labels[row, torch.randperm(seq_len)[: row % seq_len]] = -100
        return ids, labels

    return make


@pytest.fixture
def make_output() -> Callable[..., LoopedOutput]:
    """What a forward could have returned: random states (R, B, S, D) as leaves, and given or random gate logits."""

    def make(gate_logits: Tensor | None = None, num_loops: int = 3, shape: tuple[int, int] = (2, 7)) -> LoopedOutput:
        if gate_logits is None:
            gate_logits = torch.randn(num_loops, *shape, dtype=torch.float64)
        states = torch.randn(num_loops, *shape, 8, dtype=torch.float64)
        return LoopedOutput(
            tuple(state.requires_grad_() for state in states.unbind()),
            gate_logits.detach().requires_grad_(),
        )

    return make
