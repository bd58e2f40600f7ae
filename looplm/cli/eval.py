"""`looplm eval`: lm-eval's tasks at many depths, thresholds and cache strategies of one checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from looplm.errors import UserError

if TYPE_CHECKING:
    from looplm.evaluation.lm_eval_adapter import Setting


def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="A directory or hub name.", show_default=False)],
    tasks: Annotated[str, typer.Option(help="lm-eval's tasks, with commas.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Directory of the scores; what is there is not measured again.")] = Path(
        "evaluation"
    ),
    num_loops: Annotated[
        str | None, typer.Option(help="Depths, with commas, also beyond the trained one; 1 to R if nothing is given.")
    ] = None,
    exit_threshold: Annotated[str | None, typer.Option(help="Thresholds of the gate, with commas.")] = None,
    kv_cache: Annotated[str, typer.Option(help="Cache strategies of generation, with commas.")] = "per_loop",
    num_fewshot: Annotated[int | None, typer.Option(help="Examples; the task's own number if left out.")] = None,
    limit: Annotated[int | None, typer.Option(help="Questions of each task.", min=1)] = None,
    include_path: Annotated[Path | None, typer.Option(help="Folder with YAML tasks of your own.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the checkpoint's chat template.")] = False,
    batch_size: Annotated[int, typer.Option(help="Rows of a forward.", min=1)] = 8,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default=False)] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 ...; the checkpoint's own if left out.")] = None,
    seed: Annotated[int, typer.Option(help="Of few-shot examples.", min=0)] = 0,
) -> None:
    """Score CHECKPOINT on tasks at every depth. Log-likelihood tasks pay one forward for all of them."""
    try:
        from looplm.evaluation.lm_eval_adapter import Batching, LoopLMAdapter
        from looplm.evaluation.task_sweep import TaskPlan, sweep
    except ModuleNotFoundError as error:
        raise UserError(f"looplm eval needs lm-eval ({error.name} is missing): pip install 'looplm[eval]'.") from None
    from looplm.report.analysis_page import write_analysis
    from looplm.report.task_section import markdown, score_cells, tasks_section

    adapter = LoopLMAdapter(checkpoint, batch_size=batch_size, device=device, dtype=dtype)
    settings = settings_of(num_loops, exit_threshold, kv_cache, adapter.trained_loops)
    deepest = max(one.exit.max_loops(adapter.trained_loops) for one in settings)
    adapter.batching = Batching(batch_size, deepest)
    plan = TaskPlan(
        checkpoint=checkpoint, tasks=tuple(task.strip() for task in tasks.split(",")), num_fewshot=num_fewshot,
        limit=limit, chat=chat, include_path=None if include_path is None else str(include_path), seed=seed,
    )  # fmt: skip
    found = sweep(adapter, plan, settings, out / "settings")
    text = markdown(score_cells(found))
    (out / "scores.md").write_text(text, encoding="utf-8")
    about = f"{', '.join(plan.tasks)} on {checkpoint}."
    write_analysis(out, "scores", about, tasks_section(found), {"plan": plan, "settings": found})
    print(text)


def settings_of(num_loops: str | None, exit_threshold: str | None, kv_cache: str, trained: int) -> "list[Setting]":
    """Every depth and threshold with every cache strategy. Raises UserError for an impossible one."""
    from looplm.cli.generate_options import check_kv_cache
    from looplm.evaluation.lm_eval_adapter import Setting
    from looplm.inference import ExitPolicy, FixedDepth, QuantileExit
    from looplm.model.flops import CacheStrategy

    if num_loops is None and exit_threshold is None:
        num_loops = ",".join(map(str, range(1, trained + 1)))
    exits: list[ExitPolicy] = [FixedDepth(int(one)) for one in numbers("--num-loops", num_loops, whole=True)]
    exits += [QuantileExit(one) for one in numbers("--exit-threshold", exit_threshold, whole=False)]
    strategies: list[CacheStrategy] = [check_kv_cache(one.strip()) for one in kv_cache.split(",")]
    return [Setting(exit, strategy) for strategy in strategies for exit in exits]


def numbers(option: str, text: str | None, *, whole: bool) -> list[float]:
    """Numbers with commas between them. Raises UserError for anything else."""
    try:
        return [int(one) if whole else float(one) for one in (text or "").split(",") if one.strip()]
    except ValueError:
        raise UserError(f"{option} is {text!r}; give {'whole numbers' if whole else 'numbers'} with commas.") from None
