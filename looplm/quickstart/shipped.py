"""The checkpoint that ships with the package, and the log of its training that lies beside it."""

from importlib import resources
from pathlib import Path

from looplm.evaluation.exit_curve import GateStatistics
from looplm.quickstart.plan import SHIPPED
from looplm.report.schema import TrainingPoint
from looplm.strict import Strict
from looplm.training.telemetry import Record
from looplm.training.text_model import TextRecipe

LOG_FILE = "training.json"


class TrainingLog(Strict):
    """What training.json holds: recipe, cost, and how it went."""

    recipe: TextRecipe
    training_tokens: int
    """Tokens trained on in Stage I."""
    stage_one_seconds: float
    stage_two_seconds: float
    machine: str
    stage_one_gate: GateStatistics
    """Held-out statistics of the gate before Stage II."""
    training: tuple[TrainingPoint, ...]


def shipped_directory() -> Path:
    """Where the shipped checkpoint lies, whatever folders the user has."""
    return Path(str(resources.files("looplm"))) / "checkpoints" / SHIPPED


def read_training_log() -> TrainingLog:
    """The log of the shipped checkpoint."""
    return TrainingLog.model_validate_json((shipped_directory() / LOG_FILE).read_text(encoding="utf-8"))


def training_points(records: list[Record], stage: str, most: int = 200) -> tuple[TrainingPoint, ...]:
    """The records of one stage as report points: at most `most`, evenly thinned, to four decimals."""
    chosen = [r for r in records if r.stage == stage]
    every = max(1, -(-len(chosen) // most))
    return tuple(
        TrainingPoint(
            step=r.step,
            loss_nats=tuple(round(loss, 4) for loss in r.loop_losses),
            exit_pdf=tuple(round(share, 4) for share in r.exit_pdf),
        )
        for r in chosen[::every]
    )
