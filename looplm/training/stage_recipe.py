"""What one stage of a run is, as its section of the recipe says it.

Tokens are positions, rows * seq_len, as the papers count them. Defaults are those of the papers where they
give one; what they leave open is said at the field and in docs/decisions.md.
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from looplm.data.recipe import DataRecipe
from looplm.model.lora import PROJECTIONS
from looplm.objectives.gate_loss import LabelShift
from looplm.strict import Strict

ActivationCheckpointing = Literal["none", "layer", "loop", "both"]
Decay = Annotated[float, Field(ge=0, lt=1)]


def _is_name(text: str) -> str:
    if not re.fullmatch(r"\w([\w .-]*[\w.-])?", text) or len(text) > 100 or len(text.encode()) > 200:
        shown = text if len(text) <= 40 else text[:37] + "..."
        raise ValueError(
            f"is {shown!r}; a name is made of letters, digits, underscores, spaces, dots and dashes, begins with a "
            "letter or digit, does not end with a space, and has at most 100 characters."
        )
    return text


Name = Annotated[str, AfterValidator(_is_name)]
Tokens = Annotated[int, Field(gt=0)]


class OptimizerRecipe(Strict):
    """AdamW (Ouro, table 1: betas, weight decay and clipping are the same in all its stages)."""

    lr: float = Field(gt=0)
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    """On matrices and embeddings; norms, biases and scalars are not decayed."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the whole gradient."""


