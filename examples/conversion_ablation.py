"""What the parts of the conversion recipe are worth: the scalar injection, the smoothed exit loss, and the data.

    OMP_NUM_THREADS=1 python examples/conversion_ablation.py runs/conversion_ablation [--smoke]

A small dense Qwen3 is trained (examples/small_qwen3.py) and looped three times by `small/convert_qwen3_1p7b`: with the
scalar or naively, with eps 0.05 or 0 (Closing the Loop, 4.1 and 4.2), in two data regimes (4.3): `text`, more of what
the source has read, and `answers`, questions and answers of which only the answers are learned. Beside them the dense
twin, on the same rows in the same order. Each cell is a run directory of `looplm train`; a killed one goes on.
Losses are nats a token on what the regime holds out. About twenty minutes on a quiet core.
"""

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from rich.console import Console
from small_qwen3 import main as train_dense
from text_experiment import options, table

from looplm.conversion.dense_to_looped import dense_to_looped
from looplm.data.corpus import open_rows
from looplm.data.recipe import DataRecipe
from looplm.hf.load import load, load_tokenizer
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.model.config import Injection
from looplm.objectives.cross_entropy import shift_labels, weighted_cross_entropy
from looplm.strict import parse
from looplm.training.recipe_file import load_recipe
from looplm.training.run import run

RECIPE = Path(__file__).parents[1] / "looplm" / "recipes" / "small" / "convert_qwen3_1p7b.yaml"
REGIMES = ("text", "answers")
SCALAR = "scalar, eps 0.05"
"""The recipe of the paper; the dense twin is trained beside it."""
VARIANTS: dict[str, tuple[Injection, float]] = {
    SCALAR: ("scalar", 0.05),
    "scalar, eps 0": ("scalar", 0.0),
    "naive, eps 0.05": ("none", 0.05),
    "naive, eps 0": ("none", 0.0),
}
FIXED_EXIT = 2


@dataclass(frozen=True)
class Ablation:
    """Where the cells live, and how large they are."""

    out: Path
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the order of rows; a converted model has nothing else to draw."""
    dense_steps: int = 1500
    num_steps: int = 120
    rows_measured: int = 64
    """Of 256 tokens each, or all that a regime holds out."""
    max_bytes: int | None = None
    """Of the standard library's text; None for all."""

    @property
    def dense(self) -> Path:
        """The model that is looped, and its tokenizer."""
        return self.out / "dense"

    def source(self, regime: str, part: str) -> dict[str, Any]:
        """What a regime trains on, or holds out."""
        if regime == "text":
            return {"kind": "stdlib", "part": part, "max_bytes": self.max_bytes}
        return {
            "kind": "generator", "function": "looplm.data.stdlib_chat:stdlib_chat", "format": "chat", "part": part,
            "streaming": False, "arguments": {"max_bytes": self.max_bytes} if self.max_bytes else {},
        }  # fmt: skip

    def cell(self, regime: str, variant: str, seed: int) -> Path:
        """A run directory; that of SCALAR has the dense twin in its `dense/`."""
        return self.out / f"{regime}-{variant.replace(', ', '-').replace(' ', '')}-seed{seed}"

    def train(self, console: Console) -> None:
        """The dense model, and then every cell, as far as they have not been trained."""
        if not (self.dense / "tokenizer.json").exists():  # what is written last
            train_dense(self.dense, self.dense_steps, self.max_bytes)
        for seed, regime, variant in product(self.seeds, REGIMES, VARIANTS):
            directory = self.cell(regime, variant, seed)
            console.rule(directory.name, align="left")
            changes = self.changes(regime, variant, seed)
            recipe = load_recipe(RECIPE, [f"{name}={json.dumps(value)}" for name, value in changes.items()])
            run(recipe, directory, resume=True, console=console)

    def changes(self, regime: str, variant: str, seed: int) -> dict[str, Any]:
        """What a cell changes in the recipe."""
        injection, smoothing = VARIANTS[variant]
        return {
            "name": "cell", "seed": seed, "model.source": str(self.dense), "tokenizer.path": str(self.dense),
            "model.architecture.injection": injection, "data_cache": str(self.out / "tokens"),
            "stages.0.objective.smoothing": smoothing, "stages.0.num_steps": self.num_steps,
            "stages.0.schedule.warmup_steps": self.num_steps // 10, "stages.0.batch_tokens": 1024,
            "stages.0.precision": "bf16", "stages.0.data": {"sources": [self.source(regime, "train")]},
            "evaluation.every": self.num_steps, "evaluation.max_tokens": 1000, "evaluation.max_loops": 3,
            "checkpoints": {"every": 30, "keep_last": 1, "keep_best": False, "asynchronous": False},
            "telemetry.tensorboard": False, "baseline": "dense" if variant == SCALAR else None,
            "compare_loops": FIXED_EXIT if variant == SCALAR else None,
        }  # fmt: skip

    # --- Measuring --------------------------------------------------------------------------------------------------

    def measure(self, regime: str) -> list[dict[str, Any]]:
        """One row for each model of a regime: its losses before training, and what every seed has come to."""
        rows: list[dict[str, Any]] = []
        for variant, (injection, _) in VARIANTS.items():
            before = self.losses(dense_to_looped(self.dense, injection=injection), regime)
            cells = [self.cell(regime, variant, seed) for seed in self.seeds]
            if variant == SCALAR:
                twins = [self.found(cell / "dense", regime) for cell in cells]
                rows.append({"regime": regime, "model": "dense", "before": before[:1], "seeds": twins})
            found = [self.found(cell, regime) for cell in cells]
            rows.append({"regime": regime, "model": variant, "before": before, "seeds": found})
        return rows

    def found(self, cell: Path, regime: str) -> dict[str, Any]:
        """Held-out losses and the last step's mean exit pdf of a finished run; kept beside it."""
        path = cell / "found.json"
        if not path.exists():
            lines = (cell / "telemetry.jsonl").read_text(encoding="utf-8").splitlines()
            steps = [entry for entry in map(json.loads, lines) if "exit_pdf" in entry]
            losses = self.losses(load(cell / "convert", dtype="float32").eval(), regime)
            path.write_text(json.dumps({"losses": losses, "exit_pdf": steps[-1]["exit_pdf"]}) + "\n", encoding="utf-8")
        return json.loads(path.read_text(encoding="utf-8"))

    @torch.no_grad()
    def losses(self, model: LoopLMForCausalLM, regime: str) -> list[float]:
        """Nats a predicted token at loops 1 to R on what the regime holds out."""
        data = parse(DataRecipe, {"sources": [self.source(regime, "held_out")]}, "held-out data")
        tokenizer = load_tokenizer(self.dense)
        rows = open_rows(data, tokenizer, seq_len=256, seed=0, cache_dir=self.out / "tokens")
        total, count = torch.zeros(model.model.config.num_loops, dtype=torch.float64), 0
        for _ in range(min(self.rows_measured, rows.rows_per_epoch or self.rows_measured)):
            row = {name: tensor[None] for name, tensor in next(rows).items()}
            states = model.model(row["input_ids"], document_ids=row["document_ids"]).loop_hidden_states
            targets = shift_labels(row["labels"])
            weights = torch.zeros((len(states), *targets.shape))
            _, losses = model.apply_head(weighted_cross_entropy, states, targets, weights)  # (R, 1, S)
            total += losses.double().sum((1, 2))
            count += int((targets != -100).sum())
        return (total / count).tolist()


