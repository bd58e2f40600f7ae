"""What Stage II adds to the gate: area under the depth-quality curve, three seeds, beside exits without a gate.

    OMP_NUM_THREADS=1 python examples/stage_two_gain.py runs/stage_two_gain [--smoke]

One layer of width 128, four loops, 1.2M tokens of this Python's own text for Stage I, then 0.3M for Stage II with each
label convention, over the same frozen model. All rules are replayed on the same held-out tokens. About three minutes
a seed on a quiet core. The area is the mean of bits per byte over mean depths 1 to 4 (looplm.evaluation.exit_area).
"""

from dataclasses import asdict
from statistics import mean, stdev
from typing import Any

import torch
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
from looplm.evaluation.exit_area import RuleComparison, compare_exit_rules
from looplm.evaluation.exit_curve import gate_statistics
from looplm.evaluation.exit_rules import (
    confidence_exit,
    fixed_exit,
    gate_exit,
    hidden_change_exit,
    oracle_exit,
    stable_argmax_exit,
)
from looplm.training.stage_recipe import GateLossRecipe
from looplm.training.text_model import TextRecipe

RECIPE = TextRecipe(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=1,
    num_heads=4,
    num_loops=4,
    seq_len=256,
    batch_size=8,
    lr=4e-3,
    beta=0.1,
    smoothing=0.2,
    warmup_steps=100,
    num_steps=600,
    gate_lr=1e-2,
    num_gate_steps=150,
)
SEEDS = (0, 1, 2)
LABELS = ("paper", "next")
FIXED, STAGE_ONE = "fixed depth", "Stage I gate"


def stage_one(recipe: TextRecipe, seed: int) -> Cell:
    """Model and gate."""
    recipe = recipe.model_copy(update={"seed": seed})
    stage = recipe.stage_one(recipe.num_loops, "stage1")
    return Cell(name=f"seed{seed}-stage1", recipe=recipe, stage=stage)


def run_seed(experiment: Experiment, recipe: TextRecipe, seed: int) -> dict[str, Any]:
    """Both stages of one seed, and all rules on its held-out text."""
    first = stage_one(recipe, seed)
    model = experiment.train(first)
    measured = experiment.measure(model, changes=True)
    rules = [fixed_exit(measured), gate_exit(measured, name=STAGE_ONE)]
    gates = {STAGE_ONE: gate_statistics(measured)}
    for label in LABELS:
        stage = first.recipe.stage_two("stage2")
        objective = GateLossRecipe(label_shift=label).model_dump()
        second = Cell(
            name=f"seed{seed}-stage2-{label}",
            recipe=first.recipe,
            stage=changed(stage, objective=objective),
            start=experiment.out / first.name,
        )
        again = experiment.measure(experiment.train(second))
        if not torch.equal(again.cross_entropy, measured.cross_entropy):
            raise RuntimeError("Stage II has changed the language model.")
        rules.append(gate_exit(again, name=stage_two_name(label)))
        gates[rules[-1].name] = gate_statistics(again)
    rules += [hidden_change_exit(measured), confidence_exit(measured), stable_argmax_exit(measured)]
    rules.append(oracle_exit(measured))
    found = compare_exit_rules(measured, rules, model.model.config)
    return {
        "seed": seed,
        "bits_per_byte": [point.bits_per_byte for point in depth_sweep(measured).points],
        "bytes_per_token": int(measured.document_bytes.sum()) / measured.num_tokens,
        "gates": {name: asdict(gate) for name, gate in gates.items()},
        "comparison": found,
    }


def stage_two_name(label: str) -> str:
    return f"Stage II gate, {label}"


