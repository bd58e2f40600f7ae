"""What a training run is: a model, a tokenizer, and stages that follow one another, as one YAML file says it.

Tokens are positions, rows * seq_len, as the papers count them. Defaults are those of the papers where they
give one; what they leave open is said at the field and in docs/decisions.md.
"""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import Field, create_model, field_validator, model_validator

from looplm.data.recipe import DataRecipe
from looplm.model.config import LoopedConfig
from looplm.objectives.gate_loss import LabelShift
from looplm.strict import Strict

Decay = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[str, Field(pattern=r"^\w[\w .-]*$")]
Tokens = Annotated[int, Field(gt=0)]


# --- One stage ------------------------------------------------------------------------------------------------------


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


Objective = Annotated[ExpectedLossRecipe | GateLossRecipe | RoutingRecipe, Field(discriminator="kind")]


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
    upcycle: UpcycleRecipe | None = None
    reset_optimizer: bool = False
    """Begin with fresh AdamW moments; otherwise those of the stage before go on, if it trained the same parameters."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs matrix products in bfloat16 under autocast; parameters and optimizer stay float32."""
    compile: bool = False
    """Compile each block (one graph for all loops)."""
    activation_checkpointing: Literal["none", "layer", "loop"] = "none"
    """Recompute in the backward pass: inside every layer, or inside every loop."""
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


# --- The run --------------------------------------------------------------------------------------------------------

_TYPES = get_type_hints(LoopedConfig)


def _can_be_built(recipe: Any) -> Any:
    # The sizes left open are those of the tokenizer and the stages; they cannot make a shape impossible.
    fields = {name: value for name, value in recipe if value is not None}
    LoopedConfig(**{"vocab_size": 1, **fields})
    return recipe


if TYPE_CHECKING:
    ArchitectureRecipe = Any  # made below from the fields of another class
else:
    ArchitectureRecipe = create_model(
        "ArchitectureRecipe",
        __base__=Strict,
        __doc__="The fields of `LoopedConfig`; vocab_size may be left to the tokenizer, the context to the stages.",
        **{
            field.name: (_TYPES[field.name], ... if field.default is dataclasses.MISSING else field.default)
            for field in dataclasses.fields(LoopedConfig)
            if field.name not in ("vocab_size", "max_position_embeddings")
        },
        vocab_size=(int | None, None),
        max_position_embeddings=(int | None, None),
        __validators__={"can_be_built": model_validator(mode="after")(_can_be_built)},
    )


class StartingScales(Strict):
    """Sizes at the start, for models so small that the usual ones leave depth nothing to do (docs/log.md)."""

    embedding: float | None = Field(default=None, gt=0)
    """Standard deviation of the embeddings; None for initializer_range."""
    branch_norm: float = Field(default=1.0, gt=0)
    """Weight of the norm at the end of every residual branch (norm_placement: ouro)."""
    final_norm: float = Field(default=1.0, gt=0)


class NewModel(Strict):
    """A freshly initialised model."""

    kind: Literal["new"] = "new"
    architecture: ArchitectureRecipe
    scales: StartingScales = StartingScales()


class CheckpointModel(Strict):
    """A looped checkpoint to go on from."""

    kind: Literal["checkpoint"] = "checkpoint"
    path: str
    """A directory or a hub name."""
    architecture: ArchitectureRecipe | None = None
    """What it is known to be, so that a plan needs no checkpoint; checked against it when the run starts."""


class ConvertedModel(Strict):
    """A dense checkpoint, looped at the start of the run (`looplm convert` as part of the recipe)."""

    kind: Literal["convert"] = "convert"
    source: str
    """A directory, hub name or GGUF file of a Llama-type, Qwen2 or Qwen3 model."""
    architecture: ArchitectureRecipe
    """What the conversion must give: its loops, injection and LoRA rank, and the source's shape, so that a plan
    needs no weights."""
    core: Annotated[str, Field(pattern=r"^\d+:\d+$")] | None = None
    """Layers of the source that loop, "4:20"; None for all."""
    lora_from: Literal["zero", "svd"] = "zero"
    """Where LoRA banks start: at no change, or at what tying the source's layers loses."""
    start_depth: float | None = Field(default=None, ge=1)
    """Mean depth of the exit distribution at the start; None for the middle, (1 + R) / 2."""


