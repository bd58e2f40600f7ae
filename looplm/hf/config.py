"""The two configs a looped checkpoint may carry: our own, and that of the released Ouro models.

Both are read from and written to `config.json` by transformers, and both map to the one
:class:`~looplm.model.config.LoopedConfig` that builds the model. A setting that cannot take effect
(a sliding window, scaled rotary positions, dropout) is refused instead of ignored.
"""

import dataclasses
import difflib
import math
from typing import Any, ClassVar, Literal, get_args, get_origin

import torch
from transformers import PretrainedConfig

from looplm.errors import UserError
from looplm.model.config import CodaInput, FinalNorm, Injection, LoopedConfig, LoopState, NormPlacement, RopeScaling

DEFAULT_BETA = 0.05
"""Entropy weight of Stage I (Ouro, section 4)."""

NOT_FOR_EVALUATION = ["past_key_values", "cache", "loop_hidden_states", "gate_logits"]
"""Outputs that a Trainer need not gather over the evaluation set."""

_FIELDS = {field.name: field for field in dataclasses.fields(LoopedConfig)}


class LoopLMConfig(PretrainedConfig):
    """Config of a LoopLM checkpoint: every field of `LoopedConfig` under its name, and what the shell adds.

    Fields without a default in `LoopedConfig` are required. Raises UserError for missing, impossible or
    unsupported values.
    """

    model_type = "looplm"
    keys_to_ignore_at_inference = NOT_FOR_EVALUATION
    has_no_defaults_at_init = True

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_loops: int
    num_prelude_layers: int
    num_coda_layers: int
    norm_placement: NormPlacement
    final_norm: FinalNorm
    loop_state: LoopState
    coda_input: CodaInput
    injection: Injection
    lora_rank: int
    lora_alpha: float
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    rms_norm_eps: float
    rope_theta: float
    position_scaling: dict[str, Any] | None
    """The fields of :class:`~looplm.model.config.RopeScaling`, or null."""
    max_position_embeddings: int
    initializer_range: float
    exit_threshold: float | None
    """CDF at which generation leaves by default; 1 or null: all loops. A saved choice, read by the engine."""
    exit_epsilon: float | None
    """Instead: change of the hidden state at or below which it leaves (`HiddenDiffExit`). Written when it is set."""
    beta: float
    """Entropy weight of the loss that `forward` returns when labels are given."""
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None

    def __init__(self, **fields: Any) -> None:
        refuse_unsupported(fields)
        _unify_rope(fields)
        missing = [
            name for name, field in _FIELDS.items() if field.default is dataclasses.MISSING and name not in fields
        ]
        if missing:
            raise UserError(f"The config lacks {', '.join(missing)}; a LoopLM config must give them.")
        for name, field in _FIELDS.items():
            setattr(self, name, fields.pop(name, field.default))
        self.exit_threshold = check_exit_threshold(fields.pop("exit_threshold", 1.0))
        self.exit_epsilon = check_exit_epsilon(fields.pop("exit_epsilon", None), self.exit_threshold)
        self.beta = check_beta(fields.pop("beta", DEFAULT_BETA))
        self.bos_token_id = check_token_id("bos_token_id", fields.pop("bos_token_id", None))
        self.eos_token_id = check_token_id("eos_token_id", fields.pop("eos_token_id", None))
        self.pad_token_id = check_token_id("pad_token_id", fields.pop("pad_token_id", None))
        self.to_model_config()
        shell = ["exit_threshold", "exit_epsilon", "beta", "bos_token_id", "eos_token_id", "pad_token_id"]
        _refuse_misspelt(fields, [*_FIELDS, *shell])
        super().__init__(**fields)

    def to_diff_dict(self) -> dict[str, Any]:
        """What config.json holds."""
        return without_unset_epsilon(super().to_diff_dict())

    @classmethod
    def from_model_config(cls, config: LoopedConfig, **shell_fields: Any) -> "LoopLMConfig":
        """The config of a model just designed; `shell_fields` are the fields that `LoopedConfig` has not."""
        return cls(**dataclasses.asdict(config), **shell_fields)

    def to_model_config(self) -> LoopedConfig:
        """The architecture alone. Raises UserError when a value is impossible or of the wrong type."""
        return build_model_config({name: getattr(self, name) for name in _FIELDS})


