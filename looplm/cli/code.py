"""`looplm code`: pass@k of one checkpoint on programming problems, at many depths."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from looplm.cli.exit_settings import (
    ExitThresholds,
    NumLoops,
    OtherRules,
    exits_of,
    load_for,
    warn_beyond,
    whole_numbers,
)
from looplm.errors import UserError

if TYPE_CHECKING:
    from looplm.evaluation.code_execution import Limits
    from looplm.evaluation.code_problems import Problem
    from looplm.evaluation.kept_lines import KeptLines


def code(
    problems: Annotated[
        Path, typer.Option(help="JSON lines in the form of HumanEval or of MBPP.", show_default=False)
    ],
    checkpoint: Annotated[
        str | None, typer.Argument(help="A directory or hub name; none with --canonical.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory of texts and scores; what is there is not made again.")] = Path(
        "code"
    ),
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run what the model writes; nothing runs without this.")
    ] = False,
    canonical: Annotated[
        bool, typer.Option("--canonical", help="Run the file's own solutions: tells whether problems are sound.")
    ] = False,
    num_loops: NumLoops = None,
    exit_threshold: ExitThresholds = None,
    exit: OtherRules = None,
    kv_cache: Annotated[
        str, typer.Option(help="How keys of several loops are kept: per_loop (exact), fill, last, mean or first.")
    ] = "per_loop",
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask through the chat template; the reply's first block of code counts.")
    ] = False,
    samples: Annotated[int, typer.Option(help="Texts for each problem.", min=1)] = 1,
    k: Annotated[str, typer.Option(help="Which pass@k, with commas.")] = "1",
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token; 0 for one sample and 0.8 for several.")
    ] = None,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that hold this share.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a text.", min=1)] = 512,
    limit: Annotated[int | None, typer.Option(help="The first so many problems.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same texts.", min=0)] = 0,
    cpu_seconds: Annotated[int, typer.Option(help="Most CPU time of a program; three times that by the clock.")] = 5,
    memory_mb: Annotated[int, typer.Option(help="Most memory of a program, in 2^20 bytes.")] = 1024,
    processes: Annotated[int, typer.Option(help="Programs that run at one time.", min=1)] = 1,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default=False)] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 ...; the checkpoint's own if left out.")] = None,
) -> None:
    """Let CHECKPOINT write programs at every depth, run them against their tests, and count: pass@k.

    Programs run in processes of their own, without network where the kernel allows it; docs/judge.md says what that
    protects from.
    """
    from looplm.cli.analyze_inputs import encoder
    from looplm.evaluation.code_execution import Limits
    from looplm.evaluation.code_problems import read_problems
    from looplm.evaluation.kept_lines import KeptLines, check_plan, file_digest, model_digest
    from looplm.evaluation.pass_at_k import pass_at_k
    from looplm.evaluation.sampled_texts import KEY, AskedText, check_samples, generate_missing
    from looplm.hf.load import load_tokenizer
    from looplm.inference import SamplingParams

    check_allowed(allow_code_execution)
    if (checkpoint is None) != canonical or (canonical and chat):
        raise UserError("Give either a CHECKPOINT, or --canonical to run the file's own solutions (without --chat).")
    ks = whole_numbers("--k", k)
    for one in ks or [0]:
        pass_at_k(samples, 0, one)
    chosen = temperature if temperature is not None else 0.8 if samples > 1 else 0.0
    check_samples(samples, chosen)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=chosen, top_p=top_p)
    limits = Limits(cpu_seconds=cpu_seconds, wall_seconds=3 * cpu_seconds + 1, memory_mb=memory_mb)
    asked = read_problems(problems)[:limit]
    plan = {
        "problems": file_digest(problems), "checkpoint": checkpoint, "kv_cache": kv_cache, "temperature": chosen,
        "top_p": top_p, "max_tokens": max_tokens, "chat": chat, "seed": seed, "device": device or "cpu",
        "dtype": dtype,
    }  # fmt: skip
    if checkpoint is None:
        check_plan(out, plan)
        texts = KeptLines(out / "texts.jsonl", KEY)
        settings = keep_canonical(asked, texts, samples)
    else:
        engine = load_for(checkpoint, device, dtype, kv_cache)
        exits = exits_of(num_loops, exit_threshold, exit, engine.model.model.config.num_loops)
        warn_beyond(exits, engine.model.model.config.num_loops)
        check_plan(
            out, plan | {"weights": model_digest(engine.model.model, engine.model.lm_head)}
        )  # now that nothing is wrong with it
        texts = KeptLines(out / "texts.jsonl", KEY)
        encode = encoder(load_tokenizer(checkpoint), chat)
        prompts = [
            AskedText(one.name, encode(one.question), sampling)
            if chat
            else AskedText(one.name, encode(one.prompt), replace(sampling, stop=one.stop))
            for one in asked
        ]
        generate_missing(engine, exits, prompts, texts, num_samples=samples, seed=seed)
        settings = list(exits)
        del engine  # its memory is not needed while programs run
    runs = Runs(asked, settings, texts, limits, samples, chat)
    run_and_report(out, runs, ks, processes, checkpoint or "the file's own solutions")


@dataclass(frozen=True)
class Runs:
    """What is run, and how."""

    asked: "Sequence[Problem]"
    settings: "Sequence[str]"
    texts: "KeptLines"
    limits: "Limits"
    samples: int
    chat: bool


def check_allowed(allowed: bool) -> None:
    """Raises UserError unless programs may be run."""
    if not allowed:
        raise UserError(
            "looplm code runs programs that a model has written. They are walled in as well as this machine allows, "
            "which is no virtual machine: read docs/judge.md, then add --allow-code-execution."
        )


def keep_canonical(asked: "Sequence[Problem]", texts: "KeptLines", samples: int) -> list[str]:
    """The file's own solutions as texts of a setting, which is returned."""
    made = {"setting": "canonical", "error": None, "num_tokens": 0, "mean_loops": None, "finish_reason": "stop"}
    for problem in asked:
        for sample in range(samples):
            if ("canonical", problem.name, sample) not in texts.records:
                texts.add({**made, "name": problem.name, "sample": sample, "text": problem.canonical})
    return ["canonical"]


