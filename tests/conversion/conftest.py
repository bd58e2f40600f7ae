"""Tiny looped models in float64, and tiny dense checkpoints of each family that converts."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM


@pytest.fixture
def make_looped() -> Callable[..., LoopLMForCausalLM]:
    """A float64 model in evaluation mode, every parameter random; keywords are config fields."""

    def make(**overrides: Any) -> LoopLMForCausalLM:
        tiny: dict[str, Any] = {
            "vocab_size": 37,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "num_loops": 4,
            "max_position_embeddings": 64,
            "initializer_range": 0.3,
        }
        model = LoopLMForCausalLM(LoopLMConfig(**(tiny | overrides))).double().eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
        return model

    return make


@pytest.fixture(autouse=True)
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers' remarks out of the test output."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(verbosity)


ROPE = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
}

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True, "head_dim": 8}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear_rope": ("llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.0}}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3_yarn": ("qwen3", {"head_dim": 8, "attention_bias": True, "rope_parameters": YARN | {"truncate": False}}),
    "qwen3_mscale": ("qwen3", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}, "head_dim": 8}),
}
"""Name -> family and the settings that set it apart."""


def float64_norm(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """RMSNorm in the dtype of its input."""
    weight, eps = module.weight, module.variance_epsilon
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


@pytest.fixture
def make_dense() -> Callable[..., PreTrainedModel]:
    """transformers' own dense model of a name in DENSE, tiny, float64, every parameter random."""

    def make(name: str = "llama", **overrides: Any) -> PreTrainedModel:
        family, fields = DENSE[name]
        tiny: dict[str, Any] = {
            "vocab_size": 37,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "rope_parameters": ROPE,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**(tiny | fields | overrides))).double().eval()
        generator = torch.Generator().manual_seed(2)
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                # transformers' norms compute in float32 whatever they are given.
                module.forward = partial(float64_norm, module)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.copy_(0.3 * noise if parameter.ndim > 1 else 1 + 0.2 * noise)
        return model

    return make


@pytest.fixture
def save_dense(make_dense: Callable[..., PreTrainedModel], tmp_path: Path) -> Callable[..., Path]:
    """Writes such a model to a directory, in float32 or as asked, and returns it."""

    def save(name: str = "llama", dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
        directory = tmp_path / f"dense_{name}"
        make_dense(name, **overrides).to(dtype).save_pretrained(directory)
        return directory

    return save
