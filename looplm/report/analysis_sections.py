"""One section of a page for each analysis: what was found, a figure, tables, and a paragraph on how to read them."""

from collections.abc import Sequence
from html import escape

from looplm.analysis.agreement import Agreement
from looplm.analysis.geometry import Geometry
from looplm.analysis.interventions import GateEffect, PatchGrid, ScheduleEffect
from looplm.analysis.lens import Lens, Reading
from looplm.analysis.probes import ProbeGrid, Probes
from looplm.report import analysis_plots as plots
from looplm.report.sections import figure, table
from looplm.report.tables import Cells


def agreement_section(found: Agreement) -> str:
    """Agreement, marginals and flips."""
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
    flips = tuple(
        (f"{i + 1} to {i + 2}", found.labels[a], found.labels[b], str(count))
        for i, rows in enumerate(found.flips)
        for a, row in enumerate(rows)
        for b, count in enumerate(row)
        if count
    )
    return _section(
        "agreement",
        "Does the answer change between loops?",
        "Each cell of the first table counts the prompts on which two loops give the same answer. If a loop's state "
        "decided nothing, all loops would agree; a number that falls away from the diagonal says that later loops "
        "overrule earlier ones. Compare it with chance: two loops that both say mostly one thing agree without "
        "meaning anything, which the shares below give away. Flips that go one way only are a shift of mood, flips "
        "both ways are second thoughts.",
        figure(plots.agreement_figure(found), "Agreement with the last and the next loop, chance, and accuracy."),
        table(Cells(f"Prompts, of {found.num_prompts}, on which two loops agree", ("", *loops), matrix)),
        table(Cells("Share of each answer", ("Loop", *found.labels, "Right"), marginals)),
        table(Cells("Flips with one more loop", ("Loops", "From", "To", "Prompts"), flips)),
    )


def probes_section(found: Probes) -> str:
    """AUC of every probe."""
    notes = "".join(f'<p class="note">{escape(g.target)}: {escape(g.note)}.</p>' for g in found.grids if g.note)
    grids = [grid for grid in found.grids if not grid.note]
    return _section(
        "probes",
        "What does a state know?",
        "A linear probe tries to read an answer from a state; an AUC of 1 means that it can, 0.5 that it cannot. "
        "Where "
        "the line of a loop's own answer rises, that answer is being decided; where the next loop's answer cannot be "
        "read yet, that loop still changes something. The shuffled probes show what chance gives with these many "
        f"prompts and channels (mean {found.control_mean:.3f}); a line inside their band says nothing. That a state "
        "predicts an answer does not prove that the model uses it: see the interventions. Agreeing targets share "
        "their curves.",
        figure(
            plots.probe_figure(found), f"Cross-validated AUC, {found.num_folds} folds, {found.num_prompts} prompts."
        )
        if grids
        else "",
        *(table(_probe_cells(grid, found.layers)) for grid in grids),
        notes,
    )


def _probe_cells(grid: ProbeGrid, layers: str) -> Cells:
    columns = ("Loop", *(f"{layers} {layer}" for layer in range(1, len(grid.auc[0]) + 1)), "Shuffled, mean")
    rows = tuple(
        (
            f"{loop}",
            *("" if value is None else f"{value:.3f}" for value in row),
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


def intervene_section(
    grids: Sequence[PatchGrid], schedules: Sequence[ScheduleEffect], gates: Sequence[GateEffect], knows_loops: bool
) -> str:
    """Patches, orders of loops, gates."""
    parts: list[str] = []
    for grid in grids:
        rows = tuple(
            (
                f"{effect.loop}",
                f"{effect.position}",
                "" if effect.moved is None else f"{effect.moved:.3f}",
                f"{effect.flipped:.1%}",
                f"{effect.shift:.3f}",
            )
            for effect in grid.effects
        )
        columns = ("Loop", "Position", "Moved", "Flipped", "Total variation")
        parts += [
            figure(plots.patch_figure(grid), f"{grid.kind}: effect on the answer of loop {grid.num_loops}."),
            table(Cells(f"{grid.kind}, {grid.num_pairs} prompts", columns, rows)),
        ]
    if schedules:
        rows = tuple(
            (one.change, " ".join(map(str, one.schedule)), f"{one.changed:.1%}", f"{one.shift:.3f}")
            for one in schedules
        )
        note = (
            ""
            if knows_loops
            else '<p class="note">The core of this model computes the same at every loop, so it is the number of '
            "loops alone that counts here: skipping any loop is running one less.</p>"
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
        "nothing "
        "later reads it there. Positions that should not matter are the control. A late loop at the last position "
        "moves everything in any model, since the head reads it; what is telling is an early loop, or another "
        "position.",
        *parts,
    )


def _section(anchor: str, title: str, reading: str, *parts: str) -> str:
    """A headline, the paragraph on how to read what follows, and the parts."""
    return "\n".join([f'<h2 id="{anchor}">{escape(title)}</h2>', f"<p>{escape(reading)}</p>", *parts])
