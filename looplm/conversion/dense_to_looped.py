"""A dense model as a looped one: its decoder, or the middle of it, becomes the core (Closing the Loop, section 4).

At one loop the result computes what the dense model does: the later loops, their injection and LoRA banks, and the
gate are what training has to make use of.
"""

import dataclasses
import math
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from looplm.conversion.dense_source import DenseSource, open_dense, read_dense_weights, source_dtype
from looplm.conversion.shared_layers import fold_layers
from looplm.errors import UserError
from looplm.hf.checkpoint import read_json
from looplm.hf.config import LoopLMConfig, build_model_config
from looplm.hf.load import GENERATION_CONFIG, check_device, check_dtype
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.model.config import Injection, LoopedConfig, LoopState
from looplm.model.injection import SCALAR_START

LoraFrom = Literal["zero", "svd"]

CALIBRATION_TOKENS = 256
"""Positions over which the size of the state that enters a core behind a prelude is measured."""


@dataclasses.dataclass(kw_only=True, frozen=True)
class Looping:
    """How a dense model is to be looped. See :func:`dense_to_looped`."""

    num_loops: int = 3
    injection: Injection = "scalar"
    core: tuple[int, int] | None = None
    """Dense layers [first, last) that loop; those before become the prelude, those behind the coda. None: all."""
    loop_state: LoopState | None = None
    """What a loop hands on: the state after the final norm (None, and all layers loop), or the raw one (None, and
    there is a prelude or coda, whose layers know raw states only)."""
    lora_rank: int = 0
    lora_alpha: float = 32.0
    lora_from: LoraFrom = "zero"
    """zero: the banks change nothing at first. svd: `num_loops` dense layers are tied into one shared layer each, and
    the banks hold the truncated SVD of what sets them apart (Relaxed Recursive Transformers, 2410.20672)."""
    start_depth: float | None = None
    """Mean depth of the exit distribution at the start; None for (1 + num_loops) / 2."""


def dense_to_looped(
    source: str | Path | PreTrainedModel | DenseSource,
    *,
    num_loops: int = 3,
    injection: Injection = "scalar",
    core: tuple[int, int] | None = None,
    loop_state: LoopState | None = None,
    lora_rank: int = 0,
    lora_alpha: float = 32.0,
    lora_from: LoraFrom = "zero",
    start_depth: float | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    calibration_ids: Tensor | None = None,
    seed: int = 0,
) -> LoopLMForCausalLM:
    """Loops a dense Llama, Qwen2 or Qwen3 model: a directory, hub name, GGUF file, or transformers' model in memory.

    Embeddings, head, biases, q/k norms and rotary scaling are carried over; the options are the fields of
    :class:`Looping`. New parameters are neutral: `scalar` starts at w = 0.99 and its norm at the root mean square of
    what enters the core (Closing the Loop 4.1; the embedding table's, or behind a prelude the median over
    `calibration_ids`, (B, S), by default random ids), LoRA b at zero, the gate at one hazard for every token, such
    that the mean depth is `start_depth`. `dtype` is that of the weights, None for the source's.

    With `lora_from="svd"` the core's layers are folded: L dense layers become L / num_loops shared ones, and the model
    at num_loops loops, not at one, is the approximation of the dense one; exact at full rank, but for q/k norms and
    biases, which are averaged. It needs `injection="none"`, and hands raw states on.

    Memory: one model. Raises UserError for what :func:`~looplm.conversion.dense_source.open_dense` refuses, for
    tensors missing, unexpected or mis-shaped (all named), and for options that do not fit the model.
    """
    looping = Looping(
        num_loops=num_loops,
        injection=injection,
        core=core,
        loop_state=loop_state,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        lora_from=lora_from,
        start_depth=start_depth,
    )
    dense = open_dense(source)
    place, kept = check_device(device), check_dtype(dtype) or source_dtype(dense)
    return build_looped(dense, looping, kept, place, calibration_ids, seed)


