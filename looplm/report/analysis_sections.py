"""One section of a page for each analysis: what was found, a figure, tables, and a paragraph on how to read them."""

from collections.abc import Callable, Sequence
from html import escape
from math import sqrt

from looplm.analysis.agreement import Agreement, LevelAgreement
from looplm.analysis.geometry import Geometry
from looplm.analysis.interventions import GateEffect, PatchGrid, ScheduleEffect
from looplm.analysis.lens import Lens, LevelReading, Reading
from looplm.analysis.probes import ProbeGrid, Probes
from looplm.report import analysis_plots as plots
from looplm.report.sections import figure, table
from looplm.report.tables import Cells

MOST_FLIPS = 20
"""Rows of the page's table; the file of numbers holds them all."""


def agreement_section(found: Agreement, by_level: Sequence[LevelAgreement] = ()) -> str:
    """Agreement, marginals and flips, and what changes level by level."""
    loops = [f"Loop {loop}" for loop in range(1, len(found.matrix) + 1)]
    matrix = tuple((name, *map(str, row)) for name, row in zip(loops, found.matrix, strict=True))
    marginals = tuple(
        (
            name,
            *(f"{share:.1%}" for share in row),
            "" if found.accuracy is None else f"{found.accuracy[i]:.1%}",
        )
        for i, (name, row) in enumerate(zip(loops, found.marginals, strict=True))
    )
    flips = sorted(
        (
            (count, (f"{i + 1} to {i + 2}", found.labels[a], found.labels[b], str(count)))
            for i, rows in enumerate(found.flips)
            for a, row in enumerate(rows)
            for b, count in enumerate(row)
            if count
        ),
        key=lambda flip: -flip[0],
    )
    shown = tuple(row for _, row in flips[:MOST_FLIPS])
    rest = f", the {MOST_FLIPS} most frequent of {len(flips)}" if len(flips) > MOST_FLIPS else ""
    return _section(
        "agreement",
        "Does the answer change between loops?",
        "Each cell of the first table counts the prompts on which two loops give the same answer. If later loops "
        "changed nothing, all loops would agree; a number that falls away from the diagonal says that later loops "
        "overrule earlier ones. Compare it with chance: two loops that both say mostly one thing agree without "
        "meaning anything, which the shares below give away. Flips that go one way only are a shift of mood, flips "
        "both ways are second thoughts. Where prompts have levels, answers that change at one loop for easy prompts "
        "and at a later one for hard ones are depth at work. ± is one standard error over prompts.",
        figure(plots.agreement_figure(found), "Agreement with the last and the next loop, chance, and accuracy."),
        table(Cells(f"Prompts, of {found.num_prompts}, on which two loops agree", ("", *loops), matrix)),
        *([table(_level_cells(by_level, loops))] if by_level else []),
        table(Cells("Share of each answer", ("Loop", *found.labels, "Right"), marginals)),
        table(Cells(f"Flips with one more loop{rest}", ("Loops", "From", "To", "Prompts"), shown)),
    )


def _level_cells(by_level: Sequence[LevelAgreement], loops: Sequence[str]) -> Cells:
    rows = tuple(
        (
            f"{one.level}",
            f"{one.num_prompts}",
            *(
                "" if one.accuracy is None else share_with_error(right, one.num_prompts)
                for right in one.accuracy or ()
            ),
            *(share_with_error(changed, one.num_prompts) for changed in one.changed),
        )
        for one in by_level
    )
    right = [f"{loop}, right" for loop in loops] if by_level[0].accuracy is not None else []
    changed = [f"Changed by loop {loop}" for loop in range(2, len(loops) + 1)]
    return Cells(
        "By level: right answers, and answers that one more loop changes", ("Level", "Prompts", *right, *changed), rows
    )


def share_with_error(share: float, count: int) -> str:
    """A share of `count` independent prompts with its standard error."""
    return f"{share:.1%} ± {100 * sqrt(share * (1 - share) / count):.1f}"


