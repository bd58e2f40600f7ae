"""The quickstart's phases, in order: look at the shipped checkpoint, train a new model, fold digits, report."""

import os
import platform
import shutil
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from looplm.data.documents import DocumentSplit, split_documents
from looplm.data.evaluation_windows import EvaluationWindows
from looplm.data.stdlib_text import load_stdlib_text
from looplm.errors import UserError
from looplm.evaluation.exit_curve import TABLE_THRESHOLDS, exit_curve, gate_statistics
from looplm.evaluation.record import DepthRecord, record
from looplm.hf.load import load, load_tokenizer
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.hf.save import files_to_keep, save_checkpoint
from looplm.inference import Engine, QuantileExit, SamplingParams
from looplm.inference.text import token_texts
from looplm.lab.fold import FoldTask
from looplm.lab.fold_recipe import fold_config, fold_stages, train_fold
from looplm.lab.task_evaluation import evaluate_task
from looplm.model.flops import count_parameters
from looplm.quickstart.plan import Plan
from looplm.quickstart.progress import Progress, expected_seconds
from looplm.quickstart.shipped import read_training_log, shipped_directory, training_points
from looplm.report.assemble import text_model, twin_model
from looplm.report.depth_text import depth_text, legend
from looplm.report.html import write_report
from looplm.report.sample import sample_counts
from looplm.report.schema import (
    Command,
    FoldModel,
    Machine,
    QuickstartReport,
    Sample,
    SampleToken,
    TextModel,
)
from looplm.report.terminal import print_report
from looplm.training.distributed import cpu_has_bf16
from looplm.training.telemetry import Telemetry
from looplm.training.text_model import Corpus, TextRecipe, new_model, prepare_corpus, train_stage, training_rows
from looplm.training.trainer import Trainer

SAMPLE_PROMPT = "def read_lines(path):\n"
PROBE_STEPS = 16


def check_writable(out: Path) -> None:
    """Makes `out`; raises UserError now rather than after ten minutes when something cannot be written there."""
    files_to_keep(out.resolve() / "model")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise UserError(f"Nothing can be written to {out}: {error.strerror}. Choose another --out.") from error


def fresh_telemetry(out: Path, console: Console) -> Telemetry:
    """Telemetry of this run in `out`. What an earlier run wrote there is removed, since its files are appended to."""
    directory = out / "telemetry"
    (directory / "telemetry.jsonl").unlink(missing_ok=True)
    shutil.rmtree(directory / "tensorboard", ignore_errors=True)
    return Telemetry(directory, console)


def run(plan: Plan, out: Path, console: Console, *, smoke: bool) -> QuickstartReport:
    """Everything the quickstart does; writes the new model to `out/model` and the report to `out`."""
    progress = Progress(console, expected_seconds(plan, smoke))
    with progress.phase("The shipped checkpoint"):
        split = split_documents(load_stdlib_text(plan.corpus_bytes).documents)
        split = replace(split, held_out=split.held_out[: plan.held_out_documents])
        shipped = look_at_shipped(plan, split, console)
    telemetry = fresh_telemetry(out, console)
    trained = train_text(plan, split, out, progress, telemetry)
    with progress.phase("Folding digits"):
        fold = train_fold_model(plan, telemetry)
    with progress.phase("Report"):
        report = QuickstartReport(
            shipped=shipped,
            trained=trained,
            fold=fold,
            machine=machine(),
            phases=tuple(progress.phases),
            next_commands=next_commands(out),
            smoke=smoke,
        )
        json_path, html_path = write_report(report, out)
    print_report(report, console)
    console.print(f"\nThe whole report, with plots: {html_path}\nEvery number: {json_path}\n", soft_wrap=True)
    console.print("[bold]Three commands to try next[/bold]")
    for command in report.next_commands:
        console.print(f"  {command.command}\n    {command.explanation}", soft_wrap=True, markup=False, highlight=False)
    return report