def build_looped(
    dense: DenseSource,
    looping: Looping,
    dtype: torch.dtype,
    device: torch.device,
    calibration_ids: Tensor | None = None,
    seed: int = 0,
) -> LoopLMForCausalLM:
    """:func:`dense_to_looped` of a source that is open, with its options in one."""
    config = looped_config(dense.shape, looping)
    gate_bias = start_gate_bias(config.num_loops, looping.start_depth)
    with torch.device("meta"):
        model = LoopLMForCausalLM(shell_config(dense, config))
    model.config.dtype = dtype
    weights = rename_layers(read_dense_weights(dense, dtype, device), config, looping)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name not in weights and name != "lm_head.weight":
            weights[name] = new_parameter(name, tuple(parameter.shape), config, generator).to(device, dtype)
    weights["model.early_exit_gate.bias"].fill_(gate_bias)
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.eval()
    if config.injection == "scalar":
        weights["model.injection.norm.weight"].fill_(state_size(model, calibration_ids))
    generation = dense.path / GENERATION_CONFIG
    if generation.is_file():
        model.generation_config = GenerationConfig(**read_json(generation))
    return model


def looped_config(dense: LoopedConfig, looping: Looping) -> LoopedConfig:
    """The architecture that :func:`dense_to_looped` gives, from shapes alone. Raises UserError for what cannot be."""
    layers = dense.num_hidden_layers
    first, last = looping.core or (0, layers)
    if not 0 <= first < last <= layers:
        raise UserError(
            f"core is {first}:{last}; it must lie within the model's layers, 0:{layers}, and hold one at least."
        )
    widest = max(dense.hidden_size, dense.intermediate_size, dense.num_attention_heads * dense.head_dim)
    if looping.lora_rank > widest:
        raise UserError(
            f"lora_rank is {looping.lora_rank:,}; the matrices of this model have at most {widest:,} rows or columns, "
            "and no correction needs more."
        )
    split, core = (first, last) != (0, layers), last - first
    loop_state = looping.loop_state or ("raw" if split else "normed")
    if looping.lora_from not in ("zero", "svd"):
        raise UserError(f"lora_from is {looping.lora_from!r}; choose zero or svd.")
    if looping.lora_from == "svd":
        if looping.lora_rank < 1 or looping.injection != "none" or looping.loop_state == "normed":
            raise UserError(
                "lora_from svd ties layers of the dense model, each loop going on where the one before it ended: it "
                "needs a lora_rank of 1 or more, injection none, and the raw loop_state."
            )
        if core % looping.num_loops:
            raise UserError(
                f"lora_from svd ties {looping.num_loops} layers into one, one for each loop; the core's {core} layers "
                "are no multiple of that. Choose another num_loops or core."
            )
        core, loop_state = core // looping.num_loops, "raw"
    return build_model_config(
        dataclasses.asdict(dense)
        | {
            "num_hidden_layers": core,
            "num_prelude_layers": first,
            "num_coda_layers": layers - last,
            "coda_input": "raw" if last < layers else "normed",
            "num_loops": looping.num_loops,
            "loop_state": loop_state,
            "injection": looping.injection,
            "lora_rank": looping.lora_rank,
            "lora_alpha": looping.lora_alpha,
        }
    )