def probes_section(found: Probes, notes: Sequence[str] = ()) -> str:
    """AUC of every probe."""
    said = [*(f"{grid.target}: {grid.note}." for grid in found.grids if grid.note), *notes]
    grids = [grid for grid in found.grids if not grid.note]
    control = f" (mean {found.control_mean:.3f})" if grids else ""
    return _section(
        "probes",
        "What does a state know?",
        "A linear probe tries to read an answer from a state; an AUC of 1 means that it can, 0.5 that it cannot. "
        "Where the line of a loop's own answer rises, that answer is being decided; where the next loop's answer "
        "cannot be read yet, that loop still changes something. At the end of a loop its own answer can always be "
        "read, since the head is linear too: what is telling is the rest of its row in the first table. Loops that "
        "agree have the same answers and so the same figures. The shuffled probes show what chance gives with these "
        f"many prompts and channels{control}; a line inside their band says nothing. The last row is what the "
        "prompt's last token alone gives away, without any model: a state must beat it. That a state predicts an "
        "answer does not prove that the model uses it: see the interventions. ± is one standard error over folds.",
        figure(
            plots.probe_figure(found), f"Cross-validated AUC, {found.num_folds} folds, {found.num_prompts} prompts."
        )
        if grids
        else "",
        *([table(_end_cells(grids))] if grids else []),
        *(table(_probe_cells(grid, found.layers)) for grid in grids if len(grid.auc[0]) > 1),
        *(f'<p class="note">{escape(note)}</p>' for note in said),
    )


def _end_cells(grids: Sequence[ProbeGrid]) -> Cells:
    """What the state at the end of each loop says of every target."""
    rows = tuple(
        (f"After loop {loop + 1}", *(_with_error(grid.auc[loop][-1], grid.stderr[loop][-1]) for grid in grids))
        for loop in range(len(grids[0].auc))
    )
    if any(grid.token_auc is not None for grid in grids):
        rows = (*rows, ("The last token alone", *(_auc(grid.token_auc) for grid in grids)))
    columns = ("State", *(grid.target[0].upper() + grid.target[1:] for grid in grids))
    return Cells("AUC from the state at the end of each loop", columns, rows)


def _with_error(value: float | None, error: float | None) -> str:
    return "" if value is None else f"{round(value, 3) + 0.0:.3f} ± {error or 0:.3f}"  # no "-0.000"


