"""A looped checkpoint in the released Ouro format, or in ours: the same tensors under another config."""

from typing import Literal

import torch

from looplm.errors import UserError
from looplm.hf.config import LoopLMConfig, OuroConfig
from looplm.hf.modeling import LoopLMForCausalLM, OuroForCausalLM
from looplm.model.config import LoopedConfig

Format = Literal["ouro", "hf"]

SHELL_FIELDS = ("exit_threshold", "exit_epsilon", "beta", "bos_token_id", "eos_token_id", "pad_token_id")
"""What a shell's config holds beside the architecture."""


def exported(model: LoopLMForCausalLM, format: Format) -> LoopLMForCausalLM:
    """The model under the config of another format; it shares its weights with `model`.

    ouro: what others' Ouro code reads. hf: our own, for `AutoModelForCausalLM` once looplm is in use. Exit threshold,
    special tokens and entropy weight come along. Raises UserError when the Ouro format cannot carry the architecture,
    naming everything that it has no place for.
    """
    if format not in ("ouro", "hf"):
        raise UserError(f"format is {format!r}; choose ouro or hf.")
    architecture = model.model.config
    shell = {name: getattr(model.config, name) for name in SHELL_FIELDS}
    if format == "ouro":
        refuse_beyond_ouro(architecture)
        names = [name for name in OuroConfig.CLASS_DEFAULTS if name in LoopedConfig.__dataclass_fields__]
        fields = {name: getattr(architecture, name) for name in names} | {"max_window_layers": architecture.num_layers}
        config = OuroConfig(**fields, num_loops=architecture.num_loops, **shell)
    else:
        config = LoopLMConfig.from_model_config(architecture, **shell)
    config.dtype = model.dtype
    with torch.device("meta"):
        other = (OuroForCausalLM if format == "ouro" else LoopLMForCausalLM)(config)
    other.load_state_dict(model.state_dict(), assign=True)
    other.tie_weights()
    other.generation_config = model.generation_config
    return other.eval()


def refuse_beyond_ouro(config: LoopedConfig) -> None:
    """Raises UserError naming all that the Ouro format has no place for; a model without them is an Ouro model."""
    found = {
        f"a prelude of {config.num_prelude_layers} layers": config.num_prelude_layers > 0,
        f"a coda of {config.num_coda_layers} layers": config.num_coda_layers > 0,
        f"norm_placement {config.norm_placement}": config.norm_placement != "ouro",
        f"final_norm {config.final_norm}": config.final_norm != "rms",
        f"loop_state {config.loop_state}": config.loop_state != "normed",
        f"injection {config.injection}": config.injection != "none",
        f"LoRA banks of rank {config.lora_rank}": config.lora_rank > 0,
        "biases": config.attention_bias or config.attention_output_bias or config.mlp_bias,
        "q/k norms": config.qk_norm,
        "scaled rotary positions": config.position_scaling is not None,
    }
    lost = [name for name, is_there in found.items() if is_there]
    if lost:
        raise UserError(
            f"The Ouro format cannot carry {', '.join(lost)}. Written without, the model would compute something "
            "else, so nothing was exported. Use --format hf."
        )
