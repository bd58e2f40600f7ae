"""`looplm judge`: answers in a file, scored by another model."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from looplm.errors import UserError

if TYPE_CHECKING:
    from looplm.evaluation.judge import Judge

JUDGE_KEY = "LOOPLM_JUDGE_KEY"
"""Environment variable with the key that the judge is asked with."""


def judge(
    answers: Annotated[
        Path,
        typer.Argument(help="JSON lines with question (or prompt), answer (or text), and reference where known."),
    ],
    judge_url: Annotated[str, typer.Option(help="An OpenAI-compatible address, as http://127.0.0.1:8000/v1.")],
    judge_model: Annotated[str, typer.Option(help="Its model.")],
    rubric: Annotated[str, typer.Option(help="quality, harm, or a file with your own.")] = "quality",
    by: Annotated[str | None, typer.Option(help="Field of the lines to group the table by.")] = None,
    out: Annotated[Path, typer.Option(help="Directory of judgments and table; nothing is asked twice.")] = Path(
        "judged"
    ),
    judge_attempts: Annotated[int, typer.Option(help="Before a judgment counts as missing.", min=1)] = 5,
    judge_timeout: Annotated[float, typer.Option(help="Seconds for one reply.", min=0.1)] = 60.0,
    judge_concurrency: Annotated[int, typer.Option(help="Questions at one time.", min=1)] = 4,
) -> None:
    """Score the answers in a file from 1 to 5 by a rubric. The key, if any, comes from LOOPLM_JUDGE_KEY.

    What times out, fails or answers no score is asked for again, and in the end counted as missing, never as a score.
    """
    from looplm.evaluation.judge_scores import summarise
    from looplm.report.analysis_page import write_analysis
    from looplm.report.judge_section import judge_cells, missing_note
    from looplm.report.sections import table
    from looplm.report.task_section import markdown

    items, groups = read_answers(answers, by)
    judging = judge_of(judge_url, judge_model, rubric, out, judge_attempts, judge_timeout, judge_concurrency)
    found = judging.judge(items)
    names = sorted(set(groups))
    summaries = {
        name: summarise([one for one, group in zip(found, groups, strict=True) if group == name]) for name in names
    }
    if len(names) > 1:
        summaries = {"all": summarise(found), **summaries}
    cells = judge_cells(summaries, by or "Answers")
    text = f"{markdown(cells)}\n{missing_note(found)}\n"
    about = f"{len(items)} answers of {answers.name} by the rubric {judging.rubric.name}, judge {judge_model}."
    write_analysis(out, "judge", about, table(cells), {"scores": summaries, "judgments": found})
    (out / "judge.md").write_text(text, encoding="utf-8")
    print(text)


def judge_of(url: str, model: str, rubric: str, out: Path, attempts: int, seconds: float, concurrency: int) -> "Judge":
    """The judge that the options describe, with its judgments in `out`. Raises UserError for an impossible one."""
    from looplm.evaluation.judge import Judge
    from looplm.evaluation.judge_client import Endpoint
    from looplm.evaluation.rubrics import find_rubric

    endpoint = Endpoint(url, model, os.environ.get(JUDGE_KEY, "").strip() or None, seconds)
    return Judge(
        endpoint=endpoint,
        rubric=find_rubric(rubric),
        cache=out / "judgments.jsonl",
        attempts=attempts,
        concurrency=concurrency,
    )


def read_answers(path: Path, by: str | None) -> tuple[list[Any], list[str]]:
    """What is judged, and the group of each. Raises UserError that names a wrong line."""
    from looplm.data.text_files import read_jsonl
    from looplm.evaluation.judge import Judged

    items, groups = [], []
    for number, record in read_jsonl(path):
        question, answer = record.get("question", record.get("prompt")), record.get("answer", record.get("text"))
        reference = record.get("reference")
        if not isinstance(question, str) or not isinstance(answer, str) or not isinstance(reference, str | None):
            raise UserError(
                f'{path}, line {number}: give {{"question": "...", "answer": "..."}}, and "reference" if known.'
            )
        if by is not None and by not in record:
            raise UserError(f"{path}, line {number}: has no field {by!r} to group by.")
        items.append(Judged(question, answer, reference))
        groups.append(str(record[by]) if by is not None else "all")
    if not items:
        raise UserError(f"{path} holds no answer.")
    return items, groups