def shell_config(dense: DenseSource, config: LoopedConfig) -> LoopLMConfig:
    """The config of the converted checkpoint: the architecture, and the dense model's special tokens."""
    tokens = {name: dense.config.to_dict().get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return LoopLMConfig.from_model_config(config, **tokens)


# --- Weights --------------------------------------------------------------------------------------------------------


def rename_layers(dense: dict[str, Tensor], config: LoopedConfig, looping: Looping) -> dict[str, Tensor]:
    """The dense weights under the names of the looped model; layers of the core tied, where `lora_from` is svd."""
    first = config.num_prelude_layers
    num_core = config.num_hidden_layers * (config.num_loops if looping.lora_from == "svd" else 1)
    layers: dict[int, dict[str, Tensor]] = {}
    weights: dict[str, Tensor] = {}
    for name, weight in dense.items():
        if not name.startswith("model.layers."):
            weights[name] = weight
            continue
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        idx = int(layer)
        if idx < first:
            weights[f"model.prelude.{idx}.{rest}"] = weight
        elif idx >= first + num_core:
            weights[f"model.coda.{idx - first - num_core}.{rest}"] = weight
        elif looping.lora_from == "svd":
            layers.setdefault(idx - first, {})[rest] = weight
        else:
            weights[f"model.layers.{idx - first}.{rest}"] = weight
    if config.num_coda_layers:
        # The dense final norm stands behind the coda; the one behind a loop, which the gate reads, starts neutral.
        weights["model.coda_norm.weight"] = weights.pop("model.norm.weight")
    if layers:
        weights |= fold_layers([layers[i] for i in range(num_core)], config)
    return weights


def new_parameter(name: str, shape: tuple[int, ...], config: LoopedConfig, generator: torch.Generator) -> Tensor:
    """Starting value, in float32, of a parameter that the dense model does not have; neutral for what is computed."""
    if name == "model.injection.logit":
        return torch.full(shape, SCALAR_START)
    if name.startswith("model.injection.") and name.endswith("proj.weight") and config.injection != "concat_random":
        return torch.eye(shape[0], shape[1])  # [I, 0]
    if name.endswith("injection.proj.weight") or (name.startswith("model.lora.") and name.endswith(".a")):
        return config.initializer_range * torch.randn(shape, generator=generator)
    return torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)


def state_size(model: LoopLMForCausalLM, calibration_ids: Tensor | None) -> float:
    """Root mean square of the states that enter the core: where the norm of the scalar injection starts.

    Without a prelude that of the embedding table. Behind one, the median over positions of `calibration_ids`, since
    a dense model gives its first position a state hundreds of times as large as the others.
    """
    bare, table = model.model, model.model.embed_tokens.weight
    if not bare.config.num_prelude_layers:
        # By rows, in pieces: a float64 copy of the whole table would be as large as a small model.
        total = sum(rows.double().square().sum().item() for rows in table.detach().split(4096))
        return math.sqrt(total / table.numel())
    if calibration_ids is None:
        calibration_ids = random_ids(bare.config, CALIBRATION_TOKENS)
    with torch.no_grad():
        ids = calibration_ids.to(table.device)
        states = bare.encode(ids, bare.context(ids)).double()  # (B, S, D)
    return states.square().mean(-1).sqrt().median().item()


def random_ids(config: LoopedConfig, num_tokens: int) -> Tensor:
    """(1, S) token ids, the same on every call: what stands in for text where there is no tokenizer."""
    length = min(num_tokens, config.max_position_embeddings)
    return torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))


def start_gate_bias(num_loops: int, start_depth: float | None) -> float:
    """The gate bias with which, at zero gate weights, the exit pdf has the mean `start_depth`.

    With s = 1 - hazard the mean is the sum of survivals, 1 + s + ... + s^(R-1) (Ouro, section 3), solved by bisection.
    Raises UserError unless 1 < start_depth < num_loops, where there is more than one loop.
    """
    if num_loops == 1 and start_depth in (None, 1):
        return 0.0
    wanted = (1 + num_loops) / 2 if start_depth is None else start_depth
    if not 1 < wanted < num_loops:
        raise UserError(
            f"start_depth is {wanted}; the mean depth lies between 1 and {num_loops} loops, without reaching them."
        )
    low, high = -60.0, 60.0  # the depth falls as the bias grows
    for _ in range(200):
        bias = (low + high) / 2
        survival = 1 / (1 + math.exp(bias))
        if math.fsum(survival**loop for loop in range(num_loops)) > wanted:
            low = bias
        else:
            high = bias
    return (low + high) / 2
