"""The sections of the page: figures and tables in order, each with a line on how to read it."""

from collections.abc import Iterable
from html import escape

from looplm.report import plots, tables, verdicts
from looplm.report.sample import sample_html
from looplm.report.schema import FoldModel, QuickstartReport, TextModel
from looplm.report.tables import Cells
from looplm.report.verdicts import Verdict


def text_model_section(model: TextModel, anchor: str) -> str:
    """Everything about one model of text."""
    parts = [
        f'<h2 id="{anchor}">{escape(model.name)}</h2>',
        f'<p class="lead">{escape(model.description)} {escape(_facts(model))}</p>',
        verdict_list(verdicts.text_model_verdicts(model)),
        _depth_part(model),
        _training_part(model.name, model.training),
        _gate_part(model),
        _work_part(model),
        _cache_part(model),
    ]
    if model.sample is not None:
        parts.append(
            "<h3>A sample, marked by depth</h3>"
            "<p>Each token wears the loop it was read out at: the small number, the colour and the underline say the "
            "same. Tokens that are easy to foresee should leave early.</p>"
            + sample_html(model.sample, model.sweep.trained_loops)
        )
    return "\n".join(parts)


def _facts(model: TextModel) -> str:
    sweep = model.sweep
    return (
        f"{model.num_parameters:,} parameters, {sweep.trained_loops} loops, trained on {model.training_tokens:,} "
        f"tokens in {duration(model.training_seconds)}. Measured on {sweep.num_documents} held-out documents: "
        f"{sweep.num_tokens:,} tokens, {sweep.num_bytes:,} bytes."
    )


def _depth_part(model: TextModel) -> str:
    twin = (
        " The one-loop twin has the same shape and saw the same tokens, at a fraction of the work per token; it is "
        "what looping must beat."
        if model.twin is not None
        else ""
    )
    return (
        "<h3>Quality at each depth</h3>"
        "<p>All tokens read out after the same loop. Lower is better; bars and ± are one standard error over held-out "
        "documents. These are wide because documents differ; how depths differ on the same documents is known far "
        'better (column "Next loop"). '
        f"Past the dotted line the model runs more loops than it was trained with.{twin}</p>"
        + figure(plots.depth_figure(model), f"{model.name}: held-out bits per byte at each fixed depth.")
        + table(tables.depth_table(model))
        + '<p class="note">"Accuracy" is the share of tokens whose most probable prediction is right, "agreement" the '
        f'share for which it is that of loop {model.sweep.reference_loops}. "Next loop" is the change of the mean '
        'loss from one more loop (below 0 helps), and "tokens worse next" the share of tokens it makes worse.'
        "</p>"
    )


def _training_part(name: str, training: tuple) -> str:
    if not training:
        return ""
    return (
        "<h3>Training</h3>"
        "<p>First the loss at every loop, on training batches; then how likely the gate is to leave at each loop, "
        "on average; a band that swallows all others is a collapsed gate.</p>"
        '<div class="figures">'
        + figure(plots.loss_figure(name, training), f"{name}: training loss of each loop.")
        + figure(plots.exit_pdf_figure(name, training), f"{name}: mean exit distribution during training.")
        + "</div>"
    )


def _gate_part(model: TextModel) -> str:
    return (
        "<h3>The gate: depth against quality</h3>"
        "<p>Lowering the threshold lets tokens leave earlier. The dashed line joins the fixed depths: a coin that "
        "sends each token to one of two neighbouring depths lands on it. Only where the solid curve lies below that "
        "line does the gate choose better than chance; the shaded band is the bootstrap interval of the gap over "
        "documents.</p>"
        + figure(plots.quality_figure(model), f"{model.name}: bits per byte over mean depth, gate and fixed depths.")
        + table(tables.gate_table(model))
        + '<p class="note">Entropy near 0 means a collapsed gate. "Spread" is the standard deviation of the expected '
        "depth across tokens; near 0 every token is treated alike.</p>"
    )


def _work_part(model: TextModel) -> str:
    return (
        "<h3>What an exit saves</h3>"
        "<p>Claimed depth is the loop a token is read out at. Weight passes are applications of the core: what costs "
        "time at batch 1. Token-loops are loops really computed: what costs time in large batches. With the exact "
        "cache an early token is caught up later, along with a deeper one, so passes are saved and token-loops "
        "hardly.</p>"
        + figure(plots.work_figure(model), f"{model.name}: loops per token at each exit threshold.")
        + table(tables.threshold_table(model))
    )


