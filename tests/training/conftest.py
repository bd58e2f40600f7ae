"""Tiny models, stages and batches: small enough that a test can train for a few steps in well under a second."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from looplm.data.packing import PackedDataset, TokenStream
from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.training.recipe import StageRecipe

VOCAB_SIZE = 17


@pytest.fixture
def make_model() -> Callable[..., LoopLMForCausalLM]:
    """A model of three loops, always with the same starting weights; keywords override config fields."""

    def make(**overrides: Any) -> LoopLMForCausalLM:
        tiny: dict[str, Any] = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_loops": 3,
            "tie_word_embeddings": True,
            "initializer_range": 0.2,
        }
        torch.manual_seed(1)
        return LoopLMForCausalLM(LoopLMConfig(**(tiny | overrides)))

    return make


@pytest.fixture
def make_stage() -> Callable[..., StageRecipe]:
    """Six steps of Stage I, each of them told; keywords override."""

    def make(**overrides: Any) -> StageRecipe:
        small: dict[str, Any] = {
            "name": "first",
            "num_steps": 6,
            "objective": {"kind": "expected_loss", "beta": 0.05},
            "optimizer": {"lr": 1e-2},
            "num_loops": 3,
            "log_every": 1,
        }
        return StageRecipe(**(small | overrides))

    return make


@pytest.fixture
def make_batches() -> Callable[..., PackedDataset]:
    """Windows of 12 tokens over nine documents of uneven length: every batch predicts another number of tokens."""

    def make(batch_size: int = 2) -> PackedDataset:
        lengths = [3, 20, 5, 5, 31, 2, 9, 14, 11]
        ids = np.random.default_rng(0).integers(1, VOCAB_SIZE, sum(lengths)).astype(np.uint16)
        starts = np.cumsum([0, *lengths[:-1]])
        ids[starts] = 0
        return PackedDataset(TokenStream(ids, starts, num_text_bytes=1), seq_len=12, batch_size=batch_size, seed=3)

    return make
