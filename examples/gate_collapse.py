"""Gate collapse (Closing the Loop, 3.3) at small size, on this Python's own text: what causes it, what heals it.

    OMP_NUM_THREADS=1 python examples/gate_collapse.py runs/gate_collapse [--smoke]

Two layers of width 128, two loops, 0.8M tokens each (about a minute on a quiet core): a row of entropy weights beta at
a short warmup, a row of warmups at a small beta, three seeds where it matters, and larger betas from the collapsed
model on. The training loss looks healthy in all of them; the mean exit pdf does not.
"""

from dataclasses import dataclass
from typing import Any

from text_experiment import (
    COLOURS,
    Cell,
    Experiment,
    changed,
    figure,
    open_experiment,
    options,
    shrink,
    table,
)

from looplm.evaluation.depth_sweep import depth_sweep
from looplm.evaluation.exit_curve import gate_statistics
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.training.stage_recipe import OptimizerRecipe, ScheduleRecipe
from looplm.training.text_model import TextRecipe

RECIPE = TextRecipe(
    vocab_size=2048,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=2,
    num_heads=4,
    num_loops=2,
    seq_len=256,
    batch_size=8,
    embedding_start=0.02,
    branch_norm_start=1.0,
    final_norm_start=1.0,
    lr=4e-3,
    beta=0.02,
    warmup_steps=50,
    num_steps=390,
    num_gate_steps=1,
)
"""The usual sizes at the start, a high learning rate, a small beta and a short warmup."""

RECOVERY_STEPS = 120
HELD_OUT_DOCUMENTS = 10
"""A gate that has collapsed shows on any text."""


@dataclass(frozen=True)
class Setting:
    """What varies."""

    beta: float
    warmup_steps: int
    seed: int
    recovers: bool = False
    """Begins with the collapsed model of seed 0, at half the peak learning rate, constant."""

    @property
    def name(self) -> str:
        kind = "recovery" if self.recovers else "fresh"
        return f"{kind}-beta{self.beta:g}-warmup{self.warmup_steps}-seed{self.seed}"


def settings(smoke: bool) -> list[Setting]:
    """All cells in the order they are trained, the collapsed one that recovery begins with first."""
    if smoke:
        return [Setting(0.0, 0, 0), Setting(0.1, 2, 0, recovers=True)]
    beta, warmup = RECIPE.beta, RECIPE.warmup_steps
    return [
        Setting(beta, warmup, 0),
        Setting(0.2, warmup, 0),
        Setting(beta, 200, 0),
        Setting(0.4, 10, 0, recovers=True),
        Setting(0.2, 10, 0, recovers=True),
        Setting(beta, 10, 0, recovers=True),
        Setting(0.05, 0, 0),
        Setting(0.05, 200, 0),
        *(Setting(beta, warmup, seed) for seed in (1, 2)),
        Setting(0.03, 0, 0),
        Setting(0.03, 200, 0),
        *(Setting(0.2, warmup, seed) for seed in (1, 2)),
        *(Setting(beta, 200, seed) for seed in (1, 2)),
        Setting(0.1, warmup, 0),
        Setting(beta, 0, 0),
        Setting(0.05, warmup, 0),
    ]


def cell(setting: Setting, first: Setting, experiment: Experiment, recipe: TextRecipe) -> Cell:
    """The training of one setting."""
    recipe = recipe.model_copy(update={"seed": setting.seed, "beta": setting.beta})
    stage = recipe.stage_one(recipe.num_loops, "stage1")
    schedule = ScheduleRecipe(warmup_steps=setting.warmup_steps)
    changes: dict[str, Any] = {"schedule": schedule.model_dump()}
    if setting.recovers:
        schedule = ScheduleRecipe(kind="constant", warmup_steps=min(setting.warmup_steps, recipe.num_steps))
        changes = {
            "schedule": schedule.model_dump(),
            "num_steps": min(RECOVERY_STEPS, recipe.num_steps),
            "optimizer": OptimizerRecipe(lr=recipe.lr / 2).model_dump(),
        }
    return Cell(
        name=setting.name,
        recipe=recipe,
        stage=changed(stage, **changes),
        start=experiment.out / first.name if setting.recovers else None,
    )