class OuroConfig(PretrainedConfig):
    """Config of the released Ouro checkpoints (`model_type` "ouro"), under the names and defaults of their own code.

    `num_loops` and `exit_threshold` are other names of `total_ut_steps` and `early_exit_threshold`. A missing
    `early_exit_threshold` is 1.0, an explicit null stays None; both mean all loops (the released code lets 1.0
    leave early in bfloat16, where the CDF rounds up). Writing keeps every field, also those that only others'
    code reads. Raises UserError for impossible or unsupported values.
    """

    model_type = "ouro"
    attribute_map = {"num_loops": "total_ut_steps", "exit_threshold": "early_exit_threshold"}
    keys_to_ignore_at_inference = NOT_FOR_EVALUATION
    has_no_defaults_at_init = True

    CLASS_DEFAULTS: ClassVar[dict[str, Any]] = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        "tie_word_embeddings": False,
        "rope_theta": 10_000.0,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
        "attention_dropout": 0.0,
        "total_ut_steps": 4,
        "early_exit_threshold": 1.0,
    }
    """What the released configuration class assumes for a key that config.json does not have."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    max_position_embeddings: int
    initializer_range: float
    rms_norm_eps: float
    use_cache: bool
    tie_word_embeddings: bool
    rope_theta: float
    use_sliding_window: bool
    sliding_window: int | None
    max_window_layers: int
    layer_types: list[str]
    attention_dropout: float
    total_ut_steps: int
    early_exit_threshold: float | None
    exit_epsilon: float | None
    beta: float
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None

    def __init__(self, **fields: Any) -> None:
        for name, ouro_name in self.attribute_map.items():
            if name in fields:
                fields[ouro_name] = fields.pop(name)
        refuse_unsupported(fields)
        _unify_rope(fields)
        for name, default in self.CLASS_DEFAULTS.items():
            setattr(self, name, fields.pop(name, default))
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            check_types(_FIELDS, {name: getattr(self, name) for name in ("hidden_size", "num_attention_heads")})
            # Sizes of 0 are refused below, under their own names.
            self.head_dim = self.hidden_size // (self.num_attention_heads or 1)
        self.to_model_config()
        # A window stands in every config by default and counts only when it is switched on, which is refused.
        self.sliding_window = None
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if len(self.layer_types) != self.num_hidden_layers:
            raise UserError(
                f"The config gives {len(self.layer_types)} layer_types for {self.num_hidden_layers} layers; "
                "it must have one for each, or leave them out."
            )
        self.early_exit_threshold = check_exit_threshold(self.early_exit_threshold)
        self.exit_epsilon = check_exit_epsilon(fields.pop("exit_epsilon", None), self.early_exit_threshold)
        self.beta = check_beta(fields.pop("beta", DEFAULT_BETA))
        self.bos_token_id = check_token_id("bos_token_id", fields.pop("bos_token_id", None))
        self.eos_token_id = check_token_id("eos_token_id", fields.pop("eos_token_id", None))
        self.pad_token_id = check_token_id("pad_token_id", fields.pop("pad_token_id", None))
        super().__init__(**fields)

    def to_model_config(self) -> LoopedConfig:
        """The architecture alone. Raises UserError when a value is impossible or of the wrong type."""
        same_name = {name: getattr(self, name) for name in _FIELDS if name in self.CLASS_DEFAULTS}
        return build_model_config({**same_name, "num_loops": self.total_ut_steps})

    def to_diff_dict(self) -> dict[str, Any]:
        """What config.json holds: the released keys, so that others' Ouro code reads the file."""
        fields = without_unset_epsilon(super().to_diff_dict())
        # The released code runs on transformers 4, which knows the dtype under its old name only.
        if "dtype" in fields:
            fields["torch_dtype"] = fields.pop("dtype")
        fields["rope_scaling"] = None
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if fields[name] is None:
                del fields[name]
        if fields["beta"] == DEFAULT_BETA:
            del fields["beta"]
        return fields


def build_model_config(fields: dict[str, Any]) -> LoopedConfig:
    """A LoopedConfig from plain values. Raises UserError when a value is impossible or of the wrong type."""
    scaling = fields.pop("position_scaling", None)
    check_types(_FIELDS, fields)
    try:
        return LoopedConfig(**fields, position_scaling=build_scaling(scaling))
    except ValueError as error:
        raise UserError(f"The config cannot be built: {error}") from None


def build_scaling(value: Any) -> RopeScaling | None:
    """`position_scaling` from plain values. Raises UserError unless it is null or holds RopeScaling's fields."""
    if value is None:
        return None
    allowed = {field.name: field for field in dataclasses.fields(RopeScaling)}
    if not isinstance(value, dict) or not {"rope_type", "factor"} <= value.keys() <= allowed.keys():
        raise UserError(
            f"position_scaling is {value!r} in the config; it must be null or an object with rope_type, factor and, "
            f"where they are needed, {', '.join(list(allowed)[2:])}."
        )
    check_types(allowed, value)
    return RopeScaling(**value)


def check_types(known: dict[str, dataclasses.Field[Any]], fields: dict[str, Any]) -> None:
    """Raises UserError for a field that is not of the type it has in `known`."""
    for name, value in fields.items():
        expected: Any = known[name].type
        if get_origin(expected) is Literal:
            if value not in get_args(expected):
                raise UserError(f"{name} is {value!r} in the config; choose one of {', '.join(get_args(expected))}.")
            continue
        accepted = (int, float) if expected is float else expected
        if not isinstance(value, accepted) or (isinstance(value, bool) and expected is not bool):
            kind = expected.__name__ if isinstance(expected, type) else expected
            raise UserError(f"{name} is {value!r} in the config; it must be of type {kind}.")


