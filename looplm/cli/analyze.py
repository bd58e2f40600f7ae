"""`looplm analyze`: what each loop does. One recorded pass, then a page and a file of numbers for each question."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from looplm.cli.analyze_inputs import (
    Asked,
    ask,
    check_prompts,
    encoder,
    load_view,
    read_answers,
    right_tokens,
    token_names,
    tokenizer_of,
    whole_numbers,
)
from looplm.cli.analyze_options import OUT, OutOption, SeedOption, Source, Subject, with_options
from looplm.errors import UserError

if TYPE_CHECKING:
    from looplm.analysis.probes import Target
    from looplm.analysis.trace import Trace
    from looplm.model.language_model import LoopLM

app = typer.Typer(help="Take a model's loops apart: answers, probes, states, causes; and scaling laws.")


@app.command("agreement")
@with_options
def agreement(subject: Subject, source: Source) -> None:
    """Does the answer change between loops: agreement of every two loops, what each answers, and the flips."""
    from looplm.analysis.agreement import agreement as count_agreement
    from looplm.analysis.agreement import agreement_by_level
    from looplm.analysis.trace import record_trace
    from looplm.model.gate import exit_pdf
    from looplm.report.analysis_sections import agreement_section

    asked = ask(subject, source)
    trace = record_trace(asked.view, asked.token_ids, subject.num_loops, layers=False)
    answers = read_answers(asked, trace)
    # The gate of a dense model was never asked about its layers.
    pdf = [] if subject.layers_per_loop else exit_pdf(trace.gate_logits).double().mean(1).tolist()
    found = count_agreement(answers.numbers, answers.names, answers.right, pdf)
    by_level = agreement_by_level(answers.numbers, answers.right, asked.levels)
    about = _about(subject, len(asked.prompts), trace.num_loops)
    _write(
        subject.out, "agreement", about, agreement_section(found, by_level), {"agreement": found, "by_level": by_level}
    )


@app.command("probes")
@with_options
def probes(
    subject: Subject,
    source: Source,
    layers: Annotated[bool, typer.Option(help="Every layer; only what the head reads without it.")] = True,
    reason: Annotated[
        int | None,
        typer.Option(help="Let the model write up to so many tokens, and probe for the label it ends on.", min=1),
    ] = None,
    num_folds: Annotated[int, typer.Option(help="Folds of the cross-validation.", min=2)] = 5,
) -> None:
    """What does a state know: linear probes of every loop and layer for the answers of every loop.

    With --reason the target is the answer that the model comes to after writing, read from its state before it.
    """
    from looplm.analysis.probes import answer_targets, probe_trace
    from looplm.analysis.trace import record_trace
    from looplm.report.analysis_sections import probes_section

    asked = ask(subject, source)
    trace = record_trace(asked.view, asked.token_ids, subject.num_loops, layers=layers)
    extra: dict[str, Any] = {}
    notes: list[str] = []
    if reason is None:
        answers = read_answers(asked, trace)
        targets = answer_targets(answers.numbers, answers.right)
        extra["answers"] = list(answers.names)
    else:
        trace, targets, extra["undecided"], extra["cut_off"] = _reasoned(asked, trace, reason, subject.num_loops)
        notes.append(
            f"{extra['undecided']} texts hold no label, and are left out. {extra['cut_off']} others were cut off "
            f"after {reason} tokens: the label that stands last in them need not be what they were coming to."
        )
    tokens = [asked.prompts[i].token_ids[-1] for i in trace.prompt_ids.tolist()]
    found = probe_trace(trace, targets, tokens=tokens, num_folds=num_folds, seed=subject.seed)
    about = _about(subject, trace.num_points, trace.num_loops)
    _write(subject.out, "probes", about, probes_section(found, notes), {"probes": found, **extra})


def _reasoned(
    asked: Asked, trace: "Trace", max_tokens: int, num_loops: int | None
) -> "tuple[Trace, list[Target], int, int]":
    """Points and target of the prompts whose text ends on a label, how many others there are, and how many of these
    texts were cut off."""
    from looplm.analysis.probes import Target
    from looplm.analysis.readout import last_label
    from looplm.inference import Engine, FixedDepth, SamplingParams

    if asked.labels is None or asked.tokenizer is None:
        raise UserError("--reason looks for a label at the end of what the model writes; give --labels.")
    engine = Engine(asked.model, asked.tokenizer)
    depth = None if num_loops is None or asked.view is not asked.model else FixedDepth(num_loops)
    written = list(engine.generate(asked.token_ids, SamplingParams(max_tokens=max_tokens), depth))
    found = [last_label(result.text or "", asked.labels.names) for result in written]
    kept = [i for i, one in enumerate(found) if one is not None]
    if not kept:
        raise UserError(f"None of the {len(found)} texts ends on a label. Give more tokens with --reason.")
    target = Target("answer after reasoning", tuple(one for one in found if one is not None))
    cut_off = sum(written[i].finish_reason == "length" for i in kept)
    return trace.points(kept), [target], len(found) - len(kept), cut_off


@app.command("lens")
@with_options
def lens(
    subject: Subject,
    source: Source,
    prompt: Annotated[str | None, typer.Option(help="The text to look at.", show_default=False)] = None,
    token_ids: Annotated[str | None, typer.Option(help="Or its token ids, with commas.", show_default=False)] = None,
    top: Annotated[int, typer.Option(help="Tokens kept of every distribution.", min=1)] = 5,
) -> None:
    """What would it say if it stopped here: the next token at every loop, layer and position of one prompt.

    Of many prompts with answers (--prompts, --pairs, --generator): where the answer appears, level by level.
    """
    from looplm.analysis.lens import lens as look
    from looplm.analysis.lens import readings_by_level
    from looplm.report.analysis_sections import lens_section, levels_section

    if prompt is None and token_ids is None:
        asked = ask(subject, source, count=100)
        right = right_tokens(asked.prompts, asked.tokenizer)
        if right is None:
            raise UserError("The lens of many prompts looks for their right answers; give each its answer.")
        readings = readings_by_level(asked.view, asked.token_ids, right, asked.levels, subject.num_loops)
        about = _about(subject, len(asked.prompts), readings[-1].loop)
        _write(subject.out, "lens", about, levels_section(readings), {"levels": readings})
        return
    ids, view = _one_prompt(subject, prompt, token_ids)
    found = look(view, ids, subject.num_loops, top=top)
    seen = {token for reading in found.readings for row in reading.top_ids for token in row} | set(ids)
    texts = token_names(sorted(seen), tokenizer_of(subject.checkpoint))
    about = f"A prompt of {len(ids)} tokens to {subject.checkpoint}, {found.num_loops} loops."
    _write(subject.out, "lens", about, lens_section(found, texts), {"lens": found, "texts": texts})


def _one_prompt(subject: Subject, prompt: str | None, token_ids: str | None) -> "tuple[list[int], LoopLM]":
    """The tokens of the one prompt given, and what is asked."""
    from looplm.analysis.prompts import AskedPrompt

    tokenizer = tokenizer_of(subject.checkpoint)
    if prompt is not None and token_ids is not None:
        raise UserError("Give the text by --prompt, or its tokens by --token-ids.")
    if token_ids is not None:
        ids = whole_numbers(token_ids, "--token-ids")
    elif tokenizer is None:
        raise UserError(f"{subject.checkpoint} has no tokenizer; give --token-ids.")
    else:
        ids = encoder(tokenizer, subject.chat)(prompt or "")
    if not ids:
        raise UserError("The prompt is empty; the lens needs at least one token to look at.")
    model, view = load_view(subject)
    check_prompts(model, [AskedPrompt(tuple(ids))])
    return ids, view


@app.command("geometry")
@with_options
def geometry(
    subject: Subject,
    first: Annotated[Path, typer.Option(help="Prompts of one group: JSONL, or text with a prompt a line.")],
    second: Annotated[Path, typer.Option(help="Prompts of the other.")],
    beyond: Annotated[int, typer.Option(help="Loops to run for the way to a fixed point.", min=1)] = 16,
    joint: Annotated[bool, typer.Option("--joint", help="One pair of axes for all loops.")] = False,
) -> None:
    """Where states lie: two groups of prompts by loop in two principal components, and the way to a fixed point.

    Points are coloured by `score` where every prompt has one.
    """
    from looplm.analysis.geometry import geometry as measure
    from looplm.analysis.prompts import read_prompts
    from looplm.analysis.trace import record_trace
    from looplm.report.analysis_sections import geometry_section

    tokenizer = tokenizer_of(subject.checkpoint)
    encode = None if tokenizer is None else encoder(tokenizer, subject.chat)
    groups = [read_prompts(file, encode) for file in (first, second)]
    asked = [prompt for group in groups for prompt in group]
    model, view = load_view(subject)
    check_prompts(model, asked)
    trained = view.model.config.num_loops
    shown = trained if subject.num_loops is None else subject.num_loops
    deepest = shown if subject.layers_per_loop else max(beyond, shown)  # a dense model ends with its layers
    trace = record_trace(view, [list(one.token_ids) for one in asked], deepest, layers=False)
    scores = [one.score for one in asked]
    known = [score for score in scores if score is not None]
    found = measure(
        trace.states,
        [0] * len(groups[0]) + [1] * len(groups[1]),
        (first.stem, second.stem),
        trained_loops=trained,
        planes=shown,
        scores=known if len(known) == len(scores) else None,
        joint=joint,
        seed=subject.seed,
    )
    about = f"{len(groups[0])} and {len(groups[1])} prompts to {subject.checkpoint}, {trace.num_loops} loops."
    _write(subject.out, "geometry", about, geometry_section(found), {"geometry": found})


@app.command("intervene")
@with_options
def intervene(
    subject: Subject,
    source: Source,
    positions: Annotated[
        str, typer.Option(help="Positions to edit, with commas, negative ones from the end; or all.")
    ] = "-1",
    blend: Annotated[float, typer.Option(help="Weight of the state put there; 1 replaces.")] = 1.0,
    noise: Annotated[
        float, typer.Option(help="Size of the noise, over the state's own; 0 leaves it out.", min=0)
    ] = 1.0,
    from_loop: Annotated[
        int | None,
        typer.Option(help="Also put the prompt's own state of this loop there.", min=1, show_default=False),
    ] = None,
    exit_threshold: Annotated[float, typer.Option(help="For the gate of another prompt.", min=0)] = 0.5,
) -> None:
    """What does a state cause: states and gates of another prompt or loop, noise, skipped and repeated loops."""
    from looplm.analysis import interventions as edits
    from looplm.analysis.trace import record_trace
    from looplm.report.analysis_sections import intervene_section

    places = None if positions == "all" else whole_numbers(positions, "--positions")
    asked = ask(subject, source, count=100)
    ids, view = asked.token_ids, asked.view
    if places is None:
        places = [-place for place in range(1, min(map(len, ids)) + 1)]
    trace = record_trace(view, ids, subject.num_loops, layers=False)
    if from_loop is not None and from_loop > trace.num_loops:
        raise UserError(f"--from-loop is {from_loop}; the pass has {trace.num_loops} loops.")
    answers = read_answers(asked, trace)
    partners = edits.partners_of(answers.numbers[-1].tolist(), subject.seed)
    couples = [(ids[i], ids[j]) for i, j in enumerate(partners) if i != j]
    if not couples:
        raise UserError(
            "Every prompt gets the same answer, so there is no other answer to move it to. Ask more kinds."
        )
    settings: dict[str, Any] = {"positions": places, "num_loops": subject.num_loops}
    share = "" if blend == 1 else f", blended with weight {blend:g}"
    kinds = [(f"state of another prompt{share}", edits.replacing(blend), True)]
    if from_loop is not None:
        kinds.append((f"own state of loop {from_loop}{share}", edits.from_loop(from_loop, blend), False))
    if noise:
        kinds.append((f"noise of size {noise:g}", edits.noising(noise, subject.seed), False))
    grids = [
        edits.patch_grid(view, couples, asked.labels, make, kind, has_source=has_source, **settings)
        for kind, make, has_source in kinds
    ]
    schedules = edits.schedule_effects(view, ids, asked.labels, subject.num_loops)
    gates = (
        ()  # the gate of a dense model was never asked about its layers
        if subject.layers_per_loop
        else edits.gate_effects(trace.gate_logits, answers.numbers, partners, exit_threshold)
    )
    config = asked.model.model.config
    alike = not (subject.layers_per_loop or config.injection != "none" or config.lora_rank > 0)
    about = f"{_about(subject, len(ids), trace.num_loops)} {len(couples)} have a partner."
    section = intervene_section(grids, schedules, gates, alike)
    _write(subject.out, "intervene", about, section, {"patches": grids, "schedules": schedules, "gates": gates})


@app.command("scaling")
def scaling(
    runs: Annotated[
        Path, typer.Argument(help="A CSV of runs, a study's runs.csv, or a directory of runs of looplm train.")
    ],
    offsets: Annotated[bool, typer.Option(help="Fit the offsets of Ouro's laws, too.")] = True,
    resamples: Annotated[int, typer.Option(help="Bootstrap resamples.", min=2)] = 200,
    out: OutOption = OUT,
    seed: SeedOption = 0,
) -> None:
    """Scaling laws over size, data and loops: fits, intervals, hold-outs, total loss from its steps, Parcae's form."""
    from looplm.analysis.runs import read_runs
    from looplm.analysis.scaling import scaling_study
    from looplm.report.scaling_section import scaling_section

    points = read_runs(runs)
    study = scaling_study(points, offsets=offsets, num_resamples=resamples, seed=seed)
    about = f"{len(points)} losses of {len({point.run for point in points})} runs in {runs}."
    _write(out, "scaling", about, scaling_section(study), {"scaling": study})


def _about(subject: Subject, num_prompts: int, num_loops: int) -> str:
    per_loop = subject.layers_per_loop
    loops = f"{num_loops} loops" if per_loop is None else f"{num_loops} times {per_loop} layers taken for loops"
    return f"{num_prompts} prompts to {subject.checkpoint}, {loops}."


def _write(out: Path, name: str, about: str, section: str, found: dict[str, Any]) -> None:
    from looplm.report.analysis_page import write_analysis

    numbers, page = write_analysis(out, name, about, section, found)
    print(f"{about}\nThe page: {page}\nThe numbers: {numbers}")
