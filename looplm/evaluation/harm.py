"""How harmful a model's answers are at every depth: Ouro's safety measurement (arXiv 2510.25741, section 7.1).

Prompts of several categories are answered at depths 1 to 8, beyond the trained one too, under two ways of decoding; a
judge scores each answer from 1 to 5, and the harmfulness rate is the share of fives.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from looplm.data.text_files import read_jsonl
from looplm.errors import UserError
from looplm.evaluation.judge import Judge, Judged, Judgment
from looplm.evaluation.judge_scores import ScoreSummary, summarise
from looplm.evaluation.kept_lines import KeptLines
from looplm.evaluation.sampled_texts import AskedText
from looplm.inference import SamplingParams

ALL = "all"
"""The category of every prompt."""

DECODING = {
    "base": SamplingParams(max_tokens=128),
    "thinking": SamplingParams(max_tokens=8192, temperature=1.0, top_p=0.7),
}
"""The paper's: greedy and short for base models, sampled and long for those that reason first."""


@dataclass(frozen=True)
class HarmPrompt:
    """A request, and the kind of harm it is after."""

    prompt: str
    category: str


@dataclass(frozen=True)
class HarmScore:
    """One category at one depth, under one way of decoding."""

    decoding: str
    setting: str
    category: str
    summary: ScoreSummary


def read_harm_prompts(path: Path) -> list[HarmPrompt]:
    """The prompts of a JSON lines file with `prompt` and `category`. Raises UserError that names a wrong line."""
    found = []
    for number, record in read_jsonl(path):
        prompt, category = record.get("prompt"), record.get("category")
        if not isinstance(prompt, str) or not prompt or not isinstance(category, str | int):
            raise UserError(f'{path}, line {number}: give {{"prompt": "...", "category": "..."}}.')
        if str(category) == ALL:
            raise UserError(
                f"{path}, line {number}: the category {ALL!r} is that of all prompts; choose another name."
            )
        found.append(HarmPrompt(prompt, str(category)))
    if not found:
        raise UserError(f"{path} holds no prompt.")
    return found


def asked_texts(
    prompts: Sequence[HarmPrompt], decodings: Sequence[str], encode: Callable[[str], list[int]], max_tokens: int | None
) -> list[AskedText]:
    """Every prompt under every way of decoding, with `max_tokens` in place of the paper's unless None.

    Raises UserError for an unknown way of decoding.
    """
    if unknown := [name for name in decodings if name not in DECODING]:
        raise UserError(f"--decoding has {', '.join(unknown)}; choose from {', '.join(DECODING)}.")
    asked = []
    for decoding in decodings:
        sampling = DECODING[decoding] if max_tokens is None else replace(DECODING[decoding], max_tokens=max_tokens)
        for number, one in enumerate(prompts):
            asked.append(AskedText(text_name(decoding, number), encode(one.prompt), sampling))
    return asked


def text_name(decoding: str, number: int) -> str:
    """What an answer is kept under."""
    return f"{decoding} {number}"


def judge_answers(
    prompts: Sequence[HarmPrompt], decodings: Sequence[str], settings: Sequence[str], texts: KeptLines, judge: Judge
) -> dict[tuple[str, str], list[Judgment]]:
    """Judgments in the order of the prompts, by way of decoding and setting. No answer: missing, with the reason."""
    cells = [(decoding, setting) for decoding in decodings for setting in settings]
    items: list[Judged] = []
    for decoding, setting in cells:
        for number, one in enumerate(prompts):
            text = texts.records[setting, text_name(decoding, number), 0]["text"]
            if text is not None:
                items.append(Judged(one.prompt, text))
    scored = dict(zip(items, judge.judge(items), strict=True))
    found: dict[tuple[str, str], list[Judgment]] = {}
    for decoding, setting in cells:
        records = [texts.records[setting, text_name(decoding, number), 0] for number in range(len(prompts))]
        found[decoding, setting] = [
            Judgment(None, f"no answer: {record['error']}")
            if record["text"] is None
            else scored[Judged(one.prompt, record["text"])]
            for one, record in zip(prompts, records, strict=True)
        ]
    return found


def harm_scores(
    prompts: Sequence[HarmPrompt], judgments: Mapping[tuple[str, str], Sequence[Judgment]]
) -> list[HarmScore]:
    """A score for each way of decoding, setting and category, that of all prompts first."""
    categories = list(dict.fromkeys(one.category for one in prompts))
    found = []
    for (decoding, setting), several in judgments.items():
        found.append(HarmScore(decoding, setting, ALL, summarise(several)))
        for category in categories:
            part = [one for one, prompt in zip(several, prompts, strict=True) if prompt.category == category]
            found.append(HarmScore(decoding, setting, category, summarise(part)))
    return found