Model = Annotated[NewModel | CheckpointModel | ConvertedModel, Field(discriminator="kind")]


class TrainTokenizer(Strict):
    """A byte-level BPE trained on the text of the first stage."""

    kind: Literal["train"] = "train"
    vocab_size: int = Field(gt=0)


class LoadTokenizer(Strict):
    """The tokenizer of a checkpoint directory or hub name."""

    kind: Literal["load"] = "load"
    path: str


Tokenizer = Annotated[TrainTokenizer | LoadTokenizer, Field(discriminator="kind")]


class EvaluationRecipe(Strict):
    """Held-out loss at every depth during the run, also beyond the trained one."""

    every: int = Field(gt=0)
    """Steps; the last step of a stage is evaluated too."""
    max_loops: int | None = Field(default=None, gt=0)
    """Deepest loop measured; None for two beyond the model's."""
    max_tokens: int = Field(default=100_000, gt=0)
    seq_len: int | None = Field(default=None, gt=1)
    """Longest window; None for the stage's."""
    batch_rows: int = Field(default=8, gt=0)
    data: DataRecipe | None = None
    """What is measured on; None for what the stage's own data leave out (sources with `part: train`)."""


class CheckpointsRecipe(Strict):
    """When the whole state is saved for resuming, and what is kept of it."""

    every: int | None = Field(default=None, gt=0)
    """Steps; the end of a stage and an interruption save too. None for only these."""
    keep_last: int = Field(default=2, gt=0)
    keep_best: bool = True
    """Keep, beside the last ones, the one with the lowest held-out loss at the model's depth."""
    asynchronous: bool = True
    """Copy to memory and write while training goes on."""


class WandbRecipe(Strict):
    """Weights & Biases as a tracker (pip install 'looplm[wandb]')."""

    project: str
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"


class TelemetryRecipe(Strict):
    """Where a run's figures go beside telemetry.jsonl."""

    tensorboard: bool = True
    wandb: WandbRecipe | None = None
    state_gradients_every: int | None = Field(default=None, gt=0)
    """Steps between measurements of the gradient norm entering each (loop, layer); None for never."""


RUN_DIRECTORY = ("recipe.yaml", "telemetry.jsonl", "tensorboard", "wandb", "checkpoints", "tokenizer", "tokens")
"""What a run directory holds beside one checkpoint directory a stage."""


class RunRecipe(Strict):
    """A whole run, as a recipe file holds it."""

    name: Name
    seed: int = Field(default=0, ge=0)
    model: Model
    tokenizer: Tokenizer
    stages: tuple[StageRecipe, ...] = Field(min_length=1)
    evaluation: EvaluationRecipe | None = None
    checkpoints: CheckpointsRecipe = CheckpointsRecipe()
    telemetry: TelemetryRecipe = TelemetryRecipe()
    data_workers: Literal[0, 1] = 0
    """Processes beside the trainer that read and tokenise."""
    data_cache: str | None = None
    """Directory of tokenised data, for several runs to share; None for the run directory's own."""

    @field_validator("stages")
    @classmethod
    def _names_differ(cls, stages: tuple[StageRecipe, ...]) -> tuple[StageRecipe, ...]:
        names = [stage.name for stage in stages]
        if len(set(names)) != len(names):
            raise ValueError(f"two stages have the same name ({', '.join(names)}).")
        if taken := set(names) & set(RUN_DIRECTORY):
            raise ValueError(f"a stage cannot be called {taken.pop()}: the run directory uses that name itself.")
        for stage in stages:
            if stage.data is None:
                raise ValueError(f"stage {stage.name} has no data.")
        return stages
