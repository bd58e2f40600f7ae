"""How many bytes a training step takes on one device, worked out from the recipe alone, and what fits.

Counted is what the eager step allocates: parameters, gradients and AdamW moments in float32, the copies that
sharding and autocast make, every tensor that autograd keeps for the backward pass (exact, see the tests), the head's
buffers, and the temporaries of one layer. A compiled block keeps less. Allocator waste and the CUDA context are not
counted: `USABLE_SHARE` leaves room for them.

Sizes are those of a GPU, where packed rows take block masks of a few bytes (:mod:`looplm.model.flex`). A CPU takes a
dense mask, S * S a row, and its attention keeps a numeric copy: `dense_mask=True` counts both.
"""

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from looplm.errors import UserError
from looplm.model.config import LoopedConfig
from looplm.model.flops import parameter_shapes
from looplm.objectives.cross_entropy import rows_in_chunk
from looplm.training.lora import held_bytes, is_held_narrow, lora_shapes, trains
from looplm.training.stage_recipe import LastLoopRecipe, RoutingRecipe, StageRecipe, UniformDepth, trains_gate_alone

USABLE_SHARE = 0.9
"""Of a device's memory, what the estimate may fill."""

WIDE = 4
"""Bytes of float32: parameters, gradients, moments, the residual stream and all sums."""


@dataclass(kw_only=True, frozen=True)
class MemoryEstimate:
    """Bytes on one device at the peak of a step."""

    parameters: int
    """This device's shard."""
    gradients: int
    """Of what is trained; this device's shard."""
    moments: int
    """Both of AdamW; this device's shard."""
    gathered: int
    """Under sharding, the whole parameters and gradients that exist during a step; 0 on one device."""
    casts: int
    """bfloat16 copies of the matrices under autocast, as far as they exist at the peak."""
    activations: int
    """What the backward pass needs, and the temporaries of one layer."""
    head: int
    """A chunk of logits, and the LM head's gradient, formed in the forward pass."""
    sums: int = 0
    """Where a step takes several passes: a pass's gradients, summed over the loops before they join `gradients`, as
    far as they need more than the first loop gone back through has freed."""

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the micro-batch."""
        return self.total - self.activations

    @property
    def total(self) -> int:
        """All of it."""
        return (
            self.parameters + self.gradients + self.moments + self.gathered
            + self.casts + self.activations + self.head + self.sums
        )  # fmt: skip


def estimate_memory(
    config: LoopedConfig,
    stage: StageRecipe,
    micro_batch_rows: int,
    num_devices: int = 1,
    *,
    accumulates: bool = False,
    dense_mask: bool = False,
) -> MemoryEstimate:
    """The peak of a step of `stage` over `micro_batch_rows` rows a device, the model sharded over `num_devices`.

    accumulates: whether a step takes several such passes. dense_mask: of a CPU (see above).
    """
    shapes = parameter_shapes(config) | lora_shapes(config, stage)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    trained = sum(size for name, size in sizes.items() if is_trained(name, stage))
    held = held_bytes(shapes, stage)
    narrow = narrow_bytes(stage)
    tokens = micro_batch_rows * stage.seq_len
    return MemoryEstimate(
        parameters=_shard(held, num_devices),
        gradients=WIDE * _shard(trained, num_devices),
        moments=2 * WIDE * _shard(trained, num_devices),
        gathered=held + WIDE * trained if num_devices > 1 else 0,
        casts=_cast_bytes(config, stage, tokens),
        activations=activation_bytes(config, stage, micro_batch_rows, dense_mask=dense_mask),
        head=_head_bytes(config, tokens, narrow, trained=is_trained("lm_head.weight", stage)),
        sums=max(0, WIDE * trained - _freed_by_a_loop(config, stage, tokens)) if accumulates else 0,
    )


def fit_micro_batch_rows(
    config: LoopedConfig,
    stage: StageRecipe,
    rows: int,
    device_bytes: int,
    num_devices: int = 1,
    *,
    dense_mask: bool = False,
) -> int:
    """Rows of a forward, so that a device's `rows` of a step are done in as few and as even passes as fit.

    Raises UserError when a single row does not fit into `device_bytes`.
    """
    usable = int(USABLE_SHARE * device_bytes)

    def needed(candidate: int) -> int:
        return estimate_memory(
            config, stage, candidate, num_devices, accumulates=candidate < rows, dense_mask=dense_mask
        ).total

    if needed(rows) <= usable:
        return rows
    if (least := needed(1)) > usable:
        raise UserError(
            f"Stage {stage.name}: one row of {stage.seq_len:,} tokens needs {least / 1e9:.1f} GB on each of "
            f"{num_devices} device{'s' * (num_devices > 1)}, and {usable / 1e9:.1f} of {device_bytes / 1e9:.1f} GB "
            f"can be used. {_advice(stage)}"
        )
    fits = 1
    for candidate in range(2, rows):  # memory grows with the rows
        if needed(candidate) > usable:
            break
        fits = candidate
    passes = math.ceil(rows / fits)
    return math.ceil(rows / passes)


def _advice(stage: StageRecipe) -> str:
    ways = {
        "activation_checkpointing: layer or both": stage.activation_checkpointing == "none",
        "activation_checkpointing: both": stage.activation_checkpointing in ("layer", "loop"),
        "precision: bf16": stage.precision == "fp32",
        "more devices": True,
        "a shorter seq_len": True,
    }
    return "What helps: " + ", ".join(way for way, open_ in ways.items() if open_) + "."


def is_trained(name: str, stage: StageRecipe) -> bool:
    """Whether the stage trains the parameter `name`: not frozen by pattern, in Stage II only the gate's, with the last
    loop's loss all but those, and under LoRA only corrections and what is trained besides."""
    of_gate = name.startswith("model.early_exit_gate.")
    if isinstance(stage.objective, LastLoopRecipe) if of_gate else trains_gate_alone(stage.objective):
        return False
    if stage.lora is not None and not trains(name, stage.lora):
        return False
    return not any(fnmatchcase(name, pattern) or fnmatchcase(name, f"model.{pattern}") for pattern in stage.freeze)


