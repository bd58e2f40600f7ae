"""Trains the checkpoint that ships with the package, `looplm/checkpoints/stdlib-small`, from this Python's own text.

    OMP_NUM_THREADS=1 python examples/train_shipped_checkpoint.py runs/shipped [--resume]

Takes 40 minutes on one CPU core; `--resume` continues after a kill. Writes the checkpoint directory, with the
recipe and the log of the run in its training.json, to `runs/shipped/stdlib-small`.
"""

import argparse
import platform
from pathlib import Path

import torch
from rich.console import Console

from looplm.data.documents import split_documents
from looplm.data.stdlib_text import load_stdlib_text
from looplm.evaluation.depth_sweep import depth_sweep
from looplm.evaluation.exit_curve import gate_statistics
from looplm.evaluation.record import DepthRecord, record
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.hf.save import save_checkpoint
from looplm.quickstart.plan import SHIPPED, SHIPPED_RECIPE, SHIPPED_THRESHOLD
from looplm.quickstart.shipped import LOG_FILE, TrainingLog, training_points
from looplm.training.telemetry import Record, Telemetry
from looplm.training.text_model import Corpus, StageResult, new_model, prepare_corpus, train_stage


def main() -> None:
    """Stage I, Stage II, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    console, recipe = Console(), SHIPPED_RECIPE
    corpus = prepare_corpus(split_documents(load_stdlib_text().documents), recipe.vocab_size, recipe.seq_len)
    model = new_model(recipe, corpus, recipe.num_loops)
    telemetry = Telemetry(options.out, console, line_seconds=60)
    stage_one = train_stage(
        model, recipe.stage_one(recipe.num_loops, "looped"), recipe, corpus, telemetry, options.out, options.resume
    )
    before = measure(model, corpus)
    console.print("after Stage I:", bits_per_byte(before), gate_statistics(before))
    stage_two = train_stage(
        model, recipe.stage_two("gate"), recipe, corpus, telemetry, options.out, options.resume, stage_index=1
    )
    after = measure(model, corpus)
    console.print("after Stage II:", bits_per_byte(after), gate_statistics(after))
    save(model, corpus, telemetry.records, before, stage_one, stage_two, options.out / SHIPPED)


def measure(model: LoopLMForCausalLM, corpus: Corpus) -> DepthRecord:
    """One recorded pass over the held-out text, in float32, two loops beyond the trained depth."""
    windows = corpus.held_out
    return record(model, windows.batches(32), windows.document_bytes, model.model.config.num_loops + 2)


def bits_per_byte(passed: DepthRecord) -> list[float]:
    """At every depth."""
    return [round(point.bits_per_byte, 4) for point in depth_sweep(passed).points]


def save(
    model: LoopLMForCausalLM,
    corpus: Corpus,
    records: list[Record],
    before: DepthRecord,
    stage_one: StageResult,
    stage_two: StageResult,
    directory: Path,
) -> None:
    """Writes the checkpoint in bfloat16 with its training log."""
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.config.exit_threshold = SHIPPED_THRESHOLD
    save_checkpoint(model, directory, corpus.tokenizer)
    log = TrainingLog(
        recipe=SHIPPED_RECIPE,
        training_tokens=stage_one.tokens,
        stage_one_seconds=stage_one.seconds,
        stage_two_seconds=stage_two.seconds,
        machine=f"one core, Python {platform.python_version()}, torch {torch.__version__.partition('+')[0]}",
        stage_one_gate=gate_statistics(before),
        training=training_points(records, "looped"),
    )
    (directory / LOG_FILE).write_text(log.model_dump_json(indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
