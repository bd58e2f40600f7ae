"""What a sweep asks, the same at every setting, and where lm-eval finds it."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from datasets.exceptions import DatasetsError
from jinja2 import TemplateError
from lm_eval.tasks import TaskManager

from looplm.errors import UserError
from looplm.evaluation.kept_lines import file_digest

TASK_ENDINGS = (".yaml", ".yml", ".py")
DATA_ENDINGS = (".json", ".jsonl", ".csv", ".parquet", ".txt")


@dataclass(frozen=True, kw_only=True)
class TaskChoice:
    """One task of lm-eval, or a group of them."""

    task: str
    num_fewshot: int | None = None
    """Examples; the task's own number when None."""
    metric: str | None = None
    """What tables and plots show: a metric of lm-eval, with its filter behind a comma where it has one. The task's
    first when None."""
    data: dict[str, str] = field(default_factory=dict)
    """Files (JSON lines) by split, instead of the task's own data set; `test` stands for the split that is asked."""


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """Everything that scores depend on beside the setting."""

    checkpoint: str
    tasks: tuple[TaskChoice, ...]
    stage_one: str | None = None
    """Checkpoint whose gate is asked too."""
    limit: int | None = None
    """Questions of each task, all when None."""
    chat: bool = False
    include_path: str | None = None
    """Folder with YAML tasks of one's own."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Sampling arguments beside the task's own: temperature, top_p, top_k, min_p."""
    samples: int = 1
    """Answers to each question of tasks that generate."""
    category_field: str | None = None
    """Field of a question's document by which gains are told; subtasks of a group when None."""
    allow_code: bool = False
    """Whether tasks may run generated code in this process, as lm-eval does it."""
    seed: int = 0
    dtype: str | None = None
    """That the model ran in."""
    weights: str | None = None
    """Digest of the model's: a path may be trained again."""

    def of_task(self, choice: TaskChoice) -> dict[str, Any]:
        """What a file of one task's scores must agree with, as JSON has it: files by what is in them, too.

        Raises UserError for a file that cannot be read.
        """
        files = [Path(file) for file in choice.data.values()]
        for file in files:
            if not file.is_file():
                raise UserError(f"{file}, given with --task-data for {choice.task}, is no file.")
        if self.include_path is not None:
            files += own_files(Path(self.include_path))
        return {**asdict(self), "tasks": asdict(choice), "files": {str(file): file_digest(file) for file in files}}


def own_files(folder: Path) -> list[Path]:
    """The tasks and functions of a folder, and the data files that its YAML names.

    Raises UserError for a folder that there is not, and a YAML file that cannot be read.
    """
    if not folder.is_dir():
        raise UserError(f"--include-path {folder} is no folder.")
    found = sorted(path for path in folder.rglob("*") if path.suffix in TASK_ENDINGS and path.is_file())
    named = []
    for path in found:
        if path.suffix != ".py":
            try:
                events = list(yaml.parse(path.read_text(encoding="utf-8")))
            except (yaml.YAMLError, UnicodeDecodeError) as error:
                raise UserError(f"{path} is no YAML: {error}.") from None
            words = [Path(event.value) for event in events if isinstance(event, yaml.ScalarEvent)]
            named += [word for word in words if word.suffix in DATA_ENDINGS and word.is_file()]
    return list(dict.fromkeys([*found, *named]))


def task_manager(plan: TaskPlan) -> TaskManager:
    """Finds the plan's tasks: in its own folder if they are all there, else among lm-eval's, which takes a while.

    Raises UserError for a task that is in neither.
    """
    asked = [choice.task for choice in plan.tasks]
    if plan.include_path is not None:
        own = TaskManager(include_path=plan.include_path, include_defaults=False)
        if set(asked) <= set(own.all_tasks):
            return own
    manager = TaskManager(include_path=plan.include_path, include_defaults=True)
    if unknown := [task for task in asked if task not in manager.all_tasks]:
        raise UserError(f"lm-eval knows no task {', '.join(unknown)}. A YAML task of your own: --include-path FOLDER.")
    return manager


def load_choice(manager: TaskManager, choice: TaskChoice, plan: TaskPlan, scratch: Path) -> dict[str, Any]:
    """lm-eval's tasks behind one choice, with its data files and shots: `tasks`, `groups`, `group_map`.

    scratch: folder for a YAML file where data are taken from files. Raises UserError where lm-eval cannot load them.
    """
    name = choice.task if not choice.data else str(with_files(manager, choice, scratch))
    try:
        loaded: dict[str, Any] = dict(manager.load([name]))
    except (OSError, ValueError, ImportError, KeyError, StopIteration, DatasetsError, TemplateError) as error:
        raise UserError(
            f"lm-eval could not load the task {choice.task}: {str(error) or type(error).__name__} Data sets come from "
            "the Hugging Face hub unless they are in its cache; give a file instead: --task-data TASK=FILE."
        ) from error
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        task.set_config(key="num_fewshot", value=own or 0 if choice.num_fewshot is None else choice.num_fewshot)
        task.set_fewshot_seed(seed=plan.seed)
        if task.get_config("output_type") == "generate_until":
            task.set_config(key="repeats", value=plan.samples)
            if plan.generation:
                task.set_config(key="generation_kwargs", value={"do_sample": True, **plan.generation}, update=True)
    return loaded


def with_files(manager: TaskManager, choice: TaskChoice, scratch: Path) -> Path:
    """A YAML file with the task as lm-eval has it, but for its data, which come from local files.

    Raises UserError for a group, or a split that the task does not use.
    """
    source = manager.task_index[choice.task].yaml_path
    config = {} if source is None else manager.task_index[choice.task].cfg or {}
    if source is None or not isinstance(config.get("task"), str):
        raise UserError(f"{choice.task} is not one task with one data set; --task-data goes with single tasks.")
    names = ("training_split", "validation_split", "test_split", "fewshot_split")
    splits = {config[name] for name in names if config.get(name)}
    asked = config.get("test_split") or config.get("validation_split")
    files = {}
    for split, file in choice.data.items():
        split = asked if split == "test" else split
        if split not in splits:
            raise UserError(f"{choice.task} has no split {split}; it has {', '.join(sorted(splits))}.")
        files[split] = str(Path(file).resolve())
    local = {
        "include": str(source.resolve()), "task": choice.task, "dataset_path": "json", "dataset_name": None,
        "dataset_kwargs": {"data_files": files},
    }  # fmt: skip
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch / f"{choice.task}.yaml"
    path.write_text(yaml.safe_dump(local), encoding="utf-8")
    return path
