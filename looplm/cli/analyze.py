"""`looplm analyze`: what each loop does. One recorded pass, then a page and a file of numbers for each question."""

from pathlib import Path
from typing import Annotated, Any

import typer

from looplm.cli.analyze_inputs import (
    Arguments,
    Chat,
    Checkpoint,
    Count,
    Device,
    Dtype,
    Generator,
    LabelNames,
    NumLoops,
    Out,
    PairFile,
    PromptFile,
    Seed,
    Source,
    ask,
    check_prompts,
    encoder,
    read_answers,
    token_names,
    tokenizer_of,
)
from looplm.errors import UserError

app = typer.Typer(help="Take a model's loops apart: answers, probes, states, causes; and scaling laws.")
OUT = Path("analysis")


@app.command("agreement")
def agreement(
    checkpoint: Checkpoint,
    prompts: PromptFile = None,
    pairs: PairFile = None,
    generator: Generator = None,
    arguments: Arguments = "{}",
    count: Count = 1000,
    labels: LabelNames = None,
    chat: Chat = False,
    num_loops: NumLoops = None,
    out: Out = OUT,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = 0,
) -> None:
    """Does the answer change between loops: agreement of every two loops, what each answers, and the flips."""
    from looplm.analysis.agreement import agreement as count_agreement
    from looplm.analysis.trace import record_trace
    from looplm.model.gate import exit_pdf
    from looplm.report.analysis_sections import agreement_section

    source = Source(
        prompts=prompts, pairs=pairs, generator=generator, arguments=arguments, count=count, labels=labels, chat=chat,
        seed=seed,
    )  # fmt: skip
    asked = ask(checkpoint, source, device, dtype)
    trace = record_trace(asked.model, asked.token_ids, num_loops, layers=False)
    answers = read_answers(asked, trace)
    pdf = exit_pdf(trace.gate_logits).double().mean(1).tolist()
    found = count_agreement(answers.numbers, answers.names, answers.right, pdf)
    about = f"{len(asked.prompts)} prompts to {checkpoint}, {trace.num_loops} loops."
    _write(out, "agreement", about, agreement_section(found), {"agreement": found})


@app.command("probes")
def probes(
    checkpoint: Checkpoint,
    prompts: PromptFile = None,
    pairs: PairFile = None,
    generator: Generator = None,
    arguments: Arguments = "{}",
    count: Count = 1000,
    labels: LabelNames = None,
    chat: Chat = False,
    num_loops: NumLoops = None,
    layers: Annotated[bool, typer.Option(help="Every layer; only what the head reads without it.")] = True,
    reason: Annotated[
        int | None,
        typer.Option(help="Let the model write up to so many tokens, and probe for the label it ends on.", min=1),
    ] = None,
    num_folds: Annotated[int, typer.Option(help="Folds of the cross-validation.", min=2)] = 5,
    out: Out = OUT,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = 0,
) -> None:
    """What does a state know: linear probes of every loop and layer for the answers of every loop.

    With --reason the target is the answer that the model comes to after writing, read from its state before it.
    """
    from looplm.analysis.probes import answer_targets, probe_trace
    from looplm.analysis.trace import record_trace
    from looplm.report.analysis_sections import probes_section

    source = Source(
        prompts=prompts, pairs=pairs, generator=generator, arguments=arguments, count=count, labels=labels, chat=chat,
        seed=seed,
    )  # fmt: skip
    asked = ask(checkpoint, source, device, dtype)
    trace = record_trace(asked.model, asked.token_ids, num_loops, layers=layers)
    extra: dict[str, Any] = {}
    if reason is None:
        answers = read_answers(asked, trace)
        targets = answer_targets(answers.numbers)
        extra["answers"] = list(answers.names)
    else:
        trace, targets, extra["undecided"] = _reasoned(asked, trace, reason, num_loops)
    found = probe_trace(trace, targets, num_folds=num_folds, seed=seed)
    about = f"{trace.num_points} prompts to {checkpoint}, {trace.num_loops} loops."
    _write(out, "probes", about, probes_section(found), {"probes": found, **extra})


