"""What the options of `looplm eval` mean: settings, tasks and files."""

from typing import TYPE_CHECKING

from looplm.cli.exit_settings import exits_of, parts, whole_numbers
from looplm.errors import UserError

if TYPE_CHECKING:
    from looplm.evaluation.presets import Preset
    from looplm.evaluation.setting import Setting
    from looplm.evaluation.task_plan import TaskChoice

CURVE_RULES = ("gate", "hidden-diff", "kl")


def settings_of(
    num_loops: str | None,
    exit_threshold: str | None,
    exit: str | None,
    kv_cache: str,
    max_gen_toks: str | None,
    trained: int,
    *,
    stage_one: bool = False,
) -> "list[Setting]":
    """Every depth, threshold and rule with every cache strategy and length. Raises UserError for an impossible one."""
    from looplm.cli.generate_options import check_kv_cache
    from looplm.evaluation.setting import all_settings
    from looplm.model.flops import CacheStrategy

    exits = list(exits_of(num_loops, exit_threshold, exit, trained).values())
    strategies: list[CacheStrategy] = [check_kv_cache(one) for one in parts(kv_cache)]
    lengths = whole_numbers("--max-gen-toks", max_gen_toks)
    if any(one < 1 for one in lengths):
        raise UserError(f"--max-gen-toks is {max_gen_toks!r}; answers have at least one token.")
    return all_settings(exits, strategies, lengths or [None], stage_one=stage_one)


def curve_rules(text: str | None) -> tuple[str, ...]:
    """The rules of --curve. Raises UserError for another name."""
    found = parts(text)
    if unknown := [one for one in found if one not in CURVE_RULES]:
        raise UserError(f"--curve names {', '.join(unknown)}; choose among {', '.join(CURVE_RULES)}.")
    return tuple(found)


def choices_of(
    tasks: str | None,
    preset: "Preset | None",
    num_fewshot: int | None,
    metric: str | None,
    task_data: list[str] | None,
    allow_code: bool,
) -> "tuple[list[TaskChoice], list[str]]":
    """The tasks that are asked, and a line on each benchmark of the preset that is not.

    Raises UserError where nothing is left to ask, or data are given for a task that is not asked.
    """
    from looplm.evaluation.task_plan import TaskChoice

    known = {one.task: one for one in preset.tasks} if preset is not None else {}
    notes = (
        [] if preset is None or tasks is not None else [f"{name}: {why}." for name, why in preset.elsewhere.items()]
    )
    names = parts(tasks)
    if tasks is None:
        names = [one.task for one in known.values() if allow_code or not one.runs_code]
        notes += [
            f"{one.task} runs generated code: see `looplm code`, or give --allow-code-execution."
            for one in known.values()
            if one.runs_code and not allow_code
        ]
    data = files_of(task_data)
    if unknown := [task for task in data if task not in names]:
        raise UserError(f"--task-data gives data for {', '.join(unknown)}, which is not among the tasks.")
    found = []
    for name in names:
        own = known.get(name)
        shots = num_fewshot if num_fewshot is not None or own is None else own.num_fewshot
        shown = metric if metric is not None or own is None else own.metric
        found.append(TaskChoice(task=name, num_fewshot=shots, metric=shown, data=data.get(name, {})))
    return found, notes


def files_of(task_data: list[str] | None) -> dict[str, dict[str, str]]:
    """TASK=FILE, or TASK:SPLIT=FILE, as files by task and split. Raises UserError for anything else."""
    found: dict[str, dict[str, str]] = {}
    for one in task_data or []:
        name, _, file = one.partition("=")
        task, _, split = name.partition(":")
        if not task or not file:
            raise UserError(f"--task-data is {one!r}; give TASK=FILE, or TASK:SPLIT=FILE for another split than test.")
        found.setdefault(task, {})[split or "test"] = file
    return found