def check_exit_threshold(value: Any) -> float | None:
    """Returns a saved exit threshold, None for all loops. Raises UserError unless it is a number from 0 up."""
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise UserError(
            f"The exit threshold in the config is {value!r}; it must be a number from 0 up, or null for all loops."
        )
    return value


def check_exit_epsilon(value: Any, exit_threshold: float | None) -> float | None:
    """Returns a saved epsilon of the hidden-difference exit, None for none.

    Raises UserError unless it is a number from 0 up, and beside a threshold at which the gate would let tokens leave.
    """
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise UserError(f"exit_epsilon is {value!r} in the config; it must be a number from 0 up, or null for none.")
    if exit_threshold is not None and exit_threshold < 1:
        raise UserError(
            f"The config holds both exit_epsilon {value:g} and an exit threshold of {exit_threshold:g}, and a token "
            "can leave by one rule only; set the threshold to 1, or take exit_epsilon out."
        )
    return value


def without_unset_epsilon(fields: dict[str, Any]) -> dict[str, Any]:
    """A config's fields without `exit_epsilon` where it is null: most checkpoints never have one."""
    return {name: value for name, value in fields.items() if name != "exit_epsilon" or value is not None}


def check_beta(value: Any) -> float:
    """Returns an entropy weight. Raises UserError unless it is a number from 0 up."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise UserError(f"beta is {value!r} in the config; the entropy weight must be a number from 0 up.")
    return value


def check_token_id(name: str, value: Any) -> Any:
    """Returns a special token's id, or several, or None. Raises UserError for anything else."""
    several = name == "eos_token_id" and isinstance(value, list)
    if value is not None and any(type(token) is not int for token in (value if several else [value])):
        allowed = "an integer, a list of them or null" if name == "eos_token_id" else "an integer or null"
        raise UserError(f"{name} is {value!r} in the config; it must be {allowed}.")
    return value


def check_setting_types(fields: dict[str, Any]) -> None:
    """Raises UserError for settings of transformers' own, read here too, that are not of their types."""
    layer_types = fields.get("layer_types")
    if layer_types is not None and not isinstance(layer_types, list | tuple):
        raise UserError(
            f"layer_types is {layer_types!r} in the config; it must be a list with one name for each layer."
        )
    for name in ("dtype", "torch_dtype"):
        dtype = fields.get(name)
        known = isinstance(dtype, str) and isinstance(vars(torch).get(dtype), torch.dtype)
        if dtype is not None and not known and not isinstance(dtype, torch.dtype):
            raise UserError(f'{name} is {dtype!r} in the config; it must be the name of a torch dtype, as "bfloat16".')


def refuse_unsupported(fields: dict[str, Any]) -> None:
    """Raises UserError for settings that would change the model and that looplm cannot follow.

    A window that is given but not switched on, or a dropout of 0, changes nothing and passes.
    """
    check_setting_types(fields)
    layer_types = fields.get("layer_types") or []
    refused = {
        "hidden_act": fields.get("hidden_act", "silu") != "silu",
        "attention_dropout": bool(fields.get("attention_dropout")),
        "use_sliding_window": bool(fields.get("use_sliding_window")),
        "layer_types": any(kind != "full_attention" for kind in layer_types),
        "rope_scaling": _scales_rope(fields.get("rope_scaling")),
        "rope_parameters": _scales_rope(fields.get("rope_parameters")),
        "early_exit_step": fields.get("early_exit_step") is not None,
    }
    found = [f"{name} = {fields[name]!r}" for name, is_refused in refused.items() if is_refused]
    if found:
        raise UserError(
            f"The config asks for {'; '.join(found)}, which looplm does not implement. It has SiLU, full attention "
            "without dropout and unscaled rotary positions (our own configs have position_scaling), and takes the "
            "depth with each call. The checkpoint would not compute what it was trained for, so it is not loaded."
        )


def _refuse_misspelt(fields: dict[str, Any], known: list[str]) -> None:
    """Raises UserError for a left-over key that is nearly one of ours; others belong to transformers and pass."""
    for name in fields:
        if close := difflib.get_close_matches(name, known, n=1, cutoff=0.9):
            raise UserError(f"The config has no field {name}; did you mean {close[0]}?")


def _scales_rope(rope: Any) -> bool:
    """Whether rotary parameters ask for more than a theta. transformers 5 writes {"rope_type": "default", ...}."""
    if rope is None:
        return False
    if not isinstance(rope, dict) or not rope.keys() <= {"rope_type", "type", "rope_theta"}:
        return True
    return rope.get("rope_type", rope.get("type", "default")) != "default"


def _unify_rope(fields: dict[str, Any]) -> None:
    """Leaves one spelling of the rotary settings, `rope_theta`, in place.

    transformers 5 moves it into `rope_parameters`; others' Ouro code reads it where it was.
    """
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.pop(name, None) or {}
        if "rope_theta" in rope:
            fields["rope_theta"] = rope["rope_theta"]