def deepest(config: LoopedConfig, stage: StageRecipe) -> int:
    """The largest number of loops that a step of the stage may run."""
    if isinstance(stage.num_loops, int):
        return stage.num_loops
    return config.num_loops if stage.num_loops is None else stage.num_loops.max


def shallowest(config: LoopedConfig, stage: StageRecipe) -> int:
    """The smallest number of loops that a step of the stage may run."""
    if isinstance(stage.objective, RoutingRecipe):
        return 1
    if isinstance(stage.num_loops, int):
        return stage.num_loops
    if stage.num_loops is None:
        return config.num_loops
    return stage.num_loops.min if isinstance(stage.num_loops, UniformDepth) else 1


def mean_loops(config: LoopedConfig, stage: StageRecipe) -> float:
    """The number of loops a step runs on average. A heavy-tailed draw's is that of its mean, the cap left aside."""
    if isinstance(stage.num_loops, int):
        return float(stage.num_loops)
    if stage.num_loops is None:
        return float(config.num_loops)
    if isinstance(stage.num_loops, UniformDepth):
        return (stage.num_loops.min + stage.num_loops.max) / 2
    return min(stage.num_loops.mean + 1, float(stage.num_loops.max))


def narrow_bytes(stage: StageRecipe) -> int:
    """Bytes of an element in matrix products."""
    return 2 if stage.precision == "bf16" else WIDE


