"""What a quickstart report holds: the content of `report.json`, units in the names. Depths count loops from 1.

The figures of the evaluation stand in here as that package's own dataclasses, so a number has one name everywhere.
"""

from pydantic import BaseModel, ConfigDict

from looplm.evaluation.bootstrap import Interval
from looplm.evaluation.depth_quality import DepthQuality
from looplm.evaluation.depth_sweep import DepthSweep
from looplm.evaluation.exit_curve import ExitPoint, GateStatistics
from looplm.evaluation.groups import GroupPoint
from looplm.lab.task_evaluation import TaskExit
from looplm.model.flops import CacheStrategy


class ReportPart(BaseModel):
    """Base of all parts: immutable, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TrainingPoint(ReportPart):
    """One logged optimizer step."""

    step: int
    loss_nats: tuple[float, ...]
    """Mean cross entropy of a token at loop 1, 2, ..., R."""
    exit_pdf: tuple[float, ...]
    """Mean exit probability of loop 1, 2, ..., R."""


class CacheRow(ReportPart):
    """Keys and values per token of context under one strategy."""

    strategy: CacheStrategy
    decode_bytes_per_token: int
    prefill_peak_bytes_per_token: int


class SampleToken(ReportPart):
    """One generated token."""

    text: str
    exit_loops: int
    """Loop it was read out at."""
    token_loops: int
    """Loops computed for its position in the end."""


class Sample(ReportPart):
    """One generated text."""

    prompt: str
    exit_threshold: float
    tokens: tuple[SampleToken, ...]
    weight_passes: int
    """Applications of the core to generate it, as the engine counted them; reading the prompt is not included."""


class Twin(ReportPart):
    """The one-loop model trained beside a looped one: same shape, same tokens, R times fewer FLOPs."""

    num_parameters: int
    training_tokens: int
    training_seconds: float
    sweep: DepthSweep
    difference_bits_per_byte: Interval
    """The looped model at its trained depth less the twin at one loop, on the same documents."""


class TextModel(ReportPart):
    """A model of text, measured on held-out documents."""

    name: str
    description: str
    """A sentence or two: where it comes from, how it was trained."""
    num_parameters: int
    training_tokens: int
    training_seconds: float
    sweep: DepthSweep
    stage_one_gate: GateStatistics
    """The gate as the expected loss left it."""
    gate: GateStatistics
    """The gate as it is now, after Stage II."""
    curve: tuple[ExitPoint, ...]
    """Thresholds that cover the range of depths; for the plots."""
    thresholds: tuple[ExitPoint, ...]
    """Round thresholds; for the table."""
    quality: DepthQuality
    cache_dtype: str
    cache: tuple[CacheRow, ...]
    training: tuple[TrainingPoint, ...] = ()
    twin: Twin | None = None
    sample: Sample | None = None


class FoldModel(ReportPart):
    """A model of the fold task: k + 1 digits folded from the left through a fixed random 10 x 10 table."""

    description: str
    num_parameters: int
    training_steps: int
    training_seconds: float
    trained_loops: int
    groups: tuple[GroupPoint, ...]
    """Accuracy and depth by k, on held-out expressions."""
    gate: GateStatistics
    exits: tuple[TaskExit, ...]
    """Accuracy and mean loops by k, with every answer read out where its gate says."""
    twin_accuracy: tuple[float, ...]
    """By k, of a one-loop twin trained for the same steps."""
    training: tuple[TrainingPoint, ...] = ()


class Phase(ReportPart):
    """A part of the run and the time it took."""

    name: str
    seconds: float


class Machine(ReportPart):
    """What the run ran on."""

    looplm_version: str
    torch_version: str
    python_version: str
    platform: str
    num_threads: int


class Command(ReportPart):
    """A command to try next."""

    command: str
    explanation: str


class QuickstartReport(ReportPart):
    """Everything `report.json` holds and `report.html` shows."""

    shipped: TextModel
    trained: TextModel
    fold: FoldModel
    machine: Machine
    phases: tuple[Phase, ...]
    next_commands: tuple[Command, ...]
    smoke: bool = False
    """A run of `--smoke`, whose models are too small and too briefly trained to judge anything by."""
