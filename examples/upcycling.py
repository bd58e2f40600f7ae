"""What doubling the layers of a trained model costs and gains: 2 layers to 4, looped four times and not at all.

    OMP_NUM_THREADS=1 python examples/upcycling.py runs/upcycling [--smoke]

Width 64, this Python's own text. A model is trained, its layers are duplicated (stacked: 1 2 1 2, or interleaved:
1 1 2 2), and all three, the model as it was too, are trained on over the same rows. The same is done to a model of one
loop. Losses are nats a token on held-out text, at every loop. About three minutes on a quiet core.
"""

from typing import Any

from matplotlib.axes import Axes
from text_experiment import COLOURS, Cell, Experiment, figure, open_experiment, options, shrink, table

from looplm.conversion.upcycling import upcycle
from looplm.evaluation.depth_sweep import depth_sweep
from looplm.hf.save import save_checkpoint
from looplm.training.text_model import TextRecipe

RECIPE = TextRecipe(
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_heads=2,
    num_loops=4,
    seq_len=128,
    batch_size=8,
    lr=4e-3,
    beta=0.1,
    smoothing=0.05,
    warmup_steps=50,
    num_steps=500,
    num_gate_steps=1,
)
FURTHER_STEPS, FURTHER_LR = 150, 2e-3
HELD_OUT_DOCUMENTS = 12
UNCHANGED, ORDERS = "unchanged", ("stacked", "interleaved")


def trained(recipe: TextRecipe) -> Cell:
    """The model that is upcycled."""
    return Cell(name=f"loops{recipe.num_loops}", recipe=recipe, stage=recipe.stage_one(recipe.num_loops, "first"))


def further(recipe: TextRecipe, first: Cell, order: str, experiment: Experiment) -> Cell:
    """The same training for all of them: on rows of another order, from the first cell's model, upcycled or not."""
    steps = FURTHER_STEPS if recipe.num_steps > FURTHER_STEPS else recipe.num_steps
    changed = recipe.model_copy(update={"seed": recipe.seed + 1, "num_steps": steps, "lr": FURTHER_LR})
    start = experiment.out / (first.name if order == UNCHANGED else f"{first.name}-{order}-start")
    name = f"{first.name}-{order}"
    return Cell(name=name, recipe=changed, stage=changed.stage_one(recipe.num_loops, "further"), start=start)


def losses(experiment: Experiment, model: Any) -> list[float]:
    """Held-out nats a token at loops 1 to R."""
    return [point.loss_nats for point in depth_sweep(experiment.measure(model)).points]


def run(experiment: Experiment, recipe: TextRecipe) -> list[dict[str, Any]]:
    """One model, unchanged and upcycled both ways: losses before and after the surgery, and after further training."""
    first = trained(recipe)
    model = experiment.train(first)
    before = experiment.once(first, lambda: {"losses": losses(experiment, model)})["losses"]
    found = []
    for order in (UNCHANGED, *ORDERS):
        cell = further(recipe, first, order, experiment)
        grown = model if order == UNCHANGED else upcycle(model, 2 * recipe.num_hidden_layers, order)
        if order != UNCHANGED and cell.start is not None and not (cell.start / "model").exists():
            save_checkpoint(grown, cell.start / "model", experiment.corpus.tokenizer)
        after = before if order == UNCHANGED else losses(experiment, grown)
        last = losses(experiment, experiment.train(cell))
        found.append(
            {
                "num_loops": recipe.num_loops,
                "order": order,
                "before": before,
                "after": after,
                "after further training": last,
            }
        )
    return found


def draw(results: list[dict[str, Any]], experiment: Experiment) -> None:
    """Table, results.json and plot."""
    deepest = max(len(row["before"]) for row in results)
    for what in ("before", "after", "after further training"):
        rows = [
            [name_of(row), *(f"{loss:.4f}" for loss in row[what])] + ["-"] * (deepest - len(row[what]))
            for row in results
        ]
        columns = ["model", *(f"loop {loop}" for loop in range(1, deepest + 1))]
        experiment.console.print(table(f"Held-out nats a token, {what}", columns, rows))
    drawn, axes = figure(2, "2 layers to 4, held-out nats a token")
    for axis, what in zip(axes, ("after", "after further training"), strict=True):
        draw_losses(axis, results, what)
    experiment.write(results, drawn)


def name_of(row: dict[str, Any]) -> str:
    """What a model is called in table and plot."""
    return f"{row['num_loops']} loop{'s' * (row['num_loops'] > 1)}, {row['order']}"


def draw_losses(axis: Axes, results: list[dict[str, Any]], what: str) -> None:
    """Losses over loops; a model of one loop as a level."""
    for colour, row in zip(COLOURS, results, strict=False):
        label, values = name_of(row), row[what]
        if len(values) > 1:
            axis.plot(range(1, len(values) + 1), values, color=colour, marker="o", markersize=3, label=label)
        else:
            axis.axhline(values[0], color=colour, linewidth=1, linestyle="--", label=label)
    axis.set_xlabel("loop")
    axis.set_title(what, fontsize=9)
    axis.legend(fontsize=6)


def main() -> None:
    """Trains what has not been trained yet, and measures all of it."""
    arguments = options(__doc__ or "")
    recipe = shrink(RECIPE) if arguments.smoke else RECIPE
    experiment = open_experiment(arguments.out, recipe, arguments.smoke, HELD_OUT_DOCUMENTS)
    recipes = (recipe, recipe.model_copy(update={"num_loops": 1}))
    draw([row for one in recipes for row in run(experiment, one)], experiment)


if __name__ == "__main__":
    main()