def _cache_part(model: TextModel) -> str:
    return (
        "<h3>Cache memory</h3>"
        "<p>Keys and values kept for each token of context. <code>per_loop</code> is exact. <code>fill</code> copies "
        "missing deeper keys; <code>last</code>, <code>mean</code> and <code>first</code> keep one set for all loops. "
        "These four change what the model computes, and their quality must be measured before use.</p>"
        + table(tables.cache_table(model))
    )


def fold_section(fold: FoldModel) -> str:
    """The task where loops decide."""
    return "\n".join(
        [
            '<h2 id="fold">The fold task: where loops decide</h2>',
            f'<p class="lead">{escape(fold.description)} {fold.num_parameters:,} parameters, '
            f"{fold.training_steps:,} steps in {duration(fold.training_seconds)}.</p>",
            verdict_list([verdicts.fold_verdict(fold)]),
            "<h3>Accuracy by length and loop</h3>",
            "<p>A row is one length of expression, a column the loop at which the answer is read. If loops do the "
            "work, accuracy spreads to the right as expressions grow.</p>",
            heat_map(fold),
            figure(plots.fold_depth_figure(fold), "Fold: the gate's expected depth by k."),
            "<h3>Leaving early</h3>",
            "<p>Each answer is read at the first loop whose exit probability, added up, reaches the threshold. The "
            "twin has the same layer and one loop.</p>",
            table(tables.fold_exit_table(fold)),
            _training_part("Fold", fold.training),
        ]
    )


def run_section(report: QuickstartReport) -> str:
    """Machine, times, and what to try next."""
    commands = "".join(
        f'<p>{escape(item.explanation)}</p><pre class="command">{escape(item.command)}</pre>'
        for item in report.next_commands
    )
    return (
        f'<h2 id="next">Try next</h2>{commands}'
        f'<h2 id="run">This run</h2>{table(tables.machine_table(report.machine, report.phases))}'
    )


def figure(svg: str, caption: str) -> str:
    """A figure with its caption."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def table(cells: Cells) -> str:
    """A table that scrolls on its own where the page is narrower."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in cells.columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells.rows)
    return (
        f'<p class="caption">{escape(cells.title)}</p>'
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(cells.title)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def heat_map(fold: FoldModel) -> str:
    """Accuracy by k (rows) and loop (columns): the number, and a tint that grows with it."""
    num_loops = len(fold.groups[0].accuracy_by_loop)
    head = "".join(
        f'<th class="head" scope="col">Loop {loop}{" *" if loop > fold.trained_loops else ""}</th>'
        for loop in range(1, num_loops + 1)
    )
    rows = []
    for group in fold.groups:
        cells = "".join(
            f'<td class="cell" style="--share: {60 * accuracy:.0f}%">{accuracy:.2f}</td>'
            for accuracy in group.accuracy_by_loop
        )
        depth = f"{group.expected_loops:.2f} ± {group.expected_loops_std:.2f}"
        rows.append(f'<tr><th scope="row">k = {group.group}</th>{cells}<td>{depth}</td></tr>')
    note = '<p class="note">* beyond the trained depth</p>' if num_loops > fold.trained_loops else ""
    return (
        '<p class="caption">Accuracy on held-out expressions (chance is 0.10), and the gate\'s expected depth ± its '
        'spread</p><div class="scroll" role="region" tabindex="0" aria-label="Accuracy by k and loop">'
        f'<table class="heat"><thead><tr><th scope="col">Length</th>{head}'
        f'<th scope="col">Depth</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>{note}'
    )


def verdict_list(found: Iterable[Verdict]) -> str:
    """Findings with a mark each: as hoped, not as hoped, or neither."""
    marks = {True: ("good", "✓", "as hoped"), False: ("bad", "✗", "not as hoped"), None: ("open", "·", "neutral")}
    items = []
    for verdict in found:
        kind, mark, label = marks[verdict.good]
        items.append(
            f'<li class="{kind}"><span class="mark" role="img" aria-label="{label}">{mark}</span>'
            f"{escape(verdict.text)}</li>"
        )
    return f'<ul class="verdicts">{"".join(items)}</ul>'


def duration(seconds: float) -> str:
    """Seconds as a person would say them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
