"""What the experiments beside this file share: small models of the standard library's text, trained cell by cell.

A cell is one model in a directory of its own. It is trained once: after a kill it goes on from its last checkpoint,
and when the script runs again it is read back. One thread, so that a run repeats itself bit for bit on a machine.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from looplm.data.documents import split_documents
from looplm.data.stdlib_text import load_stdlib_text
from looplm.evaluation.record import DepthRecord, record
from looplm.hf.load import load
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.hf.save import save_checkpoint
from looplm.training.checkpoint import list_checkpoints
from looplm.training.recipe import CheckpointsRecipe
from looplm.training.stage_recipe import StageRecipe
from looplm.training.telemetry import Telemetry
from looplm.training.text_model import Corpus, TextRecipe, new_model, prepare_corpus, train_stage

CHECKPOINTS = CheckpointsRecipe(every=100, keep_last=1, asynchronous=False)
COLOURS = ("#1f6f8b", "#c2562d", "#5a8f3d", "#7b5ea7", "#b8860b", "#555555", "#c04f7d")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model of an experiment."""

    name: str
    """Its directory."""
    recipe: TextRecipe
    stage: StageRecipe
    start: Path | None = None
    """Directory of the finished cell whose model this one begins with; a fresh model when None."""


@dataclass(frozen=True)
class Experiment:
    """Where the cells live and what they are trained on."""

    out: Path
    corpus: Corpus
    console: Console

    def train(self, cell: Cell) -> LoopLMForCausalLM:
        """The cell's model, trained now as far as it has not been yet."""
        directory = self.out / cell.name
        finished = directory / "model"
        if finished.exists():
            return load(finished, dtype="float32")
        self.console.rule(cell.name, align="left")
        start = cell.start / "model" if cell.start is not None else None
        recipe = cell.recipe
        model = load(start, dtype="float32") if start is not None else new_model(recipe, self.corpus, recipe.num_loops)
        telemetry = Telemetry(directory, self.console, line_seconds=60, tensorboard=False)
        if not list_checkpoints(directory / "checkpoints"):
            (directory / "telemetry.jsonl").unlink(missing_ok=True)
        train_stage(model, cell.stage, recipe, self.corpus, telemetry, directory, True, checkpoints=CHECKPOINTS)
        save_checkpoint(model, finished, self.corpus.tokenizer)
        return model

    def told(self, cell: Cell) -> list[dict[str, Any]]:
        """The cell's telemetry: records of steps, and warnings among them."""
        lines = (self.out / cell.name / "telemetry.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def measure(self, model: LoopLMForCausalLM, *, changes: bool = False) -> DepthRecord:
        """One recorded pass over the held-out text, in float32, at the trained depth."""
        windows = self.corpus.held_out
        return record(model.eval(), windows.batches(32), windows.document_bytes, changes=changes)

    def once(self, cell: Cell, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `find` found of the cell, kept beside its model for the next time the script runs."""
        path = self.out / cell.name / "found.json"
        if not path.exists():
            path.write_text(json.dumps(find()) + "\n", encoding="utf-8")
        return json.loads(path.read_text(encoding="utf-8"))

    def write(self, results: Any, figure: Figure) -> None:
        """`results.json` and `plot.svg`, and says where."""
        # JSON knows no infinity, the threshold at which every rule's curve begins and ends: null.
        finite = json.loads(json.dumps(results), parse_constant=lambda _: None)
        (self.out / "results.json").write_text(json.dumps(finite, indent=1) + "\n", encoding="utf-8")
        # Text stays text, and the same results give the same file.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "looplm"}):
            figure.savefig(self.out / "plot.svg", metadata={"Date": None})
        self.console.print(f"{self.out / 'results.json'} and {self.out / 'plot.svg'} written.", soft_wrap=True)


def options(text: str) -> argparse.Namespace:
    """The command line that all experiments have: `out` and `--smoke`."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory of the runs, results.json and plot.svg")
    parser.add_argument("--smoke", action="store_true", help="tiny models and a few steps: checks that it runs")
    return parser.parse_args()


def open_experiment(out: Path, recipe: TextRecipe, smoke: bool, held_out_documents: int | None = None) -> Experiment:
    """Pins one thread, makes `out` and prepares the corpus in the recipe's vocabulary and window.

    held_out_documents: how many are measured on; all when None.
    """
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    split = split_documents(load_stdlib_text(400_000 if smoke else None).documents)
    split = replace(split, held_out=split.held_out[: 4 if smoke else held_out_documents])
    corpus = prepare_corpus(split, recipe.vocab_size, recipe.seq_len)
    return Experiment(out, corpus, Console(width=110))


def shrink(recipe: TextRecipe) -> TextRecipe:
    """The same recipe at a size that trains in a second."""
    return recipe.model_copy(
        update={"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "seq_len": 64,
                "batch_size": 2, "num_steps": 12, "num_gate_steps": 4, "warmup_steps": 2}
    )  # fmt: skip


def changed(stage: StageRecipe, **changes: Any) -> StageRecipe:
    """The stage with other values, validated."""
    return StageRecipe.model_validate({**stage.model_dump(), **changes})


def table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    """A table whose first column is text and whose others are figures."""
    made = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        made.add_row(*row)
    return made


def figure(columns: int, title: str) -> tuple[Figure, list[Axes]]:
    """A row of small axes."""
    drawn = Figure(figsize=(4.2 * columns, 3.2), layout="constrained")
    drawn.suptitle(title, fontsize=10)
    axes = list(drawn.subplots(1, columns, squeeze=False)[0])
    for one in axes:
        one.grid(alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    return drawn, axes