class ScheduleRecipe(Strict):
    """Learning rate over a stage, as a share of the peak: a linear warmup, then constant, cosine or WSD."""

    kind: Literal["constant", "cosine", "wsd"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    final_share: float = Field(default=0.1, ge=0, le=1)
    """Share of the peak reached at the last step of a cosine or of WSD's decay."""
    decay_steps: int | None = Field(default=None, gt=0)
    """Last steps of WSD (warmup, stable, decay), over which the rate falls linearly."""

    @model_validator(mode="after")
    def _decay_is_wsd(self) -> "ScheduleRecipe":
        if (self.kind == "wsd") != (self.decay_steps is not None):
            raise ValueError("decay_steps belongs to kind: wsd, which needs it.")
        return self


class GeometricPrior(Strict):
    """P(loop r) proportional to (1 - stop)^(r-1) * stop over the R loops (Ouro, appendix A; PonderNet)."""

    kind: Literal["geometric"] = "geometric"
    stop: float = Field(gt=0, lt=1)


class ExpectedLossRecipe(Strict):
    """Stage I (Ouro, eq. 4): model and gate together."""

    kind: Literal["expected_loss"] = "expected_loss"
    beta: float = Field(ge=0)
    """Weight of the exit entropy, or of the divergence from `prior`."""
    smoothing: float = Field(default=0.0, ge=0, lt=1)
    """eps of the smoothed loss (Closing the Loop 4.2)."""
    prior: Literal["uniform"] | GeometricPrior = "uniform"
    gate_only: bool = False
    """Train the gate alone, the language model frozen: Stage II by Stage I's loss instead of by labels."""


class LastLoopRecipe(Strict):
    """The cross entropy after the last loop alone; the gate stays as it is, for Stage II to train."""

    kind: Literal["last_loop"] = "last_loop"


class GateLossRecipe(Strict):
    """Stage II (Ouro, eq. 5-6): the gate alone, language model frozen."""

    kind: Literal["gate_loss"] = "gate_loss"
    label_shift: LabelShift = "paper"


class RoutingRecipe(Strict):
    """Think-at-Hard's online mask with its depth curriculum (Closing the Loop, appendix J)."""

    kind: Literal["routing"] = "routing"
    phase_steps: int = Field(gt=0)
    """Steps of a phase of the curriculum; each phase allows one loop more, from one to num_loops."""
    gate_weight: float = Field(default=0.1, ge=0)
    """Weight of the gate's log likelihood of leaving at the loop a token is trained at; 0 for none."""


Objective = Annotated[
    ExpectedLossRecipe | LastLoopRecipe | GateLossRecipe | RoutingRecipe, Field(discriminator="kind")
]


def trains_gate_alone(objective: Objective) -> bool:
    """Whether the language model is frozen."""
    return isinstance(objective, GateLossRecipe) or (isinstance(objective, ExpectedLossRecipe) and objective.gate_only)


class UniformDepth(Strict):
    """A depth drawn evenly from `min` to `max`, anew at every step and alike on all ranks."""

    kind: Literal["uniform"] = "uniform"
    min: int = Field(gt=0)
    max: int = Field(gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> "UniformDepth":
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}.")
        return self


class PoissonLognormalDepth(Strict):
    """Huginn's heavy-tailed draw: Poisson(exp(N(ln mean - sigma^2 / 2, sigma))) + 1, at most `max` (2502.05171)."""

    kind: Literal["poisson_lognormal"] = "poisson_lognormal"
    mean: float = Field(gt=0)
    sigma: float = Field(default=0.5, ge=0)
    max: int = Field(gt=0)


DepthDraw = Annotated[UniformDepth | PoissonLognormalDepth, Field(discriminator="kind")]


class BatchRamp(Strict):
    """A batch that grows in equal increments: `increments` levels of equal length over `over_tokens`, then `end`.

    Ouro's stage 1a goes from 4M to 8M tokens and does not say how; this is our reading.
    """

    start: Tokens
    end: Tokens
    over_tokens: Tokens
    increments: int = Field(default=4, gt=0)

    @model_validator(mode="after")
    def _whole_increments(self) -> "BatchRamp":
        if self.end < self.start:
            raise ValueError(f"end {self.end} is below start {self.start}.")
        if (self.end - self.start) % self.increments:
            raise ValueError(f"{self.increments} increments do not divide {self.end} - {self.start} evenly.")
        return self


class UpcycleRecipe(Strict):
    """Layer duplication before the stage begins (Ouro's 2.6B: 24 layers to 48 at the start of stage 1b)."""

    num_layers: int = Field(gt=0)
    """Layers of the core afterwards, a multiple of those before."""
    order: Literal["stacked", "interleaved"] = "stacked"
    """1..L, 1..L or 1, 1, 2, 2, ...; Ouro does not say which."""


class DivergenceRecipe(Strict):
    """What happens to a step whose loss or gradient is not finite, or whose loss jumps."""

    on_nan: Literal["stop", "skip"] = "stop"
    on_spike: Literal["ignore", "warn", "skip", "stop"] = "warn"
    spike_sigmas: float = Field(default=6.0, gt=0)
    """A spike lies this many standard deviations above the mean loss of the last `window` steps."""
    window: int = Field(default=50, ge=8)
    max_skips: int = Field(default=10, gt=0)
    """Skipped steps in a row after which the run stops all the same."""


Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraRecipe(Strict):
    """Low-rank fine-tuning (Hu et al., 2106.09685): the stage trains corrections to projections that stay frozen."""

    rank: int = Field(gt=0)
    alpha: float = Field(default=32.0, gt=0)
    """The correction's scale is alpha / rank."""
    targets: tuple[Projection, ...] = Field(default=PROJECTIONS, min_length=1)
    """Projections that get one, in every layer."""
    also_train: tuple[str, ...] = ()
    """Names of other parameters to train, with wildcards ("early_exit_gate.*", "injection.*")."""
    per_loop: bool = False
    """One bank of corrections for each loop of the core (Closing the Loop, 4.4) instead of one that all loops share.
    Banks cannot be merged: they stay part of the model."""
    base: Literal["fp32", "bf16"] = "fp32"
    """What the frozen projections are held in. bf16 halves their memory and needs precision: bf16, which rounds them
    all the same; the merged model's are then those of the rounded base."""
    merge: bool = True
    """Write the merged model too; false leaves the adapter alone, for the last stage of a run."""

    @model_validator(mode="after")
    def _banks_are_whole(self) -> "LoraRecipe":
        if self.per_loop and (set(self.targets) != set(PROJECTIONS) or not self.merge):
            raise ValueError(
                "per_loop banks stand beside all projections and stay in the model: leave targets and merge out."
            )
        return self


class StageRecipe(Strict):
    """One stage of a run. Its length is one of `tokens`, `num_steps` and `epochs`."""

    name: Name
    """Names its files in the run directory."""
    tokens: Tokens | None = None
    """The stage ends with the first step that reaches them."""
    num_steps: int | None = Field(default=None, gt=0)
    """Optimizer steps."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the data, which must be finite."""
    seq_len: int = Field(gt=1)
    """S, tokens of a row."""
    batch_tokens: Tokens | BatchRamp
    """Tokens of an optimizer step, over all ranks and micro-batches: a multiple of seq_len * ranks."""
    objective: Objective
    optimizer: OptimizerRecipe
    schedule: ScheduleRecipe = ScheduleRecipe()
    num_loops: Annotated[int, Field(gt=0)] | DepthDraw | None = None
    """Loops of every forward, or how to draw them each step; None for the model's own num_loops."""
    backprop_loops: int | None = Field(default=None, gt=0)
    """The core carries gradient in its last so many loops only; None for all."""
    rope_theta: float | None = Field(default=None, gt=0)
    """RoPE base from this stage on; None leaves it."""
    data: DataRecipe | None = None
    """What is read; None where the caller hands over the rows himself."""
    freeze: tuple[str, ...] = ()
    """Names of parameters not to train, with wildcards ("embed_tokens.*"). Stage II freezes all but the gate."""
    lora: LoraRecipe | None = None
    """Train corrections only; the stage ends with the merged model, and the adapter alone beside it."""
    upcycle: UpcycleRecipe | None = None
    reset_optimizer: bool = False
    """Begin with fresh AdamW moments; otherwise those of the stage before go on, if it trained the same parameters."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs matrix products in bfloat16 under autocast; parameters and optimizer stay float32."""
    compile: bool = False
    """Compile each block (one graph for all loops)."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """What the backward pass runs again instead of keeping it: every layer, every loop, or both, a loop and then each
    of its layers once more: the least memory, and the core is run three times."""
    micro_batch_rows: int | None = Field(default=None, gt=0)
    """Rows of one forward on one device; None for as many as fit. Gradients add up to those of the whole batch."""
    log_every: int = Field(default=10, gt=0)
    """Steps between telemetry records; the first and the last step have one too."""
    divergence: DivergenceRecipe = DivergenceRecipe()

    @model_validator(mode="after")
    def _one_length(self) -> "StageRecipe":
        if sum(length is not None for length in (self.tokens, self.num_steps, self.epochs)) != 1:
            raise ValueError("give exactly one of tokens, num_steps and epochs.")
        return self

    @model_validator(mode="after")
    def _lora_has_a_use(self) -> "StageRecipe":
        if self.lora is not None and isinstance(self.objective, GateLossRecipe):
            raise ValueError("gate_loss trains the gate alone; a stage with lora needs another objective.")
        if self.lora is not None and self.lora.base == "bf16" and self.precision != "bf16":
            raise ValueError("lora.base: bf16 needs precision: bf16.")
        return self

    @model_validator(mode="after")
    def _whole_rows(self) -> "StageRecipe":
        ramp = self.batch_tokens
        for tokens in (ramp,) if isinstance(ramp, int) else batch_levels(ramp):
            if tokens % self.seq_len:
                raise ValueError(f"batch_tokens {tokens} is not a multiple of seq_len {self.seq_len}.")
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> "StageRecipe":
        schedule, num_steps = self.schedule, self.num_steps
        if num_steps is None:
            return self  # checked once the number of steps is known
        if schedule.warmup_steps > num_steps:
            raise ValueError(f"warmup_steps {schedule.warmup_steps} is longer than the stage ({num_steps}).")
        if schedule.warmup_steps + (schedule.decay_steps or 0) > num_steps:
            raise ValueError(
                f"warmup_steps {schedule.warmup_steps} and decay_steps {schedule.decay_steps} are longer than the "
                f"stage ({num_steps})."
            )
        return self

    @model_validator(mode="after")
    def _gate_has_a_choice(self) -> "StageRecipe":
        shallowest = self.num_loops.min if isinstance(self.num_loops, UniformDepth) else self.num_loops
        if isinstance(self.objective, GateLossRecipe) and isinstance(shallowest, int) and shallowest < 2:
            raise ValueError("gate_loss needs num_loops of 2 or more: after a single loop there is nothing to decide.")
        return self


def batch_levels(ramp: BatchRamp) -> list[int]:
    """Batch sizes of a ramp in their order, `end` included."""
    step = (ramp.end - ramp.start) // ramp.increments
    return [ramp.start + i * step for i in range(ramp.increments + 1)]
