"""Layer duplication: a core of L layers becomes one of k * L (Ouro, section 4: 24 layers to 48 for its 2.6B)."""

from typing import Any, Literal

import torch

from looplm.errors import UserError
from looplm.hf.config import LoopLMConfig, OuroConfig
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.model.config import MOST_LAYERS

LayerOrder = Literal["stacked", "interleaved"]
"""1..L, 1..L, or 1, 1, 2, 2, ...; the paper does not say which one Ouro used."""

_BANKS = "model.lora."
_LAYERS = "model.layers."
_INJECTIONS = "model.injection.layers."


def upcycle(model: LoopLMForCausalLM, num_layers: int, order: LayerOrder = "stacked") -> LoopLMForCausalLM:
    """A new model whose core has `num_layers` layers, copies of those of `model`; the rest is copied as it is.

    A layer's LoRA banks and injection go with it; prelude and coda stay, and so do dtype, device, training mode, what
    is frozen, and the kind of the model (an Ouro model gives an Ouro model). `model` is left alone and shares no
    memory.

    With `final_norm: none` and no injection, the stacked model at R / 2 loops computes what `model` does at R,
    when the layers are doubled; a final norm or an injection after every loop then acts half as often.

    Raises UserError unless `num_layers` is a multiple of the layers there are, and more than that.
    """
    layer_of = duplicated_layers(model.model.config.num_hidden_layers, num_layers, order)
    with torch.device("meta"):
        grown = type(model)(grown_config(model.config, num_layers))
    sources = {name: source_name(name, layer_of) for name in grown.state_dict()}
    weights = model.state_dict()
    copies = {name: weights[source].detach().clone() for name, source in sources.items()}
    if model.config.tie_word_embeddings:
        copies["lm_head.weight"] = copies["model.embed_tokens.weight"]
    grown.load_state_dict(copies, assign=True)
    grown.tie_weights()
    for name, parameter in grown.named_parameters():
        parameter.requires_grad_(model.get_parameter(sources[name]).requires_grad)
    grown.generation_config = model.generation_config
    return grown.train(model.training)


def duplicated_layers(num_layers: int, wanted: int, order: LayerOrder) -> list[int]:
    """For each of the `wanted` layers, the index of the one of `num_layers` that it copies."""
    if order not in ("stacked", "interleaved"):
        raise UserError(f"order is {order!r}; choose stacked (1..L, 1..L) or interleaved (1, 1, 2, 2, ...).")
    if wanted <= num_layers or wanted % num_layers:
        raise UserError(
            f"num_layers is {wanted}, and the core has {num_layers} layers; upcycling duplicates all of them equally "
            f"often, so give a multiple: {2 * num_layers}, {3 * num_layers}, ..."
        )
    if wanted > MOST_LAYERS:
        raise UserError(f"num_layers is {wanted:,}; looplm builds models with up to {MOST_LAYERS:,}.")
    copies = wanted // num_layers
    return [i % num_layers if order == "stacked" else i // copies for i in range(wanted)]


def source_name(name: str, layer_of: list[int]) -> str:
    """The tensor of the smaller model that tensor `name` of the grown one copies."""
    for prefix in (_LAYERS, _BANKS, _INJECTIONS):
        if name.startswith(prefix):
            layer, _, rest = name.removeprefix(prefix).partition(".")
            return f"{prefix}{layer_of[int(layer)]}.{rest}"
    return name


def grown_config(config: LoopLMConfig | OuroConfig, num_layers: int) -> LoopLMConfig | OuroConfig:
    """`config` with another number of core layers."""
    fields: dict[str, Any] = config.to_diff_dict()
    fields.pop("model_type")
    fields["num_hidden_layers"] = num_layers
    if isinstance(config, OuroConfig):
        # As in the released 2.6B: one entry a layer. A window could only begin at a layer beyond the last.
        fields |= {"layer_types": ["full_attention"] * num_layers, "max_window_layers": num_layers}
    return type(config)(**fields)
