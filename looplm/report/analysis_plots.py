"""The figures of the analyses."""

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from looplm.analysis.agreement import Agreement
from looplm.analysis.geometry import Convergence, Geometry, Plane
from looplm.analysis.interventions import PatchGrid
from looplm.analysis.lens import Lens, LevelReading
from looplm.analysis.probes import Probes
from looplm.analysis.scaling import LawReport
from looplm.report.canvas import GATE, INK, MUTED, TWIN, drawn, loop_axis, loop_style


def agreement_figure(found: Agreement) -> str:
    """Share of prompts on which each loop agrees with the last, and with the next, beside what chance gives."""
    with drawn("agreement") as canvas:
        loops = range(1, len(found.matrix) + 1)
        last = [row[-1] / found.num_prompts for row in found.matrix]
        chance = [row[-1] / found.num_prompts for row in found.chance]
        following = [found.matrix[r][r + 1] / found.num_prompts for r in range(len(found.matrix) - 1)]
        canvas.axes.plot(loops, last, color=GATE, marker="o", label="with the last loop")
        canvas.axes.plot(loops, chance, color=MUTED, linestyle=":", label="with it, by chance")
        canvas.axes.plot(
            list(loops)[:-1], following, color=TWIN, marker="s", linestyle="--", label="with the next loop"
        )
        if found.accuracy is not None:
            canvas.axes.plot(loops, found.accuracy, color=INK, marker="^", linestyle="-.", label="right answers")
        loop_axis(canvas.axes, "loop", len(found.matrix))
        canvas.axes.set_ylabel("share of prompts")
        canvas.axes.set_ylim(-0.02, 1.02)
        canvas.axes.legend(loc="best")
    return canvas.svg


def probe_figure(found: Probes) -> str:
    """AUC of every target along the unrolled model, one line a target, and the band of the shuffled probes."""
    with drawn("probes") as canvas:
        grids = [grid for grid in found.grids if not grid.note]
        controls = [value for grid in grids for row in grid.control for value in row if value is not None]
        if controls:
            low, high = np.quantile(controls, [0.05, 0.95])
            canvas.axes.axhspan(low, high, color=MUTED, alpha=0.2, linewidth=0, label="shuffled, 90%")
        width = len(found.grids[0].auc[0])
        for number, grid in enumerate(grids, start=1):
            values = np.array([value for row in grid.auc for value in row], dtype=float)
            canvas.axes.plot(range(1, len(values) + 1), values, label=grid.target, **loop_style(number, len(values)))
        _mark_loops(canvas.axes, len(found.grids[0].auc), width)
        canvas.axes.set_ylabel("ROC AUC of a linear probe")
        canvas.axes.legend(loc="best", fontsize=8)
    return canvas.svg


