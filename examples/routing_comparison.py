"""Routing against the expected loss: the same small model, text and steps, and one question at every loop.

    OMP_NUM_THREADS=1 python examples/routing_comparison.py runs/routing_comparison [--smoke]

Routing trains each token at the first loop that already predicts it, one loop more allowed in each of four phases
(Closing the Loop, appendix J, untested there). The expected loss is the recipe of stage_two_gain.py, seed 0. About
three minutes on a quiet core.
"""

from dataclasses import asdict
from typing import Any

from stage_two_gain import RECIPE, stage_one
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

from looplm.evaluation.depth_sweep import depth_sweep, twin_difference
from looplm.evaluation.exit_area import RuleComparison, compare_exit_rules
from looplm.evaluation.exit_curve import gate_statistics
from looplm.evaluation.exit_rules import fixed_exit, gate_exit
from looplm.evaluation.record import DepthRecord
from looplm.model.flops import training_flops
from looplm.training.stage_recipe import RoutingRecipe
from looplm.training.text_model import TextRecipe

EXPECTED, ROUTING = "expected_loss", "routing"


def cells(recipe: TextRecipe) -> list[Cell]:
    """Both objectives over the same steps; the curriculum reaches all loops in the last quarter."""
    expected = stage_one(recipe, seed=0)
    objective = RoutingRecipe(phase_steps=recipe.num_steps // recipe.num_loops).model_dump()
    routing = changed(recipe.stage_one(recipe.num_loops, "stage1"), objective=objective)
    return [
        Cell(name=EXPECTED, recipe=expected.recipe, stage=expected.stage),
        Cell(name=ROUTING, recipe=expected.recipe, stage=routing),
    ]


def run(cell: Cell, experiment: Experiment) -> tuple[dict[str, Any], DepthRecord]:
    """Trains and measures one objective."""
    model = experiment.train(cell)
    measured = experiment.measure(model)
    config, recipe = model.model.config, cell.recipe
    tokens = recipe.num_steps * recipe.batch_size * recipe.seq_len
    phases = range(1, recipe.num_loops + 1) if cell.name == ROUTING else [recipe.num_loops] * recipe.num_loops
    found = compare_exit_rules(measured, [fixed_exit(measured), gate_exit(measured)], config)
    steps = [entry for entry in experiment.told(cell) if "loop_losses" in entry]
    result = {
        "objective": cell.name,
        "sweep": asdict(depth_sweep(measured)),
        "gate": asdict(gate_statistics(measured)),
        "comparison": found,
        "training_flops": sum(training_flops(config, tokens // recipe.num_loops, loops) for loops in phases),
        "steps": [entry["step"] for entry in steps],
        "loop_losses": [entry["loop_losses"] for entry in steps],
    }
    return result, measured


def draw(results: list[dict[str, Any]], experiment: Experiment) -> None:
    """Table, results.json and plot."""
    rows = []
    drawn, axes = figure(3, "Routing and the expected loss, same data and steps")
    for colour, found in zip(COLOURS, results, strict=False):
        comparison: RuleComparison = found["comparison"]
        points = found["sweep"]["points"]
        gain = comparison.difference("gate", "fixed depth")
        rows.append([
            found["objective"],
            " ".join(f"{point['bits_per_byte']:.3f}" for point in points),
            " ".join(f"{point['accuracy']:.3f}" for point in points),
            " ".join(f"{share:.2f}" for share in found["gate"]["mean_exit_pdf"]),
            f"{gain.value:.4f} ({gain.low:.4f} to {gain.high:.4f})",
            f"{found['training_flops']:.2e}",
        ])  # fmt: skip
        axes[0].plot([point["num_loops"] for point in points], [point["bits_per_byte"] for point in points], "o-",
                     color=colour, label=found["objective"])  # fmt: skip
        curve = comparison.curve("gate").points
        axes[1].plot([point.mean_loops for point in curve], [point.bits_per_byte for point in curve], color=colour)
        for loop, style in ((0, "-"), (-1, ":")):
            losses = [loops[loop] for loops in found["loop_losses"]]
            axes[2].plot(found["steps"], losses, style, color=colour, linewidth=1)
    columns = ["objective", "bits per byte by loop", "accuracy by loop", "exit pdf", "gate's area less fixed", "FLOPs"]
    experiment.console.print(table("Held-out text", columns, rows))
    axes[0].set(xlabel="loops of every token", ylabel="bits per byte")
    axes[0].legend(fontsize=7, frameon=False)
    axes[1].set(xlabel="mean loops, exits by the gate")
    axes[2].set(xlabel="step", ylabel="nats: first loop -, deepest :")
    written = [{**found, "comparison": asdict(found["comparison"])} for found in results]
    experiment.write(written, drawn)


def main() -> None:
    """Both objectives, then the table."""
    chosen = options(__doc__ or "")
    recipe = shrink(RECIPE) if chosen.smoke else RECIPE
    experiment = open_experiment(chosen.out, recipe, chosen.smoke)
    measured = [run(cell, experiment) for cell in cells(recipe)]
    draw([result for result, _ in measured], experiment)
    (expected, routing) = (record for _, record in measured)
    for loops in range(1, recipe.num_loops + 1):
        gap = twin_difference(routing, loops, expected, loops)
        interval = f"{gap.value:+.4f} ({gap.low:+.4f} to {gap.high:+.4f})"
        experiment.console.print(f"Loop {loops}: routing less expected loss {interval} bits per byte")


if __name__ == "__main__":
    main()