def look_at_shipped(plan: Plan, split: DocumentSplit, console: Console) -> TextModel:
    """Loads the shipped checkpoint, lets it write a little, and measures it on this machine's held-out text."""
    directory = shipped_directory()
    model, tokenizer, log = load(directory, dtype="float32"), load_tokenizer(directory), read_training_log()
    corpus = prepare_corpus(split, len(tokenizer), log.recipe.seq_len, tokenizer)
    passed = measure(model, corpus.held_out, plan)
    sample = write_sample(model, tokenizer, passed, plan)
    show_sample(sample, log.recipe.num_loops, console)
    hours = (log.stage_one_seconds + log.stage_two_seconds) / 3600
    return text_model(
        name="The shipped checkpoint",
        description=(
            f"Ships with the package. Trained on the standard library's own text for {hours:.1f} hours on "
            f"{log.machine}; the documents it is measured on were held out then too."
        ),
        config=model.model.config,
        record=passed,
        stage_one_gate=log.stage_one_gate,
        training_tokens=log.training_tokens,
        training_seconds=log.stage_one_seconds + log.stage_two_seconds,
        training=log.training,
        sample=sample,
    )


def show_sample(sample: Sample, num_loops: int, console: Console) -> None:
    """The text, each token in the style of the loop it left at, and what it claimed and cost."""
    loops = [token.exit_loops for token in sample.tokens]
    colours = console.color_system is not None
    console.print(depth_text(sample.prompt, [token.text for token in sample.tokens], loops, colours), soft_wrap=True)
    console.print(legend(loops, num_loops, colours))
    console.print(sample_counts(sample), style="italic", highlight=False)


def train_text(plan: Plan, split: DocumentSplit, out: Path, progress: Progress, telemetry: Telemetry) -> TextModel:
    """Trains a tokenizer, a looped model, its one-loop twin and its gate, and measures all of it."""
    with progress.phase("Preparing text"):
        corpus = prepare_corpus(split, plan.text.vocab_size, plan.text.seq_len)
        recipe = fit_to_time(plan, corpus)
        progress.console.print(
            f"{len(split.train)} documents, {corpus.train.num_text_bytes / 1e6:.1f} MB, "
            f"{corpus.train.num_tokens:,} tokens of {corpus.train.bytes_per_token:.2f} bytes; "
            f"{recipe.num_steps} steps of {recipe.batch_size * recipe.seq_len} tokens."
        )
    with progress.phase("Training"):
        model = new_model(recipe, corpus, recipe.num_loops)
        stage_one = train_stage(model, recipe.stage_one(recipe.num_loops, "looped"), recipe, corpus, telemetry)
    with progress.phase("One-loop twin"):
        twin = new_model(recipe, corpus, num_loops=1)
        twin_stage = train_stage(twin, recipe.stage_one(1, "one-loop twin"), recipe, corpus, telemetry)
    with progress.phase("Training the gate"):
        before = gate_statistics(measure(model, corpus.held_out, plan, extra_loops=0))
        stage_two = train_stage(model, recipe.stage_two("gate"), recipe, corpus, telemetry)
    with progress.phase("Measuring"):
        passed = measure(model, corpus.held_out, plan)
        twin_pass = measure(twin, corpus.held_out, plan, extra_loops=0)
        save_checkpoint(model, out / "model", corpus.tokenizer)
        return text_model(
            name="A new model",
            description=(
                f"Trained just now on {corpus.train.num_text_bytes / 1e6:.1f} MB of the standard library's text, "
                "with Stage I (model and gate) and Stage II (gate alone)."
            ),
            config=model.model.config,
            record=passed,
            stage_one_gate=before,
            training_tokens=stage_one.tokens,
            training_seconds=stage_one.seconds + stage_two.seconds,
            training=training_points(telemetry.records, "looped"),
            twin=twin_model(
                config=twin.model.config,
                record=twin_pass,
                looped_record=passed,
                training_tokens=twin_stage.tokens,
                training_seconds=twin_stage.seconds,
            ),
            sample=write_sample(model, corpus.tokenizer, passed, plan),
        )


def train_fold_model(plan: Plan, telemetry: Telemetry) -> FoldModel:
    """Trains and measures the fold task's model."""
    task = FoldTask()
    config = fold_config(task)
    stages = fold_stages(num_steps=plan.fold_steps, gate_steps=plan.fold_gate_steps)
    began = time.monotonic()
    model = train_fold(task, config, stages, telemetry)
    seconds = time.monotonic() - began
    found = evaluate_task(model, task, thresholds=(0.3, 0.5, 0.9))
    twin = train_fold(task, fold_config(task, 1), fold_stages(1, num_steps=plan.fold_steps), telemetry)
    return FoldModel(
        description=(
            f"One layer of width {config.hidden_size} with {config.num_loops} loops, trained on 1 to {task.max_k} "
            "lookups; only the answer is ever shown to it, and a tenth of the expressions never. Then the gate alone."
        ),
        num_parameters=count_parameters(model.model.config).total,
        training_steps=plan.fold_steps + plan.fold_gate_steps,
        training_seconds=seconds,
        trained_loops=found.trained_loops,
        groups=found.groups,
        gate=found.gate,
        exits=found.exits,
        twin_accuracy=tuple(evaluate_task(twin, task, 1).accuracy[:, 0].tolist()),
        training=training_points(telemetry.records, stages[0].name),
    )