def _auc(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _probe_cells(grid: ProbeGrid, layers: str) -> Cells:
    columns = ("Loop", *(f"{layers} {layer}" for layer in range(1, len(grid.auc[0]) + 1)), "Shuffled, mean")
    rows = tuple(
        (
            f"{loop}",
            *(_auc(value) for value in row),
            f"{sum(value for value in control if value is not None) / len(control):.3f}",
        )
        for loop, (row, control) in enumerate(zip(grid.auc, grid.control, strict=True), start=1)
    )
    return Cells(f"{grid.target}: AUC", columns, rows)


def lens_section(found: Lens, texts: dict[int, str]) -> str:
    """The prompt's tokens as columns, loops and layers as rows, each cell the likeliest next token."""
    tokens = [texts[token] for token in found.token_ids]
    settled = [found.settled_at(position) for position in range(len(tokens))]
    last_layer = max(reading.layer for reading in found.readings)
    loops = tuple(
        (
            f"{reading.loop}",
            f"{sum(reading.entropy) / len(reading.entropy):.3f}",
            f"{sum(reading.kl_from_last) / len(reading.kl_from_last):.3f}",
            f"{sum(reading.next_nats) / max(1, len(reading.next_nats)):.3f}",
            f"{sum(one <= reading.loop for one in settled) / len(settled):.0%}",
        )
        for reading in found.readings
        if reading.layer == last_layer
    )
    columns = ("Loop", "Entropy, nats", "Nats to the last loop", "Nats of the real next token", "Settled")
    return _section(
        "lens",
        "What would it say if it stopped here?",
        "Every row is a layer of a loop, every column a position of the prompt; the cell shows the next token that "
        "the "
        "model would choose if the rest of the loop were left out, and its tint how sure it is. The last row of each "
        "loop is the model's real output at that depth; layers before it are read through a norm and head that were "
        "never trained for them, so an early row that makes no sense proves nothing. Read a column downwards: where "
        "the "
        "token stops changing, more loops decide nothing for it.",
        figure(plots.lens_figure(found, tokens), "KL from the last reading, by layer and position."),
        table(Cells("Means over positions, at the end of each loop", columns, loops)),
        _lens_table(found, tokens, texts),
    )


def _lens_table(found: Lens, tokens: Sequence[str], texts: dict[int, str]) -> str:
    head = "".join(f'<th class="head" scope="col">{_token(token)}</th>' for token in tokens)
    body = "".join(_lens_row(reading, texts) for reading in found.readings)
    return (
        '<p class="caption">The likeliest next token at every loop, layer and position</p>'
        '<div class="scroll" role="region" tabindex="0" aria-label="Lens"><table class="heat">'
        f'<thead><tr><th scope="col">Loop, layer</th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _lens_row(reading: Reading, texts: dict[int, str]) -> str:
    cells = "".join(
        f'<td class="cell" style="--share: {60 * shares[0]:.0f}%">{_token(texts[ids[0]])} {shares[0]:.2f}</td>'
        for ids, shares in zip(reading.top_ids, reading.top_probabilities, strict=True)
    )
    return f'<tr><th scope="row">{reading.loop}, {reading.layer}</th>{cells}</tr>'


def _token(text: str) -> str:
    """A token's text with its whitespace shown."""
    return escape(text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣"))


def levels_section(readings: Sequence[LevelReading]) -> str:
    """Where right answers appear, by level."""
    ends = [one for one in readings if one.layer == max(reading.layer for reading in readings)]
    loops = sorted({one.loop for one in ends})
    names = list(dict.fromkeys(one.level for one in ends))
    by_place = {(one.level, one.loop): one for one in ends}

    def cells(title: str, show: Callable[[LevelReading], str]) -> Cells:
        rows = tuple(
            (
                "all" if name is None else f"{name}",
                f"{by_place[name, loops[0]].num_prompts}",
                *(show(by_place[name, loop]) for loop in loops),
            )
            for name in names
        )
        return Cells(title, ("Level", "Prompts", *(f"Loop {loop}" for loop in loops)), rows)

    return _section(
        "lens",
        "Where does the answer appear?",
        "The model's own norm and head read the state after every layer of every loop, at the last token of each "
        "prompt. The figure shows how many nats the right answer still costs there, one line a level; the tables hold "
        "the end of each loop, which is the model's real output at that depth. If depth is what hard prompts need, "
        "lines of harder levels fall later; lines that fall together say that all levels wait for the same layer. "
        "Layers before a loop's end are read through a norm and head that were never trained for them: a high line "
        "there proves nothing, a low one does. ± is one standard error over prompts.",
        figure(plots.levels_figure(readings), "Nats of the right answer, by layer of the unrolled model."),
        table(cells("Right answers", lambda one: f"{one.right:.1%} ± {100 * one.right_stderr:.1f}")),
        table(cells("Nats of the right answer", lambda one: f"{one.nats:.3f} ± {one.nats_stderr:.3f}")),
        table(cells("Answers that are already the last loop's", lambda one: f"{one.final:.1%}")),
    )


def geometry_section(found: Geometry) -> str:
    """Planes, separability, convergence."""
    rows = tuple(
        (
            f"{plane.loop}",
            "" if plane.separability is None else f"{plane.separability:.3f}",
            "" if plane.centroid_distance is None else f"{plane.centroid_distance:.2f}",
            f"{sum(plane.explained):.0%}",
        )
        for plane in found.planes
    )
    columns = ("Loop", "Separability, AUC", "Distance of the means", "Variance in the plane")
    parts = [
        '<div class="figures">',
        *(
            figure(plots.plane_figure(found, plane), f"Last-token states after loop {plane.loop}.")
            for plane in found.planes
        ),
        "</div>",
        table(Cells(f"{found.group_names[0]} against {found.group_names[1]}", columns, rows)),
    ]
    if (way := found.convergence) is not None:
        rates = [f"{row[1]:.3f}" for row in way.rates]
        moves = tuple(
            (f"{r + 1}", f"{way.distances[r][1]:.4f}", f"{way.steps[r][1]:.4f}", rates[r] if r < len(rates) else "")
            for r in range(len(way.distances))
        )
        parts += [
            "<h3>The way to a fixed point</h3>",
            figure(plots.convergence_figure(way, found.trained_loops), "Medians and 5 to 95 % over prompts."),
            table(
                Cells(
                    "Medians over prompts", ("Loop", f"Distance to loop {way.reference_loop}", "Step", "Rate"), moves
                )
            ),
        ]
    axes = "one pair of axes for all loops" if found.joint else "axes of each loop's own, so planes cannot be overlaid"
    return _section(
        "geometry",
        "Where do states lie?",
        "Each dot is a prompt's last token. Two groups that part in the plane are told apart along the directions in "
        f"which states vary most ({axes}); the AUC of a linear probe on the whole state is the fairer measure, since "
        "groups may part along a direction that the plane leaves out. Below, a step that shrinks by a constant rate "
        "under 1 means that the loop contracts towards a fixed point and further loops change less and less; a rate "
        "at "
        "or above 1 means that it does not. The deepest loop stands in for the fixed point, so distances near it are "
        "too small.",
        *parts,
    )


def _patch_cells(grid: PatchGrid, title: str) -> Cells:
    """Without a source there is nothing to move to, and no beginning to splice."""
    sourced = any(effect.moved is not None for effect in grid.effects)
    rows = tuple(
        (
            f"{effect.position}",
            f"{effect.loop}",
            f"{effect.flipped:.1%} ± {100 * effect.flipped_stderr:.1f}",
            f"{effect.shift:.3f}",
            *([_with_error(effect.moved, effect.moved_stderr), _share(effect.spliced)] if sourced else []),
        )
        for effect in grid.effects
    )
    columns = ("Position", "Loop", "Flipped", "Total variation", *(("Moved", "Spliced") if sourced else ()))
    return Cells(title, columns, rows)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def intervene_section(
    grids: Sequence[PatchGrid], schedules: Sequence[ScheduleEffect], gates: Sequence[GateEffect], alike: bool
) -> str:
    """Patches, orders of loops, gates. `alike`: the core computes the same at every loop."""
    parts: list[str] = []
    for grid in grids:
        title = grid.kind[0].upper() + grid.kind[1:]
        parts += [
            figure(plots.patch_figure(grid), f"{title}: effect on the answer of loop {grid.num_loops}."),
            table(_patch_cells(grid, f"{title}: {grid.num_pairs} prompts")),
        ]
    if schedules:
        rows = tuple(
            (one.change, " ".join(map(str, one.schedule)), f"{one.changed:.1%}", f"{one.shift:.3f}")
            for one in schedules
        )
        note = (
            '<p class="note">The core of this model computes the same at every loop, so it is the number of '
            "loops alone that counts here: skipping any loop is running one less.</p>"
            if alike
            else ""
        )
        columns = ("Change", "Order", "Answers changed", "Total variation")
        parts += ["<h3>Skipped and repeated loops</h3>", table(Cells("Orders of loops", columns, rows)), note]
    if gates:
        rows = tuple(
            (
                f"{one.loop}",
                f"{one.mean_loops_before:.2f}",
                f"{one.mean_loops_after:.2f}",
                f"{one.changed_depth:.1%}",
                f"{one.changed_answer:.1%}",
            )
            for one in gates
        )
        columns = ("Loop", "Mean loops before", "After", "Depths changed", "Answers changed")
        parts += [
            "<h3>The gate of another prompt</h3>",
            "<p>States stay; only the gate's logit at one loop is taken over. This is the gate's own part in an "
            "answer.</p>",
            table(Cells("Gate patching", columns, rows)),
        ]
    return _section(
        "intervene",
        "What does a state cause?",
        "The state at one loop and position is replaced by that of another prompt with another answer, blended with "
        "it, or drowned in noise, and the rest of the pass goes on. Moved is the share of the way that the final "
        "answer "
        "goes towards the source's, in log odds: 1 means that this state carries all of the difference, 0 that "
        "nothing later reads it there. Flipped is the share of prompts that then give the source's answer (without a "
        "source: another than before). Spliced is the share that then answers as if the prompt began like the "
        "source's, up to this position: near 100 %, this one state is all that the model keeps of what stands before "
        "it. Positions that should not matter are the control. A late loop at the last "
        "position moves everything in any model, since the head reads it; what is telling is an early loop, or "
        "another position. ± is one standard error over prompts.",
        *parts,
    )


def _section(anchor: str, title: str, reading: str, *parts: str) -> str:
    """A headline, the paragraph on how to read what follows, and the parts."""
    return "\n".join([f'<h2 id="{anchor}">{escape(title)}</h2>', f"<p>{escape(reading)}</p>", *parts])