def run_and_report(out: Path, runs: Runs, ks: "Sequence[int]", processes: int, what: str) -> None:
    """Runs programs that have not been run, and writes table, page and numbers."""
    from looplm.evaluation.code_execution import find_isolation
    from looplm.evaluation.code_results import KEY, describe, run_missing, score
    from looplm.evaluation.kept_lines import KeptLines
    from looplm.report.analysis_page import write_analysis
    from looplm.report.code_section import code_cells, code_section
    from looplm.report.task_section import markdown

    isolation = find_isolation()
    if isolation == "process":
        typer.echo(
            "looplm: warning: the kernel refuses namespaces, so network and files are kept from programs by a hook "
            "only, which a hostile one can get around. Run this in a container or virtual machine.",
            err=True,
        )
    under, outcomes = describe(runs.limits, isolation), KeptLines(out / "outcomes.jsonl", KEY)
    run_missing(
        runs.asked, runs.settings, runs.texts, outcomes, runs.limits, isolation, num_samples=runs.samples,
        chat=runs.chat, num_processes=processes,
    )  # fmt: skip
    scores = [
        score(runs.asked, one, runs.texts, outcomes, under, num_samples=runs.samples, ks=ks) for one in runs.settings
    ]
    table = f"{markdown(code_cells(scores))}\n{under}\n"
    (out / "code.md").write_text(table, encoding="utf-8")
    about = f"{len(runs.asked)} problems, {runs.samples} sample(s) each, by {what}."
    write_analysis(out, "code", about, code_section(scores, under), {"under": under, "scores": scores})
    print(table)
