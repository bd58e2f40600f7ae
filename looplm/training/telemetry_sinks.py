"""Trackers: TensorBoard, which ships with looplm, and Weights & Biases, which does not."""

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from looplm.errors import UserError
from looplm.training.recipe import WandbRecipe


class TensorBoardSink:
    """Events under `directory`, a folder a stage: TensorBoard shows each stage as a run of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writers: dict[str, SummaryWriter] = {}

    def log(self, stage: str, step: int, named: dict[str, float]) -> None:
        """A point on every curve."""
        if stage not in self._writers:
            # What an earlier process told from this step on, and a resumed one tells again, is to be forgotten.
            self._writers[stage] = SummaryWriter(str(self._directory / stage), purge_step=step)
        for name, value in named.items():
            self._writers[stage].add_scalar(name, value, step)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}


class WandbSink:
    """One Weights & Biases run for all stages, each with its own step axis; resuming the run directory goes on in it.

    Raises UserError when the package is missing or the run cannot be opened.
    """

    def __init__(self, recipe: WandbRecipe, run_dir: Path, run_config: dict[str, Any]) -> None:
        try:
            import wandb
            from wandb.errors import Error as WandbError
        except ImportError as error:
            raise UserError(
                "The recipe asks for Weights & Biases (telemetry.wandb), which is not installed: pip install wandb, "
                "or take telemetry.wandb out of the recipe."
            ) from error
        id_file = run_dir / "wandb_run_id"
        run_id = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else None
        try:
            self._run = wandb.init(
                project=recipe.project,
                entity=recipe.entity,
                mode=recipe.mode,
                dir=str(run_dir),
                config=run_config,
                id=run_id,
                resume="allow" if recipe.mode == "online" else None,
                settings=wandb.Settings(silent=True, console="off"),
            )
        except WandbError as error:
            raise UserError(
                f"Weights & Biases would not open the run: {str(error).rstrip('.')}. Log in with `wandb login`, set "
                "mode: offline, or take telemetry.wandb out of the recipe."
            ) from error
        id_file.write_text(self._run.id + "\n", encoding="utf-8")
        self.url = self._run.url if recipe.mode == "online" else None  # offline, asking for it prints a warning
        """Where the run can be watched; None offline."""
        self._stages: set[str] = set()

    def log(self, stage: str, step: int, named: dict[str, float]) -> None:
        """A point on every curve."""
        if stage not in self._stages:
            self._stages.add(stage)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        self._run.log({f"{stage}/{name}": value for name, value in named.items()} | {f"{stage}/step": step})

    def close(self) -> None:
        self._run.finish()
