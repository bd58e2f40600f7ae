"""`looplm eval`: lm-eval's tasks at many depths, exit rules and cache strategies of one checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from looplm.cli.exit_settings import ExitThresholds, NumLoops, OtherRules
from looplm.errors import UserError

if TYPE_CHECKING:
    from looplm.evaluation.depth_sweep import DepthSweep
    from looplm.evaluation.lm_eval_adapter import LoopLMAdapter
    from looplm.evaluation.task_plan import TaskPlan
    from looplm.evaluation.task_sweep import TaskResult


def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="A directory or hub name.", show_default=False)],
    tasks: Annotated[
        str | None, typer.Option(help="lm-eval's tasks, with commas; with --preset, these of it.", show_default=False)
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="A paper's tasks: ouro_base, ouro_thinking, closing_the_loop.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory of the scores; what is there is not measured again.")] = Path(
        "evaluation"
    ),
    num_loops: NumLoops = None,
    exit_threshold: ExitThresholds = None,
    exit: OtherRules = None,
    curve: Annotated[
        str | None,
        typer.Option(help="Rules (gate,hidden-diff,kl) at levels chosen to spread the mean depth of each task."),
    ] = None,
    curve_points: Annotated[int, typer.Option(help="Levels of each rule of --curve.", min=1)] = 4,
    stage_one: Annotated[
        str | None,
        typer.Option(help="The checkpoint before Stage II, for its gate.", show_default=False),
    ] = None,
    kv_cache: Annotated[str, typer.Option(help="Cache strategies of generation, with commas.")] = "per_loop",
    max_gen_toks: Annotated[
        str | None, typer.Option(help="Longest answers, in tokens, with commas; the task's own if left out.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Answers to each question that is generated: pass@n, majority of n.", min=1)
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Of sampling; the task's own if left out.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Share of the probability that is sampled from.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Examples; the task's own number if left out.")] = None,
    metric: Annotated[str | None, typer.Option(help="What tables show, e.g. exact_match,strict-match.")] = None,
    limit: Annotated[int | None, typer.Option(help="Questions of each task.", min=1)] = None,
    include_path: Annotated[Path | None, typer.Option(help="Folder with YAML tasks of your own.")] = None,
    task_data: Annotated[
        list[str] | None,
        typer.Option(help="TASK=FILE: JSON lines instead of its data set.", show_default=False),
    ] = None,
    category: Annotated[str | None, typer.Option(help="Field of a question to tell gains by, else subtasks.")] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="Held-out text to measure every loop on, as for calibrate.")
    ] = None,
    text_field: Annotated[str, typer.Option(help="Its field in .jsonl, .parquet and hub data.")] = "text",
    text_tokens: Annotated[int, typer.Option(help="Tokens of it, about.", min=100)] = 50_000,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the checkpoint's chat template.")] = False,
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Let lm-eval run generated code, without a sandbox.")
    ] = False,
    batch_size: Annotated[int, typer.Option(help="Rows of a forward.", min=1)] = 8,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default=False)] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 ...; the checkpoint's own if left out.")] = None,
    seed: Annotated[int, typer.Option(help="Of few-shot examples and samples.", min=0)] = 0,
) -> None:
    """Score CHECKPOINT on tasks at every depth. Log-likelihood tasks pay one forward for all of them."""
    if tasks is None and preset is None and not text:
        raise UserError("Give --tasks, --preset or --text: something to measure.")
    try:
        from looplm.evaluation.lm_eval_adapter import Batching, LoopLMAdapter
        from looplm.evaluation.task_sweep import Curve, Sweep
    except ModuleNotFoundError as error:
        raise UserError(f"looplm eval needs lm-eval ({error.name} is missing): pip install 'looplm[eval]'.") from None
    from looplm.cli.eval_options import choices_of, curve_rules, settings_of
    from looplm.evaluation.kept_lines import model_digest
    from looplm.evaluation.presets import load_preset
    from looplm.evaluation.task_plan import TaskPlan

    paper = None if preset is None else load_preset(preset)
    choices, notes = choices_of(tasks, paper, num_fewshot, metric, task_data, allow_code_execution)
    generation: dict[str, Any] = {} if paper is None else dict(paper.generation)
    generation |= {} if temperature is None else {"temperature": temperature}
    generation |= {} if top_p is None else {"top_p": top_p}
    several = samples or (1 if paper is None else paper.samples)
    if several > 1 and not generation.get("temperature"):
        raise UserError("Several --samples of a greedy answer are all the same; give a --temperature above 0.")
    adapter = LoopLMAdapter(checkpoint, batch_size=batch_size, device=device, dtype=dtype)
    if stage_one is not None:
        adapter.add_stage_one(stage_one)
    settings = settings_of(
        num_loops, exit_threshold, exit, kv_cache, max_gen_toks, adapter.trained_loops,
        stage_one=stage_one is not None,
    )  # fmt: skip
    deepest = max(one.exit.max_loops(adapter.trained_loops) for one in settings)
    changes = any(one.exit.needs in ("state", "logits") for one in settings)
    adapter.batching = Batching(batch_size, deepest, changes)
    plan = TaskPlan(
        checkpoint=checkpoint, tasks=tuple(choices), stage_one=stage_one, limit=limit,
        chat=chat or (paper is not None and paper.chat), generation=generation, samples=several,
        include_path=None if include_path is None else str(include_path), category_field=category,
        allow_code=allow_code_execution, seed=seed, dtype=str(adapter.looped.dtype).removeprefix("torch."),
        weights=model_digest(adapter.looped, *([] if adapter.stage_one is None else [adapter.stage_one])),
    )  # fmt: skip
    found = Sweep(adapter, plan, out / "settings").run(settings, Curve(curve_rules(curve), curve_points))
    sweep = None if not text else measure_text(adapter, text, text_field, text_tokens, deepest)
    write(adapter, plan, found, sweep, out, notes)


def measure_text(
    adapter: "LoopLMAdapter", text: list[str], text_field: str, num_tokens: int, num_loops: int
) -> "DepthSweep":
    """Every loop on held-out text."""
    from looplm.cli.calibrate import record_text
    from looplm.evaluation.depth_sweep import depth_sweep

    deepest = max(num_loops, adapter.trained_loops)
    return depth_sweep(record_text(adapter.looped, adapter.tokenizer, text, text_field, num_tokens, 512, deepest))


def write(
    adapter: "LoopLMAdapter",
    plan: "TaskPlan",
    found: "list[TaskResult]",
    sweep: "DepthSweep | None",
    out: Path,
    notes: list[str],
) -> None:
    """`scores.md`, `scores.json` and `scores.html`, and the tables on the screen."""
    from looplm.evaluation.task_gains import category_gains
    from looplm.report.analysis_page import write_analysis
    from looplm.report.page import write_whole
    from looplm.report.task_section import markdown, task_tables, tasks_section, text_table

    tasks = [choice.task for choice in plan.tasks]
    gains = {task: category_gains([one for one in found if one.task == task], adapter.trained_loops) for task in tasks}
    made = task_tables(found, gains, adapter.looped.model.config)
    made += [] if sweep is None else [text_table(sweep)]
    tables = "\n".join(markdown(cells) for cells in made) + "".join(f"\nNot measured: {note}\n" for note in notes)
    about = f"{', '.join([*tasks, *(['held-out text'] if sweep else [])])}: {plan.checkpoint}."
    numbers = {"plan": plan, "results": found, "gains": gains, "text": sweep, "not_measured": notes}
    write_analysis(out, "scores", about, tasks_section(found, made), numbers, "looplm eval:")
    write_whole(out / "scores.md", tables)
    print(tables)