def _reasoned(asked: Any, trace: Any, max_tokens: int, num_loops: int | None) -> tuple[Any, list[Any], int]:
    """Points and target of the prompts whose text ends on a label, and how many others there are."""
    from looplm.analysis.probes import Target
    from looplm.analysis.readout import last_label
    from looplm.inference import Engine, FixedDepth, SamplingParams

    if asked.labels is None or asked.tokenizer is None:
        raise UserError("--reason looks for a label at the end of what the model writes; give --labels.")
    engine = Engine(asked.model, asked.tokenizer)
    depth = None if num_loops is None else FixedDepth(num_loops)  # None: as the checkpoint generates
    written = engine.generate(asked.token_ids, SamplingParams(max_tokens=max_tokens), depth)
    found = [last_label(result.text or "", asked.labels.names) for result in written]
    kept = [i for i, one in enumerate(found) if one is not None]
    if not kept:
        raise UserError(f"None of the {len(found)} texts ends on a label. Give more tokens with --reason.")
    target = Target("answer after reasoning", tuple(one for one in found if one is not None))
    return trace.points(kept), [target], len(found) - len(kept)


@app.command("lens")
def lens(
    checkpoint: Checkpoint,
    prompt: Annotated[str | None, typer.Option(help="The text to look at.", show_default=False)] = None,
    token_ids: Annotated[str | None, typer.Option(help="Or its token ids, with commas.", show_default=False)] = None,
    num_loops: NumLoops = None,
    top: Annotated[int, typer.Option(help="Tokens kept of every distribution.", min=1)] = 5,
    out: Out = OUT,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """What would it say if it stopped here: the next token at every loop, layer and position of one prompt."""
    from looplm.analysis.lens import lens as look
    from looplm.analysis.prompts import AskedPrompt
    from looplm.hf.load import load
    from looplm.report.analysis_sections import lens_section

    if (prompt is None) == (token_ids is None):
        raise UserError("Give the text by --prompt, or its tokens by --token-ids.")
    tokenizer = tokenizer_of(checkpoint)
    if token_ids is not None:
        ids = [int(one) if one.strip().isdigit() else -1 for one in token_ids.split(",")]
    elif tokenizer is None:
        raise UserError(f"{checkpoint} has no tokenizer; give --token-ids.")
    else:
        ids = tokenizer.encode(prompt or "")
    if not ids:
        raise UserError("The prompt is empty; the lens needs at least one token to look at.")
    model = load(checkpoint, dtype=dtype, device=device)
    check_prompts(model, [AskedPrompt(tuple(ids))])
    found = look(model, ids, num_loops, top=top)
    seen = {token for reading in found.readings for row in reading.top_ids for token in row} | set(ids)
    texts = token_names(sorted(seen), tokenizer)
    about = f"A prompt of {len(ids)} tokens to {checkpoint}, {found.num_loops} loops."
    _write(out, "lens", about, lens_section(found, texts), {"lens": found, "texts": texts})


@app.command("geometry")
def geometry(
    checkpoint: Checkpoint,
    first: Annotated[Path, typer.Option(help="Prompts of one group: JSONL, or text with a prompt a line.")],
    second: Annotated[Path, typer.Option(help="Prompts of the other.")],
    chat: Chat = False,
    num_loops: NumLoops = None,
    beyond: Annotated[int, typer.Option(help="Loops to run for the way to a fixed point.", min=1)] = 16,
    joint: Annotated[bool, typer.Option("--joint", help="One pair of axes for all loops.")] = False,
    out: Out = OUT,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = 0,
) -> None:
    """Where states lie: two groups of prompts by loop in two principal components, and the way to a fixed point.

    Points are coloured by `score` where every prompt has one.
    """
    from looplm.analysis.geometry import geometry as measure
    from looplm.analysis.prompts import read_prompts
    from looplm.analysis.trace import record_trace
    from looplm.hf.load import load
    from looplm.report.analysis_sections import geometry_section

    tokenizer = tokenizer_of(checkpoint)
    encode = None if tokenizer is None else encoder(tokenizer, chat)
    groups = [read_prompts(file, encode) for file in (first, second)]
    asked = [prompt for group in groups for prompt in group]
    model = load(checkpoint, dtype=dtype, device=device)
    check_prompts(model, asked)
    shown = model.model.config.num_loops if num_loops is None else num_loops
    trace = record_trace(model, [list(one.token_ids) for one in asked], max(beyond, shown), layers=False)
    scores = [one.score for one in asked]
    known = [score for score in scores if score is not None]
    found = measure(
        trace.states,
        [0] * len(groups[0]) + [1] * len(groups[1]),
        (first.stem, second.stem),
        trained_loops=trace.trained_loops,
        planes=shown,
        scores=known if len(known) == len(scores) else None,
        joint=joint,
        seed=seed,
    )
    about = f"{len(groups[0])} and {len(groups[1])} prompts to {checkpoint}, {trace.num_loops} loops."
    _write(out, "geometry", about, geometry_section(found), {"geometry": found})


@app.command("intervene")
def intervene(
    checkpoint: Checkpoint,
    prompts: PromptFile = None,
    pairs: PairFile = None,
    generator: Generator = None,
    arguments: Arguments = "{}",
    count: Count = 100,
    labels: LabelNames = None,
    chat: Chat = False,
    num_loops: NumLoops = None,
    positions: Annotated[str, typer.Option(help="Positions to edit, with commas; negative ones from the end.")] = "-1",
    blend: Annotated[float, typer.Option(help="Weight of the other prompt's state; 1 replaces.")] = 1.0,
    noise: Annotated[float, typer.Option(help="Size of the noise, over the state's own.", min=0)] = 1.0,
    exit_threshold: Annotated[float, typer.Option(help="For the gate of another prompt.", min=0)] = 0.5,
    out: Out = OUT,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = 0,
) -> None:
    """What does a state cause: states and gates of another prompt, noise, skipped and repeated loops."""
    from looplm.analysis.interventions import (
        gate_effects,
        noising,
        partners_of,
        patch_grid,
        replacing,
        schedule_effects,
    )
    from looplm.analysis.trace import record_trace
    from looplm.report.analysis_sections import intervene_section

    source = Source(
        prompts=prompts, pairs=pairs, generator=generator, arguments=arguments, count=count, labels=labels, chat=chat,
        seed=seed,
    )  # fmt: skip
    places = _positions(positions)
    asked = ask(checkpoint, source, device, dtype)
    ids = asked.token_ids
    trace = record_trace(asked.model, ids, num_loops, layers=False)
    answers = read_answers(asked, trace)
    partners = partners_of(answers.numbers[-1].tolist(), seed)
    couples = [(ids[i], ids[j]) for i, j in enumerate(partners) if i != j]
    if not couples:
        raise UserError(
            "Every prompt gets the same answer, so there is no other answer to move it to. Ask more kinds."
        )
    settings: dict[str, Any] = {"positions": places, "num_loops": num_loops}
    kind = "replace" if blend == 1 else f"blend {blend:g}"
    grids = [patch_grid(asked.model, couples, asked.labels, replacing(blend), kind, **settings)]
    if noise:
        maker = noising(noise, seed)
        grids.append(
            patch_grid(asked.model, couples, asked.labels, maker, f"noise {noise:g}", has_source=False, **settings)
        )
    schedules = schedule_effects(asked.model, ids, asked.labels, num_loops)
    gates = gate_effects(trace.gate_logits, answers.numbers, partners, exit_threshold)
    config = asked.model.model.config
    knows_loops = config.injection != "none" or config.lora_rank > 0
    about = f"{len(ids)} prompts to {checkpoint}, {trace.num_loops} loops; {len(couples)} have a partner."
    section = intervene_section(grids, schedules, gates, knows_loops)
    _write(out, "intervene", about, section, {"patches": grids, "schedules": schedules, "gates": gates})


def _positions(text: str) -> list[int]:
    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise UserError(f"--positions is {text!r}; give whole numbers with commas, such as -1,-2.") from None


@app.command("scaling")
def scaling(
    runs: Annotated[Path, typer.Argument(help="A CSV of runs, or a directory that holds runs of looplm train.")],
    offsets: Annotated[bool, typer.Option(help="Fit the offsets of Ouro's laws, too.")] = True,
    resamples: Annotated[int, typer.Option(help="Bootstrap resamples.", min=2)] = 200,
    out: Out = OUT,
    seed: Seed = 0,
) -> None:
    """Scaling laws over size, data and loops: fits, intervals, hold-outs, total loss from its steps, Parcae's form."""
    from looplm.analysis.runs import read_runs
    from looplm.analysis.scaling import scaling_study
    from looplm.report.scaling_section import scaling_section

    points = read_runs(runs)
    study = scaling_study(points, offsets=offsets, num_resamples=resamples, seed=seed)
    about = f"{len(points)} losses of {len({point.run for point in points})} runs in {runs}."
    _write(out, "scaling", about, scaling_section(study), {"scaling": study})


def _write(out: Path, name: str, about: str, section: str, found: dict[str, Any]) -> None:
    from looplm.report.analysis_page import write_analysis

    numbers, page = write_analysis(out, name, about, section, found)
    print(f"{about}\nThe page: {page}\nThe numbers: {numbers}")
