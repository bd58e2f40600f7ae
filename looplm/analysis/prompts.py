"""What a model is asked: prompts from files, pairs of questions or tasks, with right answers where given."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from looplm.data.packing import IGNORE_INDEX
from looplm.data.recipe import GeneratorSource
from looplm.data.sources import GeneratorRecords
from looplm.data.text_files import checked_text, read_jsonl, read_text
from looplm.errors import UserError

PAIR_TEMPLATE = (
    'Question 1: "{first}"\nQuestion 2: "{second}"\n'
    "Do these two questions ask the same thing? Answer yes or no.\nAnswer:"
)
PAIR_LABELS = ("yes", "no")

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class AskedPrompt:
    """One prompt; the model's answer is read at its last token."""

    token_ids: tuple[int, ...]
    answer: str | int | None = None
    """The right one, where known: a label or text, or the id of its token."""
    score: float | None = None
    """A figure to colour its point by."""
    level: int | None = None
    """How hard it is, where known: lookups, operations, hops."""


def read_prompts(file: Path, encode: Encode | None) -> list[AskedPrompt]:
    """Prompts of a JSONL file, one a line, or of a text file, one a line.

    A line of JSONL holds `prompt` (text) or `input_ids`, and may hold `answer`, `score`, `level` and, with
    `input_ids`, `labels` as a training document has them: the prompt then ends before the last labelled token, its
    answer.
    Raises UserError for a line that is not so, and for text where there is no tokenizer (`encode` None).
    """
    if file.suffix != ".jsonl":
        lines = [(number, line) for number, line in enumerate(read_text(file).split("\n"), start=1) if line.strip()]
        found = [_asked({"prompt": line}, f"{file}, line {number}", encode) for number, line in lines]
    else:
        found = [_asked(record, f"{file}, line {number}", encode) for number, record in read_jsonl(file)]
    if not found:
        raise UserError(f"{file} holds no prompts.")
    return found


def generated_prompts(function: str, arguments: Mapping[str, Any], count: int) -> list[AskedPrompt]:
    """The first `count` documents of a generator, cut before their answers.

    function: `package.module:function` that yields `input_ids` and `labels`, as a recipe's source names it. What a
    model was trained on it has seen; questions that a task of the lab holds out are asked by `looplm.cli`.
    """
    source = GeneratorSource(kind="generator", format="tokens", function=function, arguments=dict(arguments))
    return [_asked(record.fields, record.where, None) for record in islice(GeneratorRecords(source), count)]


def read_pairs(
    file: Path, encode: Encode, *, count: int | None = None, seed: int = 0, template: str = PAIR_TEMPLATE
) -> list[AskedPrompt]:
    """Pairs of questions with a yes/no answer: Quora Question Pairs' TSV, a CSV, or JSONL.

    Columns `question1`, `question2` and, where known, `is_duplicate` (0 or 1), whatever else there is. `count` pairs
    are drawn at random, all when None. Raises UserError for other columns or values.
    """
    rows: list[tuple[str, Mapping[str, Any]]]
    if file.suffix == ".jsonl":
        rows = [(f"{file}, line {number}", record) for number, record in read_jsonl(file)]
    else:
        text = read_text(file)
        delimiter = "\t" if "\t" in text.partition("\n")[0] else ","
        reader = csv.DictReader(text.splitlines(keepends=True), delimiter=delimiter)
        rows = [(f"{file}, line {reader.line_num}", row) for row in reader]
    if not rows:
        raise UserError(f"{file} holds no pairs.")
    if count is not None and count < len(rows):
        chosen = np.random.default_rng(seed).choice(len(rows), size=count, replace=False)
        rows = [rows[i] for i in sorted(chosen.tolist())]
    found = []
    for where, row in rows:
        first, second = checked_text(row, "question1", where), checked_text(row, "question2", where)
        text = template.format(first=first.strip(), second=second.strip())
        found.append(AskedPrompt(tuple(encode(text)), _duplicate(row.get("is_duplicate"), where)))
    return found


def _duplicate(value: Any, where: str) -> str | None:
    if value is None or value == "":
        return None
    if str(value) not in ("0", "1"):
        raise UserError(f"{where}: is_duplicate is {value!r}; it must be 0 or 1.")
    return PAIR_LABELS[0] if str(value) == "1" else PAIR_LABELS[1]


def _asked(record: Mapping[str, Any], where: str, encode: Encode | None) -> AskedPrompt:
    answer, score, level = record.get("answer"), record.get("score"), record.get("level")
    if not isinstance(answer, str | int | None) or isinstance(answer, bool):
        raise UserError(f"{where}: answer is {answer!r}; it must be a text or a token id.")
    if score is not None and (not isinstance(score, int | float) or isinstance(score, bool)):
        raise UserError(f"{where}: score is {score!r}; it must be a number.")
    if level is not None and type(level) is not int:
        raise UserError(f"{where}: level is {level!r}; it must be a whole number.")
    if "input_ids" in record:
        ids = _whole(record["input_ids"], "input_ids", where)
        if "labels" in record:
            ids, answer = _cut(ids, _whole(record["labels"], "labels", where), where)
    elif encode is None:
        raise UserError(f"{where}: the prompt is text, and the checkpoint has no tokenizer; give input_ids.")
    else:
        ids = encode(checked_text(record, "prompt", where))
    if not ids:
        raise UserError(f"{where}: the prompt is empty.")
    return AskedPrompt(tuple(ids), answer, score, level)


def _whole(value: Any, name: str, where: str) -> list[int]:
    if not isinstance(value, Sequence) or any(type(one) is not int for one in value):
        raise UserError(f"{where}: {name} must be a list of whole numbers.")
    return list(value)


def _cut(ids: list[int], labels: list[int], where: str) -> tuple[list[int], int]:
    """A document before its last labelled token, and that token."""
    labelled = [i for i, label in enumerate(labels) if label != IGNORE_INDEX]
    if len(ids) != len(labels) or not labelled or labelled[-1] == 0:
        raise UserError(f"{where}: labels must be as many as input_ids and mark an answer behind the first token.")
    return ids[: labelled[-1]], labels[labelled[-1]]


def answers_given(prompts: Iterable[AskedPrompt]) -> list[str | int] | None:
    """The right answers, where every prompt has one."""
    found = [prompt.answer for prompt in prompts]
    return [answer for answer in found if answer is not None] if None not in found else None
