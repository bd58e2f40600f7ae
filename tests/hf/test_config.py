"""Both configs: what they read, what they write, what they refuse."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from looplm.errors import UserError
from looplm.hf.config import LoopLMConfig, OuroConfig
from looplm.model.config import LoopedConfig, RopeScaling

RELEASED = {
    "architectures": ["OuroForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_ouro.OuroConfig"},
    "bos_token_id": 0,
    "eos_token_id": 0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "layer_types": ["full_attention"] * 24,
    "max_position_embeddings": 65536,
    "max_window_layers": 24,
    "model_type": "ouro",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "total_ut_steps": 4,
    "early_exit_threshold": 1.0,
    "transformers_version": "4.55.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 49152,
}
"""config.json of Ouro-1.4B, its auto_map cut short."""


def ouro(**changes: Any) -> OuroConfig:
    """The released config with some keys changed; a value of ... removes the key."""
    fields = {**RELEASED, **changes}
    return OuroConfig(**{name: value for name, value in fields.items() if value is not ...})


def written(config: LoopLMConfig | OuroConfig, directory: Path) -> dict[str, Any]:
    config.save_pretrained(directory)
    return json.loads((directory / "config.json").read_text())


def test_released_config_becomes_the_model_it_describes():
    assert ouro().to_model_config() == LoopedConfig(
        vocab_size=49152,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
        num_loops=4,
        rope_theta=1e6,
        max_position_embeddings=65536,
    )


def test_released_config_is_written_as_it_was_read(tmp_path):
    """Old spellings included (torch_dtype, rope_theta, rope_scaling), which others' Ouro code reads."""
    fields = written(ouro(), tmp_path)
    del fields["transformers_version"]
    assert fields == {name: value for name, value in RELEASED.items() if name != "transformers_version"}


def test_every_released_config_is_written_as_it_was_read(shared_dir, tmp_path):
    paths = sorted((shared_dir / "ouro" / "released_configs").glob("*.json"))
    assert len(paths) == 3
    for path in paths:
        read = json.loads(path.read_text())
        fields = written(OuroConfig(**read), tmp_path)
        assert {**fields, "transformers_version": read["transformers_version"]} == read
        assert OuroConfig(**read).eos_token_id == (2 if "Thinking" in path.name else 0)


def test_missing_keys_have_the_defaults_of_the_released_class():
    config = OuroConfig()
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (151936, 4096, 32)
    assert (config.head_dim, config.rope_theta, config.max_position_embeddings) == (128, 10_000.0, 32768)
    assert (config.sliding_window, config.total_ut_steps, config.early_exit_threshold) == (None, 4, 1.0)
    assert config.layer_types == ["full_attention"] * 32
    assert OuroConfig(num_key_value_heads=None, num_attention_heads=8).num_key_value_heads == 8


def test_a_missing_threshold_is_not_a_null_one(tmp_path):
    assert ouro(early_exit_threshold=...).early_exit_threshold == 1.0
    assert ouro(early_exit_threshold=None).early_exit_threshold is None
    assert written(ouro(early_exit_threshold=None), tmp_path)["early_exit_threshold"] is None


def test_ouro_fields_answer_to_our_names():
    config = ouro(total_ut_steps=6, early_exit_threshold=0.6)
    assert (config.num_loops, config.exit_threshold) == (6, 0.6)
    config.num_loops = 2
    assert config.total_ut_steps == 2
    assert OuroConfig(num_loops=3).total_ut_steps == 3