def fit_to_time(plan: Plan, corpus: Corpus) -> TextRecipe:
    """The plan's recipe with as many steps as this machine makes in `text_seconds`, within the plan's bounds.

    The pace is the median over some steps of a throw-away model: a moment's stutter must not halve the run.
    """
    recipe = plan.text
    stage = recipe.stage_one(recipe.num_loops, "pace")
    trainer = Trainer(new_model(recipe, corpus, recipe.num_loops), stage, training_rows(recipe, corpus), Telemetry())
    seconds: list[float] = []
    for _ in range(PROBE_STEPS):
        began = time.perf_counter()
        trainer.train_step()
        seconds.append(time.perf_counter() - began)
    pace = median(seconds[PROBE_STEPS // 4 :])  # the first steps warm up
    steps = max(plan.min_steps, min(recipe.num_steps, round(plan.text_seconds / pace)))
    return recipe.model_copy(update={"num_steps": steps})


def measure(
    model: LoopLMForCausalLM, windows: EvaluationWindows, plan: Plan, extra_loops: int | None = None
) -> DepthRecord:
    """One recorded pass over held-out text, some loops beyond the trained depth."""
    num_loops = model.model.config.num_loops + (plan.extra_loops if extra_loops is None else extra_loops)
    with torch.autocast("cpu", torch.bfloat16) if cpu_has_bf16() else nullcontext():
        return record(model, windows.batches(32), windows.document_bytes, num_loops)


def write_sample(
    model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase, passed: DepthRecord, plan: Plan
) -> Sample:
    """A sampled text at the threshold whose mean depth lies midway between one loop and all."""
    threshold = middle_threshold(passed)
    engine = Engine(model, tokenizer)
    sampling = SamplingParams(max_tokens=plan.sample_tokens, temperature=0.7, top_p=0.9, seed=0, ignore_eos=True)
    (result,) = engine.generate([SAMPLE_PROMPT], sampling, QuantileExit(threshold))
    texts = token_texts(tokenizer, result.token_ids)
    return Sample(
        prompt=SAMPLE_PROMPT,
        exit_threshold=threshold,
        tokens=tuple(
            SampleToken(text=text, exit_loops=exit_loops, token_loops=token_loops)
            for text, exit_loops, token_loops in zip(texts, result.loops, result.token_loops, strict=True)
        ),
        weight_passes=engine.stats.weight_passes,
    )


def middle_threshold(passed: DepthRecord) -> float:
    """The round threshold whose mean claimed depth is nearest (1 + R) / 2."""
    points = exit_curve(passed, TABLE_THRESHOLDS)
    middle = (1 + passed.gated_loops()) / 2
    return min(points, key=lambda point: abs(point.mean_loops - middle)).threshold


def machine() -> Machine:
    """What this runs on."""
    return Machine(
        looplm_version=version("looplm"),
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        num_threads=torch.get_num_threads(),
    )


def next_commands(out: Path) -> tuple[Command, ...]:
    """Three things to try, as they can be typed here: an environment that is not activated is not on the path."""
    looplm = "looplm" if shutil.which("looplm") else os.path.relpath(Path(sys.executable).with_name("looplm"))
    model = out / "model"
    return (
        Command(
            command=f'{looplm} generate --prompt "def read_lines(" --exit-threshold 0.2 --temperature 0.7 --seed 0 '
            "--show-depth",
            explanation="Text from the shipped checkpoint, each token marked with the loop it left at.",
        ),
        Command(command=f"{looplm} info {model}", explanation="Parameters, FLOPs and cache of your new model."),
        Command(
            command=f'{looplm} generate {model} --prompt "import " --num-loops 1',
            explanation="Your model at one loop; try 2, 4 and 6.",
        ),
    )