def lens_figure(found: Lens, texts: Sequence[str]) -> str:
    """How far each layer's distribution still is from the last one, position by position."""
    with drawn("lens") as canvas:
        values = np.array([reading.kl_from_last for reading in found.readings])
        colours = matplotlib.colormaps["viridis_r"]
        image = canvas.axes.imshow(values, aspect="auto", cmap=colours, interpolation="nearest")
        canvas.axes.grid(False)
        layers = max(reading.layer for reading in found.readings)
        canvas.axes.set_yticks(
            range(layers - 1, len(values), layers), [f"loop {r}" for r in range(1, found.num_loops + 1)]
        )
        shown = range(0, len(texts), max(1, len(texts) // 16))
        canvas.axes.set_xticks(list(shown), [_visible(texts[i]) for i in shown], rotation=60, ha="right", fontsize=8)
        canvas.figure.colorbar(image, label="nats to the last reading")
    return canvas.svg


def levels_figure(found: Sequence[LevelReading], name: str = "levels") -> str:
    """Nats of the right answer along the unrolled model, one line a level. `name` keeps two on a page apart."""
    with drawn(name) as canvas:
        layers = max(one.layer for one in found)
        for number, level in enumerate(dict.fromkeys(one.level for one in found), start=1):
            mine = [one for one in found if one.level == level]
            style = loop_style(number, len(mine))
            label = "all prompts" if level is None else f"level {level}"
            places = range(1, len(mine) + 1)
            canvas.axes.plot(places, [one.nats for one in mine], label=label, **style)
            low, high = ([one.nats + sign * one.nats_stderr for one in mine] for sign in (-1, 1))
            canvas.axes.fill_between(places, low, high, color=style["color"], alpha=0.2, linewidth=0)
        _mark_loops(canvas.axes, found[-1].loop, layers)
        canvas.axes.set_ylabel("nats of the right answer")
        canvas.axes.set_ylim(bottom=0)
        canvas.axes.legend(loc="best", fontsize=8)
    return canvas.svg


def _mark_loops(axes: Axes, num_loops: int, layers: int) -> None:
    """The axis of the unrolled model's layers, with a dotted line where a loop ends."""
    if layers > 1:
        for boundary in range(1, num_loops):
            axes.axvline(boundary * layers + 0.5, color=MUTED, linewidth=0.8, linestyle=":")
    axes.set_xlabel("layer of the unrolled model (dotted: a loop ends)" if layers > 1 else "loop")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def plane_figure(found: Geometry, plane: Plane) -> str:
    """The two groups in the plane of one loop; coloured by score where there are scores."""
    with drawn(f"plane {plane.loop}") as canvas:
        for group, (name, marker, colour) in enumerate(zip(found.group_names, "o^", (GATE, TWIN), strict=True)):
            mine = [i for i, one in enumerate(found.groups) if one == group]
            x, y = [plane.points[i][0] for i in mine], [plane.points[i][1] for i in mine]
            if found.scores is None:
                canvas.axes.scatter(x, y, color=colour, marker=marker, s=16, alpha=0.7, label=name)
                continue
            low, high = min(found.scores), max(found.scores)
            dots = canvas.axes.scatter(
                x, y, c=[found.scores[i] for i in mine], vmin=low, vmax=high, cmap="viridis", marker=marker, s=18,
                label=name, edgecolors=MUTED, linewidths=0.5,
            )  # fmt: skip
            if group == 1:
                canvas.figure.colorbar(dots, label="score")
        canvas.axes.set_title(f"loop {plane.loop}", fontsize=10.5)
        canvas.axes.set_xlabel(f"component 1 ({plane.explained[0]:.0%} of variance)")
        canvas.axes.set_ylabel(f"component 2 ({plane.explained[1]:.0%})")
        legend = canvas.axes.legend(loc="best")
        if found.scores is not None:
            for handle in legend.legend_handles:
                assert handle is not None
                handle.set(array=None, color=INK)  # not that of the lowest score, which is lost on a dark page
    return canvas.svg


def convergence_figure(found: Convergence, trained_loops: int) -> str:
    """Distance to the deepest state, and step sizes, on a logarithmic axis."""
    with drawn("convergence") as canvas:
        for values, colour, marker, label in (
            (found.distances, GATE, "o", "distance to the deepest state"),
            (found.steps, TWIN, "s", "step to the next loop"),
        ):
            loops = range(1, len(values) + 1)
            middle = np.maximum([row[1] for row in values], 1e-12)
            canvas.axes.plot(loops, middle, color=colour, marker=marker, label=label)
            low, high = (np.maximum([row[i] for row in values], 1e-12) for i in (0, 2))
            canvas.axes.fill_between(loops, low, high, color=colour, alpha=0.2, linewidth=0)
        canvas.axes.axvline(trained_loops, color=MUTED, linewidth=1, linestyle=":")
        loop_axis(canvas.axes, "loop (dotted: as trained)", found.reference_loop)
        canvas.axes.set_yscale("log")
        canvas.axes.set_ylabel("over the state's size")
        canvas.axes.legend(loc="best")
    return canvas.svg


def patch_figure(found: PatchGrid) -> str:
    """How far the answer moves, by loop, one line for each position."""
    with drawn(f"patch {found.kind}") as canvas:
        positions = list(dict.fromkeys(effect.position for effect in found.effects))
        for number, position in enumerate(positions, start=1):
            mine = [effect for effect in found.effects if effect.position == position]
            values = [effect.shift if effect.moved is None else effect.moved for effect in mine]
            label = f"position {position}"
            canvas.axes.plot([effect.loop for effect in mine], values, label=label, **loop_style(number, len(mine)))
        loop_axis(canvas.axes, "loop whose state is edited", found.num_loops)
        sourced = found.effects[0].moved is not None
        canvas.axes.set_ylabel("way to the source's answer" if sourced else "total variation of the answer")
        canvas.figure.legend(loc="outside upper center", fontsize=8, ncols=3)
    return canvas.svg


def law_figure(found: LawReport) -> str:
    """Predicted against measured losses."""
    return _against(found.name, found.measured, found.predicted)


def _against(name: str, measured: Sequence[float], predicted: Sequence[float]) -> str:
    with drawn(f"law {name}") as canvas:
        low, high = min(*measured, *predicted), max(*measured, *predicted)
        canvas.axes.plot([low, high], [low, high], color=MUTED, linestyle=":")
        canvas.axes.scatter(measured, predicted, color=GATE, s=12, alpha=0.7)
        canvas.axes.set_xlabel("measured loss, nats")
        canvas.axes.set_ylabel("predicted loss, nats")
    return canvas.svg


def total_from_steps_figure(depth: int, measured: Sequence[float], predicted: Sequence[float]) -> str:
    """The total loss as the step-wise law predicts it, against the measured one."""
    return _against(f"total from steps of {depth} loops", measured, predicted)


def _visible(text: str) -> str:
    """A token's text on an axis, in letters that every font has: spaces and newlines shown, no mathematics mode."""
    marks = {"\n": "⏎", " ": "␣", "$": r"\$"}
    return "".join(marks.get(letter, letter if " " < letter < "\x7f" else "·") for letter in text[:12])