# --- What was found -------------------------------------------------------------------------------------------------


def spread(found: list[float], sign: str = "") -> str:
    """Mean and standard deviation over seeds."""
    return f"{fmean(found):{sign}.4f} ±{stdev(found) if len(found) > 1 else 0:.4f}"


def against_dense(row: dict[str, Any], twin: dict[str, Any]) -> list[float]:
    """Loss at the fixed exit less that of the dense twin on the same rows, by seed; below 0 the loops have paid."""
    return [a["losses"][FIXED_EXIT - 1] - b["losses"][0] for a, b in zip(row["seeds"], twin["seeds"], strict=True)]


def tell(regime: str, rows: list[dict[str, Any]], console: Console) -> None:
    """The table of a regime; its first row is the dense twin."""
    lines = []
    for row in rows:
        loops = range(len(row["before"]))
        after = [spread([seed["losses"][loop] for seed in row["seeds"]]) for loop in loops]
        pdf = [f"{fmean(seed['exit_pdf'][loop] for seed in row['seeds']):.2f}" for loop in loops]
        less = spread(against_dense(row, rows[0]), "+") if len(after) > 1 else "-"
        before = " ".join(f"{loss:.3f}" for loss in row["before"])
        lines.append([row["model"], before, *after, *["-"] * (3 - len(after)), less, " ".join(pdf)])
    columns = ["model", "before", "loop 1", "loop 2", "loop 3", "loop 2 less dense", "exit pdf"]
    console.print(table(f"{regime}: held-out nats a token", columns, lines))


def main() -> None:
    """Trains what has not been trained yet, and measures all of it."""
    arguments = options(__doc__ or "")
    out = arguments.out.resolve()
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    ablation, console = Ablation(out), Console(width=132)
    if arguments.smoke:
        ablation = Ablation(out, seeds=(0,), dense_steps=2, num_steps=2, rows_measured=4, max_bytes=400_000)
    ablation.train(console)
    results = {regime: ablation.measure(regime) for regime in REGIMES}
    for regime, rows in results.items():
        tell(regime, rows, console)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(f"{out / 'results.json'} written.", soft_wrap=True)


if __name__ == "__main__":
    main()
