"""What a looped model costs: parameters, training and inference FLOPs, cache bytes. Arithmetic only, no torch.

The convention is that of "Closing the Loop" (arXiv 2610.00673, Appendix I): a token costs two FLOPs per parameter
it passes, forward, and four more backward; a layer's parameters are charged at every loop that applies it, and so is
the LM head wherever it is read. The embedding lookup, the final norm, the exit gate and the scalar injection are
free (next to a billion parameters, a few thousand). Attention scores are left out unless a context length is given.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from looplm.model.config import LoopedConfig

CacheStrategy = Literal["per_loop", "fill", "last", "mean", "first"]

_LAYER_NORMS: Mapping[str, tuple[str, ...]] = {
    "ouro": ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"),
    "sandwich": ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"),
    "pre": ("input_layernorm", "post_attention_layernorm"),
    "post": ("input_layernorm_2", "post_attention_layernorm_2"),
    "magic": (),
}


# --- Parameters -------------------------------------------------------------------------------------------------


def parameter_shapes(config: LoopedConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of this config stores, in Ouro's names (arXiv 2510.25741).

    A tied LM head is the embedding and is not listed.
    """
    return {name: shape for group in _shapes_by_group(config).values() for name, shape in group.items()}


def _shapes_by_group(config: LoopedConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    hidden, vocab = config.hidden_size, config.vocab_size
    norms: dict[str, tuple[int, ...]] = {}
    if config.final_norm == "rms":
        norms["model.norm.weight"] = (hidden,)
        if config.num_coda_layers:
            norms["model.coda_norm.weight"] = (hidden,)
    return {
        "embedding": {"model.embed_tokens.weight": (vocab, hidden)},
        "prelude": _stack_shapes(config, "model.prelude", config.num_prelude_layers),
        "core": _stack_shapes(config, "model.layers", config.num_hidden_layers),
        "coda": _stack_shapes(config, "model.coda", config.num_coda_layers),
        "norms": norms,
        "gate": {"model.early_exit_gate.weight": (1, hidden), "model.early_exit_gate.bias": (1,)},
        "injection": _injection_shapes(config),
        "lora": _lora_shapes(config),
        "head": {} if config.tie_word_embeddings else {"lm_head.weight": (vocab, hidden)},
    }


def _projections(config: LoopedConfig) -> dict[str, tuple[int, int, bool]]:
    """Path inside a layer -> (output features, input features, has a bias)."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    return {
        "self_attn.q_proj": (query, hidden, config.attention_bias),
        "self_attn.k_proj": (key, hidden, config.attention_bias),
        "self_attn.v_proj": (key, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, query, config.attention_output_bias),
        "mlp.gate_proj": (ffn, hidden, config.mlp_bias),
        "mlp.up_proj": (ffn, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, ffn, config.mlp_bias),
    }


def _stack_shapes(config: LoopedConfig, prefix: str, num_layers: int) -> dict[str, tuple[int, ...]]:
    layer: dict[str, tuple[int, ...]] = {
        f"{norm}.weight": (config.hidden_size,) for norm in _LAYER_NORMS[config.norm_placement]
    }
    for path, (out_features, in_features, has_bias) in _projections(config).items():
        layer[f"{path}.weight"] = (out_features, in_features)
        if has_bias:
            layer[f"{path}.bias"] = (out_features,)
    if config.qk_norm:
        layer["self_attn.q_norm.weight"] = (config.head_dim,)
        layer["self_attn.k_norm.weight"] = (config.head_dim,)
    return {f"{prefix}.{idx}.{name}": shape for idx in range(num_layers) for name, shape in layer.items()}


def _injection_shapes(config: LoopedConfig) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    if config.injection == "scalar":
        return {"model.injection.logit": (1,), "model.injection.norm.weight": (hidden,)}
    if not config.injection.startswith("concat"):
        return {}
    one = {"proj.weight": (hidden, 2 * hidden)}
    if config.injection == "concat_norm":
        one |= {"state_norm.weight": (hidden,), "embeds_norm.weight": (hidden,)}
    layers = [f"layers.{i}." for i in range(config.num_hidden_layers)] if config.injection == "concat_layers" else [""]
    return {f"model.injection.{layer}{name}": shape for layer in layers for name, shape in one.items()}


def _lora_shapes(config: LoopedConfig) -> dict[str, tuple[int, ...]]:
    rank, loops = config.lora_rank, config.num_loops
    shapes: dict[str, tuple[int, ...]] = {}
    if rank == 0:
        return shapes
    for idx in range(config.num_hidden_layers):
        for path, (out_features, in_features, _) in _projections(config).items():
            bank = f"model.lora.{idx}.{path.rsplit('.', 1)[1]}"
            shapes[f"{bank}.a"] = (loops, rank, in_features)
            shapes[f"{bank}.b"] = (loops, out_features, rank)
    return shapes


@dataclass(kw_only=True, frozen=True)
class ParameterCount:
    """Number of parameters, in groups that do not overlap and sum to `total`."""

    embedding: int
    prelude: int
    """Prelude layers, their norms included."""
    core: int
    """The layers that loop, their norms included; LoRA banks apart."""
    coda: int
    """Coda layers, their norms included."""
    norms: int
    """The final norm, and the coda's."""
    gate: int
    injection: int
    lora: int
    """The LoRA banks of all loops together."""
    head: int
    """The LM head; 0 when it is the embedding."""
    total: int
    """Every stored parameter once: a tied head is counted with the embedding."""
    total_separate_head: int
    """The same with V * D for a head of its own, tied or not (how "Closing the Loop" counts Qwen3)."""
    num_tensors: int
    """Stored tensors."""

    @property
    def total_without_gate(self) -> int:
        """Parameters of the dense model with the same layers, which has no exit gate to store."""
        return self.total - self.gate


def count_parameters(config: LoopedConfig) -> ParameterCount:
    """Count the parameters of `config` group by group, from the shapes of :func:`parameter_shapes`."""
    shapes = _shapes_by_group(config)
    sizes = {name: sum(math.prod(shape) for shape in group.values()) for name, group in shapes.items()}
    total = sum(sizes.values())
    return ParameterCount(
        **sizes,
        total=total,
        total_separate_head=total + config.vocab_size * config.hidden_size - sizes["head"],
        num_tensors=sum(len(group) for group in shapes.values()),
    )


# --- FLOPs ------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, frozen=True)
class _PassWeights:
    """Parameters that one token is multiplied with, by how often."""

    once: int
    """The prelude."""
    loop: int
    """At each loop: the core, and the one LoRA bank that is this loop's own."""
    between: int
    """At each loop but the first: a concat injection."""
    readout: int
    """At each state that is read out: the coda and the LM head."""


def _pass_weights(config: LoopedConfig) -> _PassWeights:
    count = count_parameters(config)
    return _PassWeights(
        once=count.prelude,
        loop=count.core + count.lora // config.num_loops,
        between=count.injection if config.injection.startswith("concat") else 0,
        readout=count.coda + config.vocab_size * config.hidden_size,
    )


def _score_flops(config: LoopedConfig) -> int:
    """FLOPs of one layer per query and key it reads: 2 H d for the scores, 2 H d for the weighted sum of values."""
    return 4 * config.num_attention_heads * config.head_dim


def training_flops(
    config: LoopedConfig, num_tokens: int, num_loops: int | None = None, *, seq_len: int | None = None
) -> int:
    """FLOPs to train on `num_tokens` tokens, forward and backward, every loop unrolled and read by the head.

    C = 6 * tokens * R * (N_layers + N_head), as in "Closing the Loop" (arXiv 2610.00673, Appendix I). N_layers holds
    all parameters of the core, norms included; beyond the paper, the prelude is added once, one LoRA bank and the
    coda at every loop, and a concat injection from loop 2 on. Recomputed activations are not counted.

    `num_loops` is R unless given. With `seq_len`, causal attention over sequences of that many tokens is added: a
    query reads (seq_len + 1) / 2 keys on average. Raises ValueError when a number is out of range.
    """
    loops = config.num_loops if num_loops is None else num_loops
    if loops < 1:
        raise ValueError(f"num_loops is {loops}; a token passes at least one loop.")
    if num_tokens < 0:
        raise ValueError(f"num_tokens is {num_tokens}; it must not be negative.")
    if seq_len is not None and seq_len < 1:
        raise ValueError(f"seq_len is {seq_len}; a sequence holds at least one token.")
    weights = _pass_weights(config)
    passed = weights.once + loops * (weights.loop + weights.readout) + (loops - 1) * weights.between
    flops = 6 * num_tokens * passed
    if seq_len is not None:
        # Three times the forward's 4 H d (S + 1) / 2; the factor 4 makes the division exact.
        layer_passes = config.num_prelude_layers + loops * (config.num_hidden_layers + config.num_coda_layers)
        flops += num_tokens * layer_passes * (3 * _score_flops(config) * (seq_len + 1) // 2)
    return flops


def inference_flops(
    config: LoopedConfig, expected_loops: int | float, heads: int | float = 1, context: int | float = 0
) -> float:
    """FLOPs of one token that runs `expected_loops` loops: 2 * (loops * N_layers + heads * N_head).

    The form of "Closing the Loop" (arXiv 2610.00673, Appendix I); beyond the paper, the prelude is passed once, the
    coda at every readout, one LoRA bank per loop and a concat injection from loop 2 on. The cost is linear in the
    loops, so an average depth gives the average cost. Count the loops that are computed (token-loops), not those
    that are claimed: under the exact `per_loop` cache a token that leaves early is caught up later.

    `heads` is how often the LM head is read: once for policies that decide by gate or state, once per loop for those
    that look at the logits. `context` is the number of keys a query reads, itself included; 0 leaves attention
    scores out. Raises ValueError when a number is out of range.
    """
    if not 1 <= expected_loops < math.inf:
        raise ValueError(f"expected_loops is {expected_loops}; a token passes at least one loop.")
    if not (0 <= heads < math.inf and 0 <= context < math.inf):
        raise ValueError(f"heads is {heads} and context {context}; both must be finite and not negative.")
    weights = _pass_weights(config)
    passed = weights.once + expected_loops * weights.loop + (expected_loops - 1) * weights.between
    layer_passes = (
        config.num_prelude_layers + expected_loops * config.num_hidden_layers + heads * config.num_coda_layers
    )
    return float(2 * (passed + heads * weights.readout) + layer_passes * context * _score_flops(config))


def expected_inference_flops(
    config: LoopedConfig, exit_pdf: Sequence[float], *, head_every_loop: bool = False, context: int | float = 0
) -> float:
    """Mean FLOPs of a token whose depth is drawn from `exit_pdf`: probability of leaving after loop 1, 2, ...

    `head_every_loop` is for policies that compare the logits of successive loops (`ConfidenceExit`): they pay the
    LM head at each. `context` as in :func:`inference_flops`. Raises ValueError when `exit_pdf` is not a distribution.
    """
    total = math.fsum(exit_pdf)
    if not all(p >= 0 for p in exit_pdf) or not math.isclose(total, 1, abs_tol=1e-4):
        raise ValueError(f"exit_pdf must hold probabilities that sum to 1; it sums to {total} over {len(exit_pdf)}.")
    # Dividing by the total takes out float32 rounding, which could leave the mean a hair below one loop.
    expected_loops = max(1.0, math.fsum(loops * p for loops, p in enumerate(exit_pdf, start=1)) / total)
    return inference_flops(config, expected_loops, expected_loops if head_every_loop else 1, context)


# --- Cache ------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, frozen=True)
class CacheBytes:
    """Bytes of keys and values per token of context."""

    decode: int
    """Held for every position once the prompt is in."""
    prefill_peak: int
    """Held for every prompt position while it is read: `mean` and `first` keep a second set beside the loop's own."""


def cache_bytes_per_token(
    config: LoopedConfig, strategy: CacheStrategy, *, dtype_bytes: int = 2, num_loops: int | None = None
) -> CacheBytes:
    """Key and value bytes one position takes: 2 K d elements per layer and kept set; the prelude runs once.

    `per_loop` and `fill` keep one set per loop, R in all, and so for the coda, which reads earlier positions at its
    own loop (`looplm.model.cache`). `last`, `mean` and `first` keep one set, 1/R of that; the coda then runs on the
    state that is read out, once. `dtype_bytes` is the size of an element: 2 for bfloat16. `num_loops` is R unless
    given. Raises ValueError for an unknown strategy or a number below 1.
    """
    loops = config.num_loops if num_loops is None else num_loops
    if strategy not in get_args(CacheStrategy):
        raise ValueError(f"cache strategy is {strategy!r}; choose one of {', '.join(get_args(CacheStrategy))}.")
    if loops < 1 or dtype_bytes < 1:
        raise ValueError(f"num_loops is {loops} and dtype_bytes {dtype_bytes}; both must be at least 1.")
    prelude, core, coda = config.num_prelude_layers, config.num_hidden_layers, config.num_coda_layers
    if strategy in ("per_loop", "fill"):
        decode_layers = prefill_layers = prelude + loops * (core + coda)
    else:
        prefill_sets = 1 if strategy == "last" else min(2, loops)
        decode_layers, prefill_layers = prelude + core + coda, prelude + prefill_sets * core + coda
    per_layer = 2 * config.num_key_value_heads * config.head_dim * dtype_bytes
    return CacheBytes(decode=per_layer * decode_layers, prefill_peak=per_layer * prefill_layers)


# --- Report -----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, frozen=True)
class DepthCost:
    """FLOPs per generated token at one depth."""

    num_loops: int
    effective_depth: int
    """Layers the token passes."""
    flops: float
    """One readout: fixed depth, and exits decided by the gate or by the change of the state."""
    flops_head_every_loop: float
    """A readout at each loop: exits decided by the logits."""
    flops_full_context: float
    """`flops` plus attention scores over a full context."""


@dataclass(kw_only=True, frozen=True)
class StrategyCost:
    """Cache memory of one strategy."""

    bytes_per_token: CacheBytes
    bytes_full_context: CacheBytes
    """The same for `max_position_embeddings` tokens."""


@dataclass(kw_only=True, frozen=True)
class CostReport:
    """Everything `looplm info` prints about a config; `dataclasses.asdict` turns it into plain JSON values."""

    num_loops: int
    max_position_embeddings: int
    dtype_bytes: int
    parameters: ParameterCount
    training_flops_per_token: int
    """All R loops, without attention scores."""
    depths: tuple[DepthCost, ...]
    """Depths 1 to R."""
    cache: dict[CacheStrategy, StrategyCost]


def describe(config: LoopedConfig, *, dtype_bytes: int = 2) -> CostReport:
    """Work out the whole cost sheet of `config`, with a cache of `dtype_bytes` per element (2 for bfloat16)."""
    window = config.max_position_embeddings
    depths = tuple(
        DepthCost(
            num_loops=loops,
            effective_depth=config.effective_depth(loops),
            flops=inference_flops(config, loops),
            flops_head_every_loop=inference_flops(config, loops, heads=loops),
            flops_full_context=inference_flops(config, loops, context=window),
        )
        for loops in range(1, config.num_loops + 1)
    )
    cache: dict[CacheStrategy, StrategyCost] = {}
    for strategy in get_args(CacheStrategy):
        per_token = cache_bytes_per_token(config, strategy, dtype_bytes=dtype_bytes)
        full = CacheBytes(decode=per_token.decode * window, prefill_peak=per_token.prefill_peak * window)
        cache[strategy] = StrategyCost(bytes_per_token=per_token, bytes_full_context=full)
    return CostReport(
        num_loops=config.num_loops,
        max_position_embeddings=window,
        dtype_bytes=dtype_bytes,
        parameters=count_parameters(config),
        training_flops_per_token=training_flops(config, 1),
        depths=depths,
        cache=cache,
    )
