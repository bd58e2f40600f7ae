"""Scaled rotary frequencies: their limits, and what is refused. Against transformers: tests/conversion."""

import math
from typing import Any

import pytest
import torch

from looplm.errors import UserError
from looplm.model.config import RopeScaling
from looplm.model.rope import rope_cos_sin, rope_frequencies

CPU = torch.device("cpu")


def frequencies(**scaling: Any) -> torch.Tensor:
    return rope_frequencies(16, 1e4, RopeScaling(**scaling) if scaling else None, CPU)


def test_linear_scaling_divides_positions():
    positions = torch.arange(12)[None]
    scaled = rope_cos_sin(4 * positions, 16, 1e4, torch.float32, RopeScaling(rope_type="linear", factor=4.0))
    plain = rope_cos_sin(positions, 16, 1e4, torch.float32)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(scaled, plain, strict=True))


def test_llama3_keeps_high_and_divides_low_frequencies():
    plain, context = frequencies(), 64
    scaled = frequencies(rope_type="llama3", factor=8.0, original_max_position_embeddings=context)
    wavelengths = 2 * math.pi / plain
    assert torch.equal(scaled[wavelengths < context / 4], plain[wavelengths < context / 4])
    assert torch.allclose(scaled[wavelengths > context], plain[wavelengths > context] / 8)
    between = (wavelengths > context / 4) & (wavelengths < context)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_leaves_what_turns_often_and_divides_what_turns_seldom(truncate):
    plain = frequencies()
    fast, slow, context = 4.0, 1.0, 64
    options = {"beta_fast": fast, "beta_slow": slow, "truncate": truncate}
    scaled = frequencies(rope_type="yarn", factor=4.0, original_max_position_embeddings=context, **options)
    turns = context * plain / (2 * math.pi)
    ratio = scaled / plain
    assert torch.allclose(ratio[turns > fast * 4], torch.tensor(1.0))
    assert torch.allclose(ratio[turns < slow / 4], torch.tensor(0.25))
    assert (ratio.diff() <= 1e-6).all()


def test_yarn_scales_cosine_and_sine():
    scaling = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.5)
    cos, sin = rope_cos_sin(torch.arange(5)[None], 16, 1e4, torch.float32, scaling)
    assert torch.allclose(cos**2 + sin**2, torch.tensor(1.5**2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_type": "linear", "factor": 0.0}, "factor of position_scaling is 0.0"),
        ({"rope_type": "linear", "factor": math.inf}, "factor of position_scaling is inf"),
        ({"rope_type": "yarn", "factor": 2.0}, "yarn position_scaling needs original_max_position_embeddings"),
        (
            {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 0},
            "llama3 position_scaling needs",
        ),
        ({"rope_type": "linear", "factor": 2.0, "low_freq_factor": 4.0}, "low_freq_factor .* below"),
    ],
    ids=str,
)
def test_refusals(fields, message):
    with pytest.raises(UserError, match=message):
        RopeScaling(**fields)
