"""Golden checkpoints of the released format, and tiny models of our own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import logging

from looplm.hf.config import LoopLMConfig
from looplm.hf.load import load
from looplm.hf.modeling import LoopLMForCausalLM

KEPT = Path(__file__).resolve().parents[1] / "golden"


@dataclass(frozen=True)
class Golden:
    """A released-format checkpoint, and what the released code makes of it."""

    path: Path
    model: LoopLMForCausalLM
    expected: dict[str, Tensor]


@cache
def read(path: Path) -> Golden:
    return Golden(path, load(path), load_file(path / "expected.safetensors"))


@pytest.fixture(params=["base", "gqa", "one_step", "deep", "tied_mqa"])
def golden(request: pytest.FixtureRequest) -> Golden:
    """Each golden checkpoint in turn; the two kept in the repository everywhere, the others where `shared` is."""
    if (KEPT / request.param).is_dir():
        return read(KEPT / request.param)
    return read(request.getfixturevalue("shared_dir") / "ouro" / "golden" / request.param)


@pytest.fixture
def tied_ouro() -> Path:
    """The directory of a small tied Ouro checkpoint."""
    return KEPT / "tied_mqa"


@pytest.fixture
def make_config() -> Callable[..., LoopLMConfig]:
    """Config of a tiny model; keywords override."""

    def make(**overrides: Any) -> LoopLMConfig:
        tiny: dict[str, Any] = {
            "vocab_size": 37,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "num_loops": 3,
            "max_position_embeddings": 64,
            "initializer_range": 0.3,
        }
        return LoopLMConfig(**(tiny | overrides))

    return make


@pytest.fixture
def make_model(make_config: Callable[..., LoopLMConfig]) -> Callable[..., LoopLMForCausalLM]:
    """A float64 model in evaluation mode, every parameter random; keywords are config fields."""

    def make(**overrides: Any) -> LoopLMForCausalLM:
        model = LoopLMForCausalLM(make_config(**overrides)).double().eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(0.1 * noise)
        return model

    return make


@pytest.fixture(autouse=True)
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers' remarks (a pad token that is set to the end token) out of the test output."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(verbosity)