def test_rotary_settings_in_the_spelling_of_transformers_5(tmp_path):
    config = ouro(rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    assert config.to_model_config().rope_theta == 5e4
    fields = written(config, tmp_path)
    assert fields["rope_theta"] == 5e4
    assert "rope_parameters" not in fields


def test_our_config_round_trip(make_config, tmp_path):
    config = make_config(injection="scalar", lora_rank=2, exit_threshold=0.7, beta=0.1, eos_token_id=[0, 2])
    fields = written(config, tmp_path)
    again = LoopLMConfig(**fields)
    assert again.to_model_config() == config.to_model_config()
    assert (again.exit_threshold, again.beta, again.eos_token_id) == (0.7, 0.1, [0, 2])
    assert {field.name for field in dataclasses.fields(LoopedConfig)} < fields.keys()
    assert written(again, tmp_path) == fields
    assert LoopLMConfig.from_model_config(config.to_model_config(), beta=0.2).beta == 0.2


def test_missing_fields_are_all_named():
    with pytest.raises(UserError, match="lacks hidden_size, intermediate_size, .*head_dim"):
        LoopLMConfig(vocab_size=10)


@pytest.mark.parametrize(("name", "meant"), [("num_loop", "num_loops"), ("exit_treshold", "exit_threshold")])
def test_misspelt_fields_are_refused(make_config, name, meant):
    with pytest.raises(UserError, match=f"no field {name}; did you mean {meant}"):
        make_config(**{name: 1})
    assert make_config(sep_token_id=3, num_labels=3, chunk_size=1).sep_token_id == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"layer_types": ["sliding_attention"] * 24}, "layer_types"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "rope_parameters"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"early_exit_step": 1}, "early_exit_step = 1"),
        ({"layer_types": ["full_attention"] * 3}, "3 layer_types for 24 layers"),
        ({"early_exit_threshold": -1}, "threshold in the config is -1"),
        ({"early_exit_threshold": float("nan")}, "threshold in the config is nan"),
        ({"early_exit_threshold": "abc"}, "threshold in the config is 'abc'"),
        ({"hidden_size": "2048"}, "hidden_size is '2048' in the config; it must be of type int"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"total_ut_steps": 0}, "num_loops is 0; it must be positive"),
        ({"num_key_value_heads": 5}, "not a multiple of"),
        ({"head_dim": 63}, "head_dim is 63"),
        ({"head_dim": ..., "hidden_size": 0}, "hidden_size is 0; it must be positive"),
        ({"head_dim": ..., "num_attention_heads": 0}, "num_attention_heads is 0; it must be positive"),
        ({"head_dim": ..., "num_attention_heads": None}, "num_attention_heads is None in the config"),
        ({"head_dim": ..., "hidden_size": "2048"}, "hidden_size is '2048' in the config"),
        ({"head_dim": ..., "hidden_size": None}, "hidden_size is None in the config"),
        ({"layer_types": ..., "num_hidden_layers": "24"}, "num_hidden_layers is '24' in the config"),
        ({"layer_types": ..., "num_hidden_layers": None}, "num_hidden_layers is None in the config"),
        ({"layer_types": ..., "num_hidden_layers": 1e9}, "num_hidden_layers is 1000000000.0 in the config"),
        ({"layer_types": ..., "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; .*up to 10,000"),
        ({"total_ut_steps": 10**9}, "num_loops is 1000000000; .*up to 10,000"),
        ({"rope_theta": float("inf")}, "rope_theta must be finite"),
    ],
)
def test_what_cannot_take_effect_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        ouro(**changes)


@pytest.mark.parametrize(
    "harmless",
    [
        {"use_sliding_window": False, "sliding_window": 4096},
        {"rope_scaling": {"rope_type": "default"}},
        {"attention_dropout": 0},
        {"early_exit_step": None, "chunk_size": 2},
    ],
)
def test_what_changes_nothing_passes(harmless):
    assert ouro(**harmless).to_model_config() == ouro().to_model_config()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": 5}, "layer_types is 5 in the config; it must be a list"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention' in the config"),
        ({"dtype": "nonsense"}, "^dtype is 'nonsense' in the config; it must be the name of a torch dtype"),
        ({"torch_dtype": "nonsense"}, "torch_dtype is 'nonsense' in the config"),
        ({"torch_dtype": "Tensor"}, "torch_dtype is 'Tensor'"),
        ({"torch_dtype": 16}, "torch_dtype is 16"),
        ({"eos_token_id": 1.5}, "eos_token_id is 1.5 in the config; it must be an integer, a list of them or null"),
        ({"eos_token_id": [0, "x"]}, r"eos_token_id is \[0, 'x'\]"),
        ({"pad_token_id": "x"}, "pad_token_id is 'x' in the config; it must be an integer or null"),
        ({"pad_token_id": [0]}, r"pad_token_id is \[0\]"),
        ({"bos_token_id": True}, "bos_token_id is True"),
        ({"beta": "abc"}, "beta is 'abc' in the config; the entropy weight must be a number from 0 up"),
        ({"beta": float("nan")}, "beta is nan"),
        ({"beta": -1}, "beta is -1"),
        ({"beta": None}, "beta is None"),
    ],
)
def test_both_configs_refuse_values_of_another_kind(make_config, changes, message):
    for make in (ouro, make_config):
        with pytest.raises(UserError, match=message):
            make(**changes)


def test_our_config_refuses_them_too(make_config):
    with pytest.raises(UserError, match="attention_dropout = 0.1"):
        make_config(attention_dropout=0.1)
    with pytest.raises(UserError, match="choose one of ouro, pre"):
        make_config(norm_placement="peri")


def test_position_scaling_round_trip(make_config, tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}
    config = make_config(position_scaling=scaling)
    assert config.to_model_config().position_scaling == RopeScaling(**scaling)
    again = LoopLMConfig(**written(config, tmp_path))
    assert again.to_model_config() == config.to_model_config()
    assert LoopLMConfig.from_model_config(config.to_model_config()).to_model_config() == config.to_model_config()


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ("yarn", "must be null or an object with rope_type, factor"),
        ({"factor": 2.0}, "must be null or an object with rope_type, factor"),
        (
            {"rope_type": "linear", "factor": 2.0, "fctor": 1},
            "where they are needed, original_max_position_embeddings",
        ),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type is 'dynamic' in the config; choose one of linear"),
        ({"rope_type": "linear", "factor": "2"}, "factor is '2' in the config; it must be of type float"),
        ({"rope_type": "linear", "factor": -2.0}, "factor of position_scaling is -2.0"),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "x"},
            "it must be of type int . None",
        ),
    ],
    ids=str,
)
def test_position_scaling_that_means_nothing(make_config, scaling, message):
    with pytest.raises(UserError, match=message):
        make_config(position_scaling=scaling)