def summary(seeds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each rule's area over seeds, and its difference from fixed depths and from the Stage I gate."""
    comparisons: list[RuleComparison] = [found["comparison"] for found in seeds]
    rows: list[dict[str, Any]] = []
    for curve in comparisons[0].curves:
        areas = [found.curve(curve.name).area_bits_per_byte.value for found in comparisons]
        row: dict[str, Any] = {"rule": curve.name, "areas": areas}
        for other in (FIXED, STAGE_ONE):
            if other != curve.name:
                row[f"less {other}"] = [asdict(found.difference(curve.name, other)) for found in comparisons]
        row["shuffled gain"] = [asdict(found.curve(curve.name).shuffled_gain_bits_per_byte) for found in comparisons]
        rows.append(row)
    return rows


def spread(values: list[float]) -> str:
    """Mean and standard deviation over seeds."""
    return f"{mean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


def draw(seeds: list[dict[str, Any]], experiment: Experiment) -> None:
    """Table, results.json and plot."""
    rows = summary(seeds)
    shown = []
    for row in rows:
        differences = [row.get(f"less {other}") for other in (FIXED, STAGE_ONE)]
        signs = [
            "-" if found is None else spread([pair["value"] for pair in found]) + " " + verdict(found)
            for found in differences
        ]
        shown.append([row["rule"], spread(row["areas"]), *signs])
    columns = ["rule", "area, bits per byte", "less fixed depths", "less Stage I gate"]
    experiment.console.print(table("Area under the depth-quality curve (less is better)", columns, shown))
    experiment.console.print("One sign a seed: - better, + worse, 0 neither, in the 95 % interval over documents.")
    first: RuleComparison = seeds[0]["comparison"]
    drawn, axes = figure(3, "Exit rules on held-out text (curves: seed 0)")
    for colour, curve in zip((*COLOURS, "#000000"), first.curves, strict=False):
        quality = [point.bits_per_byte for point in curve.points]
        style = {"color": colour, "linewidth": 1.2, "label": curve.name}
        style |= {"linestyle": ":"} if curve.name == "oracle" else {}
        axes[0].plot([point.mean_loops for point in curve.points], quality, **style)
        axes[1].plot([point.flops_per_token / 1e6 for point in curve.points], quality, **style)
    top, low = seeds[0]["bits_per_byte"][0], min(seeds[0]["bits_per_byte"])
    for axis, label in zip(axes, ("mean loops", "MFLOPs a token, heads included"), strict=False):
        axis.set(xlabel=label, ylabel="bits per byte", ylim=(low - 0.3 * (top - low), top + 0.05 * (top - low)))
    axes[0].legend(fontsize=6, frameon=False)
    compared = [row for row in rows if row["rule"] not in (FIXED, "oracle")]
    for i, row in enumerate(compared):
        gains = [-pair["value"] for pair in row[f"less {FIXED}"]]
        axes[2].plot(gains, [i] * len(gains), "o", color=COLOURS[i + 1], markersize=4)
    axes[2].axvline(0, color="#555555", linewidth=0.8)
    axes[2].set_yticks(range(len(compared)), [row["rule"] for row in compared], fontsize=7)
    axes[2].locator_params(axis="x", nbins=4)
    axes[2].set(xlabel="area gained over fixed depths, by seed")
    written = [{**found, "comparison": asdict(found["comparison"])} for found in seeds]
    experiment.write({"summary": rows, "seeds": written}, drawn)


def verdict(differences: list[dict[str, float]]) -> str:
    """One sign a seed."""
    return "".join("-" if pair["high"] < 0 else "+" if pair["low"] > 0 else "0" for pair in differences)


def main() -> None:
    """All seeds, then the table."""
    chosen = options(__doc__ or "")
    recipe = shrink(RECIPE) if chosen.smoke else RECIPE
    experiment = open_experiment(chosen.out, recipe, chosen.smoke)
    experiment.console.print(f"{experiment.corpus.held_out.num_predicted_tokens:,} held-out tokens")
    seeds = [run_seed(experiment, recipe, seed) for seed in (SEEDS[:2] if chosen.smoke else SEEDS)]
    draw(seeds, experiment)


if __name__ == "__main__":
    main()
