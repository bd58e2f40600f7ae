"""Tiny models for the tests of looplm.model, with weights drawn so that no part of them is without effect."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from looplm.model.config import LoopedConfig
from looplm.model.looped import LoopedTransformer


@pytest.fixture
def make_config() -> Callable[..., LoopedConfig]:
    """Config of a tiny model with grouped queries and a head size that is not D / H; keywords override."""

    def make(**overrides: Any) -> LoopedConfig:
        tiny: dict[str, Any] = {
            "vocab_size": 31,
            "hidden_size": 12,
            "intermediate_size": 20,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "num_loops": 3,
            "lora_alpha": 2.0,
        }
        return LoopedConfig(**(tiny | overrides))

    return make


@pytest.fixture
def make_model(make_config: Callable[..., LoopedConfig]) -> Callable[..., LoopedTransformer]:
    """A float64 model whose every parameter is random: at the starting values norms, biases, LoRA do nothing."""

    def make(**overrides: Any) -> LoopedTransformer:
        model = LoopedTransformer(make_config(**overrides)).double()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight") or "layernorm" in name:
                    parameter.uniform_(0.5, 1.5, generator=generator)
                elif parameter.ndim < 2 or name == "embed_tokens.weight":
                    parameter.normal_(generator=generator)
                else:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
        return model

    return make
