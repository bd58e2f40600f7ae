"""What a config refuses, and the depths it derives."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import pytest

from looplm.errors import UserError
from looplm.model.config import LoopedConfig

MakeConfig = Callable[..., LoopedConfig]


@pytest.fixture
def annotations_unchecked() -> Iterator[None]:
    """As for a user: under pytest a wrong literal would not get as far as the config's own message."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0; it must be positive"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; it must be positive"),
        ({"num_loops": 0}, "num_loops is 0; it must be positive"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0; it must be positive"),
        ({"rope_theta": float("nan")}, "rope_theta is nan; it must be positive"),
        ({"lora_alpha": 0.0}, "lora_alpha is 0.0; it must be positive"),
        ({"lora_rank": -1}, "lora_rank is -1; it must not be negative"),
        ({"num_prelude_layers": -1}, "num_prelude_layers is -1; it must not be negative"),
        ({"num_coda_layers": -2}, "num_coda_layers is -2; it must not be negative"),
        ({"initializer_range": -0.1}, "initializer_range is -0.1; it must not be negative"),
        ({"initializer_range": float("nan")}, "initializer_range is nan; it must not be negative"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be finite"),
        ({"rope_theta": float("inf")}, "rope_theta must be finite"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be finite"),
        ({"initializer_range": float("inf")}, "initializer_range must be finite"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers is 10001; looplm builds models with up to 10,000"),
        ({"num_prelude_layers": 10_001}, "num_prelude_layers is 10001"),
        ({"num_coda_layers": 10**9}, "num_coda_layers is 1000000000"),
        ({"num_loops": 10_001}, "num_loops is 10001; looplm builds models with up to 10,000"),
        ({"num_loops": 1000, "num_hidden_layers": 101}, "makes a depth of 101,000 layers; .* of up to 100,000"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 5}, "head_dim is 5; rotary embeddings need an even one"),
        ({"norm_placement": "peri"}, "norm_placement is 'peri'; choose one of ouro, pre, post, sandwich, magic"),
        ({"final_norm": "layer"}, "final_norm is 'layer'; choose one of rms, frms, none"),
        ({"loop_state": "cooked"}, "loop_state is 'cooked'; choose one of normed, raw"),
        ({"injection": "scaler"}, "injection is 'scaler'; choose one of none, scalar, add, concat"),
    ],
)
def test_refusals_name_the_field_and_what_is_allowed(make_config: MakeConfig, options: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        make_config(**options)


def test_defaults_are_the_released_architecture(make_config: MakeConfig):
    config = make_config()
    assert (config.norm_placement, config.final_norm, config.loop_state) == ("ouro", "rms", "normed")
    assert (config.injection, config.lora_rank, config.num_prelude_layers, config.num_coda_layers) == ("none", 0, 0, 0)
    assert not (config.attention_bias or config.attention_output_bias or config.mlp_bias or config.qk_norm)


def test_is_frozen(make_config: MakeConfig):
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_config().num_loops = 7  # pyright: ignore[reportAttributeAccessIssue]


def test_effective_depth(make_config: MakeConfig):
    config = make_config(num_prelude_layers=1, num_hidden_layers=4, num_coda_layers=2, num_loops=3)
    assert config.num_layers == 7
    assert config.effective_depth() == 1 + 3 * 4 + 2
    assert config.effective_depth(1) == 7
    assert config.effective_depth(8) == 1 + 8 * 4 + 2
