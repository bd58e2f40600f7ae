"""The architecture of a looped language model, as one frozen, validated dataclass."""

import sys
from dataclasses import dataclass
from typing import Literal, get_args

from looplm.errors import UserError

NormPlacement = Literal["ouro", "pre", "post", "sandwich", "magic"]
FinalNorm = Literal["rms", "frms", "none"]
LoopState = Literal["normed", "raw"]
Injection = Literal["none", "scalar", "add", "concat", "concat_random", "concat_norm", "concat_layers"]
CodaInput = Literal["normed", "raw"]
RopeType = Literal["linear", "llama3", "yarn"]

MOST_LAYERS = 10_000
"""Most layers of each kind, and most loops: far beyond any model, so that a damaged config fails at once."""

DEEPEST = 100_000
"""Most layers a token may pass. The cost sheet goes through them one by one."""


@dataclass(kw_only=True, frozen=True)
class RopeScaling:
    """How rotary frequencies were changed to lengthen the context, as in `rope_scaling` of a Hugging Face config.

    linear divides every frequency by `factor` (2306.15595); llama3 the low ones, with a smooth transition
    (Llama 3.1); yarn those that turn seldom, and scales cosine and sine (2309.00071).
    """

    rope_type: RopeType
    factor: float
    original_max_position_embeddings: int | None = None
    """Context before the scaling; llama3 and yarn need it."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original context / this are divided by the whole factor."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original context / this are left."""
    beta_fast: float = 32.0
    """yarn: a frequency that turns this often over the original context, or more, is left."""
    beta_slow: float = 1.0
    """yarn: one that turns less often than this is divided by the whole factor."""
    truncate: bool = True
    """yarn: whether the two bounds are rounded outwards to whole dimensions."""
    attention_factor: float = 1.0
    """yarn: scale of cosine and sine."""

    def __post_init__(self) -> None:
        if self.rope_type not in get_args(RopeType):
            raise UserError(f"rope_type is {self.rope_type!r}; choose one of {', '.join(get_args(RopeType))}.")
        numbers = "factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor"
        for name in numbers.split():
            if not 0 < getattr(self, name) <= sys.float_info.max:
                raise UserError(f"{name} of position_scaling is {getattr(self, name)!r}; it must be positive.")
        if self.rope_type != "linear" and not (self.original_max_position_embeddings or 0) > 0:
            raise UserError(f"{self.rope_type} position_scaling needs original_max_position_embeddings.")
        if self.low_freq_factor >= self.high_freq_factor:
            raise UserError("low_freq_factor of position_scaling must be below high_freq_factor.")


@dataclass(kw_only=True, frozen=True)
class LoopedConfig:
    """Shape and wiring of a :class:`~looplm.model.looped.LoopedTransformer`.

    Field names follow the Hugging Face convention where one exists. Raises ``UserError`` on
    construction when a value is impossible; every message says which field and what is allowed.
    """

    vocab_size: int
    """V, rows of the embedding."""
    hidden_size: int
    """D."""
    intermediate_size: int
    """Width of the SwiGLU feed-forward."""
    num_hidden_layers: int
    """L, layers of the core: the stack that is applied `num_loops` times."""
    num_attention_heads: int
    """H."""
    num_key_value_heads: int
    """K; divides H."""
    head_dim: int
    """d."""
    num_loops: int = 4
    """R, the depth the model was trained for; a call may ask for another one."""
    num_prelude_layers: int = 0
    """Layers run once, before the first loop (Huginn's prelude)."""
    num_coda_layers: int = 0
    """Layers between a loop that is read out and the LM head; generation runs them once a token (Huginn's coda)."""
    norm_placement: NormPlacement = "ouro"
    """ouro: x + N2(F(N1 x)); pre: x + F(N x); post: N(x + F x); sandwich: N2(x + F(N1 x));
    magic: pre with parameter-free norms, and one more at the exit of the core (HRM-Text; Closing the Loop 3.3)."""
    final_norm: FinalNorm = "rms"
    """Norm after every loop: rms, frms (no learned scale) or none."""
    loop_state: LoopState = "normed"
    """What the next loop reads: the normed state (Ouro) or the raw one. Gate and head always read the normed one."""
    coda_input: CodaInput = "normed"
    """What the coda reads: the normed state, or the raw one, as the last layers of a dense model do."""
    injection: Injection = "none"
    """How the input embedding e enters loops 2..R: scalar w e + (1 - w) N(h); add h + e; concat W [h; e], W starting
    at [I, 0]; concat_random W anywhere; concat_norm with a norm on each before; concat_layers before every layer."""
    lora_rank: int = 0
    """Rank of the per-loop LoRA banks on q, k, v, o, gate, up and down; 0 for none."""
    lora_alpha: float = 32.0
    """LoRA scale is alpha / rank."""
    attention_bias: bool = False
    """Bias on q, k and v (Qwen2)."""
    attention_output_bias: bool = False
    """Bias on o (Llama's attention_bias sets both)."""
    mlp_bias: bool = False
    """Bias on gate, up and down."""
    qk_norm: bool = False
    """RMSNorm over each head of q and k, before RoPE (Qwen3)."""
    tie_word_embeddings: bool = False
    """Whether the LM head is the embedding matrix."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    position_scaling: RopeScaling | None = None
    """Scaled rotary frequencies; None for plain ones."""
    max_position_embeddings: int = 4096
    """Longest context, tokens."""
    initializer_range: float = 0.02
    """Standard deviation of every weight matrix at the start."""

    def __post_init__(self) -> None:
        positive = (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
            "head_dim num_loops max_position_embeddings rms_norm_eps rope_theta lora_alpha"
        )
        for name in positive.split():
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)!r}; it must be positive.")
        for name in ("num_prelude_layers", "num_coda_layers", "lora_rank", "initializer_range"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name} is {getattr(self, name)!r}; it must not be negative.")
        for name in ("num_hidden_layers", "num_prelude_layers", "num_coda_layers", "num_loops"):
            if getattr(self, name) > MOST_LAYERS:
                raise UserError(f"{name} is {getattr(self, name)}; looplm builds models with up to {MOST_LAYERS:,}.")
        if self.effective_depth() > DEEPEST:
            raise UserError(
                f"num_loops {self.num_loops} times num_hidden_layers {self.num_hidden_layers} makes a depth of "
                f"{self.effective_depth():,} layers; looplm builds models of up to {DEEPEST:,}."
            )
        for name in ("rms_norm_eps", "rope_theta", "lora_alpha", "initializer_range"):
            if getattr(self, name) > sys.float_info.max:  # also an integer that no float can hold
                raise UserError(f"{name} must be finite.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}."
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim is {self.head_dim}; rotary embeddings need an even one.")
        for name, allowed in (
            ("norm_placement", NormPlacement),
            ("final_norm", FinalNorm),
            ("loop_state", LoopState),
            ("coda_input", CodaInput),
            ("injection", Injection),
        ):
            if getattr(self, name) not in get_args(allowed):
                raise UserError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(get_args(allowed))}.")

    @property
    def num_layers(self) -> int:
        """Layers with their own weights: prelude, core and coda."""
        return self.num_prelude_layers + self.num_hidden_layers + self.num_coda_layers

    def effective_depth(self, num_loops: int | None = None) -> int:
        """Layers a token passes at `num_loops` loops (R when None): prelude + R * core + coda."""
        loops = self.num_loops if num_loops is None else num_loops
        return self.num_prelude_layers + loops * self.num_hidden_layers + self.num_coda_layers