def _shard(size: int, num_devices: int) -> int:
    return -(-size // num_devices)


# --- Activations ----------------------------------------------------------------------------------------------------


def activation_bytes(config: LoopedConfig, stage: StageRecipe, rows: int, *, dense_mask: bool = False) -> int:
    """What autograd keeps from the forward over `rows` rows, and the temporaries of one layer."""
    tokens = rows * stage.seq_len
    narrow, loops = narrow_bytes(stage), deepest(config, stage)
    masked_keys = stage.seq_len if dense_mask else 0
    state = tokens * WIDE * config.hidden_size
    per_layer = tokens * layer_bytes(config, narrow, masked_keys)
    working = tokens * (WIDE * 4 * config.hidden_size + narrow * 4 * config.intermediate_size)
    shared = tokens * (2 * WIDE * config.head_dim + masked_keys)  # cos and sin, and the boolean mask
    if trains_gate_alone(stage.objective):
        # The language model is frozen: only what the gate reads is kept, and the states, which the head reads.
        return loops * (state + tokens * narrow * config.hidden_size) + working + shared
    kept_loops = min(loops, stage.backprop_loops or loops)
    how = stage.activation_checkpointing
    outer = per_layer if how == "none" else state  # a layer of prelude or coda
    of_loop, again = _of_loop(config, stage, state, per_layer)
    injections = max(0, kept_loops - 1) * _injection_bytes(config, tokens, narrow) if how in ("none", "layer") else 0
    once = config.num_prelude_layers * outer + state  # the embedding, or what the prelude leaves
    readouts = loops * (_readout_bytes(config, tokens, narrow) + config.num_coda_layers * outer)
    return once + kept_loops * of_loop + again + injections + readouts + working + shared


def _of_loop(config: LoopedConfig, stage: StageRecipe, state: int, per_layer: int) -> tuple[int, int]:
    """What a loop leaves behind, and what the backward pass runs again before it goes through it."""
    layers = config.num_hidden_layers
    return {
        "none": (layers * per_layer, 0),
        "layer": (layers * state, per_layer),
        "loop": (state, layers * per_layer),
        "both": (state, layers * state + per_layer),
    }[stage.activation_checkpointing]


def _freed_by_a_loop(config: LoopedConfig, stage: StageRecipe, tokens: int) -> int:
    """What is free again once the backward pass has gone through one loop, and another is to come."""
    if min(deepest(config, stage), stage.backprop_loops or math.inf) < 2:
        return tokens * config.num_hidden_layers * layer_bytes(config, narrow_bytes(stage))
    narrow = narrow_bytes(stage)
    state, per_layer = tokens * WIDE * config.hidden_size, tokens * layer_bytes(config, narrow)
    return _of_loop(config, stage, state, per_layer)[0] + _readout_bytes(config, tokens, narrow)


def layer_bytes(config: LoopedConfig, narrow: int, masked_keys: int = 0) -> int:
    """Bytes a token leaves behind in one application of one layer.

    narrow: the size of an element in matrix products. masked_keys: keys of a dense mask, S or, under a block mask, 0.
    The norms keep their input alone, SwiGLU its two factors and their product.
    """
    hidden, wide = config.hidden_size, config.intermediate_size
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    # What norms read: the residual stream or sums in float32, and branches as matrix products leave them.
    streams, branches = {"ouro": (2, 2), "sandwich": (4, 0), "pre": (2, 0), "post": (2, 0), "magic": (2, 0)}[
        config.norm_placement
    ]
    total = (WIDE * streams + narrow * branches) * hidden
    total += narrow * 2 * hidden  # what q, k and v read, and what gate and up read
    total += narrow * 2 * (heads + keys) * config.head_dim + WIDE * heads  # q, k, v, output, log-sum-exp
    total += narrow * 3 * wide
    total += narrow * masked_keys  # the mask as numbers, which the attention kernel keeps for itself
    if config.qk_norm:
        total += narrow * (heads + keys) * config.head_dim
    if config.lora_rank:
        total += narrow * 7 * config.lora_rank
    return total


def _readout_bytes(config: LoopedConfig, tokens: int, narrow: int) -> int:
    """Bytes that the final norm, the gate and the head's gradient leave behind at one loop."""
    hidden = config.hidden_size
    norm_input = 0 if config.final_norm == "none" else WIDE * hidden
    for_gate = narrow * hidden if narrow < WIDE else 0
    gradient_of_state = WIDE * hidden
    return tokens * (norm_input + for_gate + gradient_of_state + 6 * WIDE)


def _injection_bytes(config: LoopedConfig, tokens: int, narrow: int) -> int:
    hidden = config.hidden_size
    # Beside its own input, the state that comes in is no longer the one the first layer keeps.
    if config.injection.startswith("concat"):
        matrices = config.num_hidden_layers if config.injection == "concat_layers" else 1
        return tokens * (narrow * 2 * hidden * matrices + WIDE * hidden)
    return tokens * {"none": 0, "add": WIDE * hidden, "scalar": WIDE * 2 * hidden}[config.injection]


def _cast_bytes(config: LoopedConfig, stage: StageRecipe, tokens: int) -> int:
    narrow, embedding = narrow_bytes(stage), ("model.embed_tokens.weight", "lm_head.weight")
    if narrow == WIDE:
        return 0
    # The embedding is looked up; the head is counted apart.
    shapes = [
        shape
        for name, shape in (parameter_shapes(config) | lora_shapes(config, stage)).items()
        if len(shape) >= 2 and name not in embedding and not is_held_narrow(name, stage)
    ]
    casts = narrow * sum(math.prod(shape) for shape in shapes)
    if stage.lora is not None:
        # Autocast keeps its copies of trained weights alone; those of frozen ones are made anew at every use.
        if stage.activation_checkpointing in ("none", "loop"):
            return casts * (deepest(config, stage) if stage.activation_checkpointing == "none" else 1)
        return casts // config.num_layers
    if stage.activation_checkpointing in ("none", "loop"):
        return casts
    # Where layers are run again nothing keeps the forward's copies. Going back there are one layer's, and then what
    # that layer keeps, which is counted with the activations.
    return max(casts // config.num_layers, casts - tokens * layer_bytes(config, narrow))


def _head_bytes(config: LoopedConfig, tokens: int, narrow: int, *, trained: bool) -> int:
    """A chunk of logits, the head's cast, and its gradient while it is summed and scaled."""
    weight = config.vocab_size * config.hidden_size
    dtype = torch.bfloat16 if narrow < WIDE else torch.float32
    rows = min(tokens, rows_in_chunk(config.vocab_size, config.hidden_size, dtype, torch.float32))
    cast = 2 * narrow * weight if narrow < WIDE else 0  # and the products that are added to its gradient
    return rows * config.vocab_size * narrow + cast + (2 * WIDE * weight if trained else 0)
