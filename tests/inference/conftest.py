"""Tiny float64 language models whose every part matters and whose gates let tokens leave at mixed depths."""

from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import pytest
import torch
from torch import nn

from looplm.model.config import LoopedConfig
from looplm.model.looped import LoopedTransformer

SHAPES: dict[str, dict[str, Any]] = {
    "ouro": {},
    "gqa": {"num_attention_heads": 4, "num_key_value_heads": 2, "qk_norm": True, "attention_bias": True},
    "scalar_lora": {"injection": "scalar", "lora_rank": 2},
    "prelude_coda": {"num_prelude_layers": 1, "num_coda_layers": 1, "injection": "add", "norm_placement": "pre"},
    "raw_state": {"loop_state": "raw", "norm_placement": "sandwich", "injection": "concat", "lora_rank": 2},
    "prelude_raw": {"num_prelude_layers": 2, "loop_state": "raw", "num_coda_layers": 2, "num_loops": 3},
}


class TinyLM(nn.Module):
    """A transformer and a head: all that the engine asks for."""

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.model = LoopedTransformer(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


@pytest.fixture
def make_lm() -> Callable[..., TinyLM]:
    """Builds a model by the name of its shape; keywords override config fields."""

    def make(shape: str = "ouro", seed: int = 1, **overrides: Any) -> TinyLM:
        tiny: dict[str, Any] = {
            "vocab_size": 29,
            "hidden_size": 12,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "num_loops": 4,
            "max_position_embeddings": 64,
        }
        lm = TinyLM(LoopedConfig(**(tiny | SHAPES[shape] | overrides))).double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in lm.named_parameters():
                if name.endswith("norm.weight") or "layernorm" in name:
                    parameter.uniform_(0.5, 1.5, generator=generator)
                elif parameter.ndim < 2 or "embed_tokens" in name:
                    parameter.normal_(generator=generator)
                else:
                    parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5, generator=generator)
            lm.model.early_exit_gate.bias.fill_(-0.5)
        return lm

    return make


@pytest.fixture
def agreeing(make_lm: Callable[..., TinyLM]) -> TinyLM:
    """A model whose core adds nothing, so that all loops agree on every token."""
    lm = make_lm()
    with torch.no_grad():
        for layer in lm.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        lm.model.norm.weight.fill_(1.0)
    return lm


@pytest.fixture
def make_prompts() -> Callable[..., list[list[int]]]:
    """Random prompts of mixed length, 1 token among them."""

    def make(count: int, seed: int = 2, vocab_size: int = 29) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        lengths = [1 + (5 * i) % 12 for i in range(count)]
        return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]

    return make


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """Shape checks off for one test: over thousands of passes they would take nine tenths of its time."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
