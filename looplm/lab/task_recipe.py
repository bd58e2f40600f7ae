"""What a recipe and a study name of a task's module, as `looplm.lab.fold:documents`: made once for all tasks."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from looplm.lab.task import Task, TaskDocuments, task_tokenizer
from looplm.lab.task_evaluation import task_figures
from looplm.model.language_model import LoopLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class SeededTask(Task, Protocol):
    """A task one of whose fields seeds what is held out, and its documents as well."""

    @property
    def seed(self) -> int:
        """Not negative."""
        ...


class RecipeFunctions(NamedTuple):
    """Functions of a task's fields, which raise UserError for fields out of range, TypeError for unknown ones."""

    documents: Callable[..., TaskDocuments]
    """Training documents, for a source of `kind: generator, format: tokens`."""
    tokenizer: Callable[..., "PreTrainedTokenizerFast"]
    """The tokenizer of the same task (:func:`~looplm.lab.task.task_tokenizer`)."""
    measure: Callable[..., dict[str, Any]]
    """(model, tokenizer, fields): what the model has learnt (:func:`~looplm.lab.task_evaluation.task_figures`)."""


def recipe_functions(task_class: Callable[..., SeededTask]) -> RecipeFunctions:
    """The functions of one kind of task, to stand in its module: `documents, tokenizer, measure = ...`."""

    def documents(**fields: int) -> TaskDocuments:
        task = task_class(**fields)
        return TaskDocuments(task, task.seed)

    def tokenizer(**fields: int) -> "PreTrainedTokenizerFast":
        return task_tokenizer(task_class(**fields))

    def measure(model: LoopLM, tokenizer: object = None, **fields: int) -> dict[str, Any]:
        del tokenizer  # a study passes it to every measure; the questions are tokens already
        return task_figures(model, task_class(**fields))

    return RecipeFunctions(documents, tokenizer, measure)
