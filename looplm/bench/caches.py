"""What cache strategies cost in quality: held-out text, a task whose answer needs every position, and the tables."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import torch
from rich import box
from rich.table import Table

from looplm.bench.figures import Figure
from looplm.data.corpus import evaluation_documents
from looplm.data.evaluation_windows import evaluation_windows
from looplm.data.recipe import DataRecipe
from looplm.evaluation.cache_quality import CachePoint, Continuations, cache_quality, continuations, decode_forced
from looplm.hf.load import load, load_tokenizer
from looplm.inference import Engine, ExitPolicy, FixedDepth, QuantileExit
from looplm.model.flops import CacheStrategy
from looplm.model.language_model import LoopLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from looplm.lab.task import Task

STRATEGIES: tuple[CacheStrategy, ...] = get_args(CacheStrategy)
BATCH = 64
"""Questions at one time."""


@dataclass(kw_only=True, frozen=True)
class TaskPoint:
    """Questions read token by token under one strategy: the first token is the prompt."""

    strategy: CacheStrategy
    accuracy: tuple[float, ...]
    """By level."""
    mean_loops: float
    """At which the answer was read out."""

    @property
    def mean_accuracy(self) -> float:
        """All levels alike."""
        return sum(self.accuracy) / len(self.accuracy)


def task_quality(
    lm: LoopLM,
    task: "Task",
    exit: ExitPolicy,
    strategies: Sequence[CacheStrategy] = STRATEGIES,
    *,
    count: int = 200,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[TaskPoint, ...]:
    """Accuracy on `count` questions of each level, each decoded from its second token on.

    Where a question is read as a prompt instead, its answer is exact under every strategy: it is read out at the end
    of the prompt, before anything has been kept.
    """
    points: list[TaskPoint] = []
    for strategy in strategies:
        say(f"{task.name}, {strategy}")
        engine = Engine(lm, kv_cache=strategy, max_batch=BATCH, share_prefixes=False)
        found = [decode_forced(engine, task.questions(level, count, seed), 1, 1, exit) for level in task.levels]
        points.append(
            TaskPoint(
                strategy=strategy,
                accuracy=tuple(level.right.double().mean().item() for level in found),
                mean_loops=torch.cat([level.loops for level in found]).double().mean().item(),
            )
        )
    return tuple(points)


def load_texts(
    tokenizer: "PreTrainedTokenizerBase", data: "DataRecipe", num_texts: int, num_before: int, num_scored: int
) -> Continuations:
    """Held-out text, cut where decoding begins. Raises UserError where there is none of that length."""
    windows = evaluation_windows(evaluation_documents(data), tokenizer, num_before + num_scored)
    return continuations(windows, tokenizer, num_texts=num_texts, num_before=num_before, num_scored=num_scored)


def exit_quality(checkpoint: str, strategies: Sequence[CacheStrategy]) -> Iterator[Figure]:
    """What early exit costs under strategies that approximate, at the threshold saved in a trained checkpoint.

    Bits per byte of held-out text of the standard library. The size of a batch does not enter: a request gets the
    same beside any others.
    """
    model, tokenizer = load(checkpoint, dtype="float32"), load_tokenizer(checkpoint)
    exit = Engine(model).default_exit
    held_out = DataRecipe.model_validate({"sources": [{"kind": "stdlib", "part": "held_out"}]})
    texts = load_texts(tokenizer, held_out, 32, 64, 64)
    for point in cache_quality(model, texts, exit, strategies, prompts=(False,))[1:]:
        more = point.increase_bits_per_byte
        yield Figure(
            section="exit",
            what=f"{point.strategy}, loss of quality on {checkpoint}, {exit_words(exit)}",
            value=f"{more.value:+.3f} bits per byte ({more.low:.3f}, {more.high:.3f}) above "
            f"{point.bits_per_byte - more.value:.3f} of per_loop",
            number=more.value,
        )


def text_table(points: Sequence[CachePoint], exit: ExitPolicy) -> Table:
    """A row for each strategy, first with the prompt read loop by loop, then with it decoded too."""
    table = _table(f"Held-out text, {exit_words(exit)}", "prompt")
    for column in ("bytes", "bits/byte", "increase (95 %)", "accuracy", "depth"):
        table.add_column(column, justify="right")
    for prompt_shares in (False, True):
        for point in (p for p in points if p.prompt_shares == prompt_shares):
            more = point.increase_bits_per_byte
            exact = point.strategy == "per_loop"
            table.add_row(
                point.strategy,
                "decoded" if prompt_shares else "read",
                f"{point.bytes_per_token:,}",
                f"{point.bits_per_byte:.3f}",
                "" if exact else f"{more.value:+.3f} ({more.low:.3f}, {more.high:.3f})",
                f"{point.accuracy:.1%}",
                f"{point.mean_loops:.2f}",
            )
        table.add_section()
    table.caption = "Bytes: keys and values of a position. Read: loop by loop, as ever. Decoded: it shares too."
    return table


def task_table(task: "Task", points: Sequence[TaskPoint], exit: ExitPolicy) -> Table:
    """A row for each strategy, a column for each level."""
    table = _table(f"{task.name}, {exit_words(exit)}: share answered right")
    for column in (*(f"{task.level_name} = {level}" for level in task.levels), "all", "depth"):
        table.add_column(column, justify="right")
    for point in points:
        shares = (*point.accuracy, point.mean_accuracy)
        table.add_row(point.strategy, *(f"{share:.1%}" for share in shares), f"{point.mean_loops:.2f}")
    table.caption = "Questions are decoded token by token; read as a prompt, every strategy answers as per_loop does."
    return table


def exit_words(exit: ExitPolicy) -> str:
    """A policy in a title."""
    if isinstance(exit, FixedDepth):
        return f"all {exit.num_loops} loops"
    return f"exit threshold {exit.threshold:g}" if isinstance(exit, QuantileExit) else str(exit)


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", caption_justify="left",
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for column in ("cache", *columns):
        table.add_column(column)
    return table
