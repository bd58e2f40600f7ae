"""What a training stage is: pydantic models, so that an unknown key or impossible value is an error, not a default."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from looplm.objectives.gate_loss import LabelShift


class Strict(BaseModel):
    """Base of every recipe: unknown keys, infinities and NaN are errors, values do not change after construction."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Decay = Annotated[float, Field(ge=0, lt=1)]


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
    """Learning rate over a stage, as a share of the peak: a linear warmup, then constant or cosine."""

    kind: Literal["constant", "cosine"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    final_share: float = Field(default=0.1, ge=0, le=1)
    """Share of the peak reached at the last step of a cosine."""


class ExpectedLossRecipe(Strict):
    """Stage I (Ouro, eq. 4): model and gate together."""

    kind: Literal["expected_loss"] = "expected_loss"
    beta: float = Field(ge=0)
    """Weight of the exit entropy."""
    smoothing: float = Field(default=0.0, ge=0, lt=1)
    """eps of the smoothed loss (Closing the Loop 4.2)."""


class GateLossRecipe(Strict):
    """Stage II (Ouro, eq. 5-6): the gate alone, language model frozen."""

    kind: Literal["gate_loss"] = "gate_loss"
    label_shift: LabelShift = "paper"


Objective = Annotated[ExpectedLossRecipe | GateLossRecipe, Field(discriminator="kind")]


class StageRecipe(Strict):
    """One stage of a run."""

    name: str = Field(pattern=r"^\w[\w .-]*$")
    """Names its files in the run directory."""
    num_steps: int = Field(gt=0)
    """Optimizer steps."""
    objective: Objective
    optimizer: OptimizerRecipe
    schedule: ScheduleRecipe = ScheduleRecipe()
    num_loops: int = Field(gt=0)
    """Loops of every forward."""
    micro_batches: int = Field(default=1, gt=0)
    """Batches drawn from the data for one step; their gradients add up to that of one large batch."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs matrix products in bfloat16 under autocast; parameters and optimizer stay float32."""
    compile: bool = False
    """Compile each block (one graph for all loops)."""
    log_every: int = Field(default=10, gt=0)
    """Steps between telemetry records; the first and the last step have one too."""
    checkpoint_every: int | None = Field(default=None, gt=0)
    """Steps between resumable checkpoints; None for none."""

    @model_validator(mode="after")
    def _warmup_fits(self) -> "StageRecipe":
        if self.schedule.warmup_steps > self.num_steps:
            raise ValueError(f"warmup_steps {self.schedule.warmup_steps} is longer than the stage ({self.num_steps}).")
        return self

    @model_validator(mode="after")
    def _gate_has_a_choice(self) -> "StageRecipe":
        if isinstance(self.objective, GateLossRecipe) and self.num_loops < 2:
            raise ValueError("gate_loss needs num_loops of 2 or more: after a single loop there is nothing to decide.")
        return self