def run(setting: Setting, first: Setting, experiment: Experiment, recipe: TextRecipe) -> dict[str, Any]:
    """Trains and measures one setting."""
    trained = cell(setting, first, experiment, recipe)
    model = experiment.train(trained)
    return experiment.once(trained, lambda: measure(setting, trained, model, experiment))


def measure(setting: Setting, trained: Cell, model: LoopLMForCausalLM, experiment: Experiment) -> dict[str, Any]:
    """What the held-out text and the telemetry say of a finished cell."""
    measured = experiment.measure(model)
    gate = gate_statistics(measured)
    told = experiment.told(trained)
    steps = [entry for entry in told if "loss" in entry]
    alarms = [entry for entry in told if entry.get("warning", "").startswith("The exit gate has collapsed")]
    return {
        "setting": {**vars(setting), "name": setting.name},
        "bits_per_byte": [point.bits_per_byte for point in depth_sweep(measured).points],
        "exit_pdf": list(gate.mean_exit_pdf),
        "entropy_nats": gate.mean_entropy_nats,
        "alarm_step": alarms[0]["step"] if alarms else None,
        "warnings": [f"step {entry['step']}: {entry['warning']}" for entry in told if "warning" in entry],
        "steps": [entry["step"] for entry in steps],
        "loss": [entry["loss"] for entry in steps],
        "exit_pdf_over_steps": [entry["exit_pdf"] for entry in steps],
    }


def draw(results: list[dict[str, Any]], experiment: Experiment) -> None:
    """Table, results.json and plot."""
    rows = [
        [
            found["setting"]["name"],
            " ".join(f"{p:.3f}" for p in found["exit_pdf"]),
            f"{found['entropy_nats']:.3f}",
            " ".join(f"{b:.3f}" for b in found["bits_per_byte"]),
            "-" if found["alarm_step"] is None else str(found["alarm_step"]),
        ]
        for found in results
    ]
    columns = ["cell", "mean exit pdf", "entropy", "bits per byte", "collapse alarm at step"]
    experiment.console.print(table("Held-out text", columns, rows))
    drawn, axes = figure(3, "Share of the exit distribution on loop 1, over training steps")
    betas = sorted({found["setting"]["beta"] for found in results})
    groups = (
        ("warmup 50", lambda one: not one["recovers"] and one["warmup_steps"] == 50),
        ("warmup 200 dashed, 0 solid", lambda one: not one["recovers"] and one["warmup_steps"] != 50),
        ("from the collapsed model", lambda one: one["recovers"]),
    )
    for axis, (title, belongs) in zip(axes, groups, strict=True):
        axis.set(title=title, xlabel="step", ylim=(-0.02, 1.02))
        labelled: set[float] = set()
        for found in (found for found in results if belongs(found["setting"])):
            beta, warmup = found["setting"]["beta"], found["setting"]["warmup_steps"]
            axis.plot(
                found["steps"],
                [pdf[0] for pdf in found["exit_pdf_over_steps"]],
                "--" if warmup == 200 else "-",
                color=COLOURS[betas.index(beta)],
                label=None if beta in labelled else f"beta {beta:g}",
                linewidth=1.2,
            )
            labelled.add(beta)
        if labelled:
            axis.legend(fontsize=7, frameon=False)
    experiment.write(results, drawn)


def main() -> None:
    """All cells, then the table."""
    chosen = options(__doc__ or "")
    recipe = shrink(RECIPE) if chosen.smoke else RECIPE
    experiment = open_experiment(chosen.out, recipe, chosen.smoke, HELD_OUT_DOCUMENTS)
    planned = settings(chosen.smoke)
    results: list[dict[str, Any]] = []
    for setting in planned:
        results.append(run(setting, planned[0], experiment, recipe))
        found = results[-1]
        experiment.console.print(setting.name, found["exit_pdf"], found["bits_per_byte"], *found["warnings"])
    draw(results, experiment)


if __name__ == "__main__":
    main()
