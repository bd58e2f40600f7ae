"""A judge: another model that scores answers by a rubric. A score is kept for good, and what gave none is missing."""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Event

from looplm.evaluation.judge_client import Endpoint, NoAnswer, TryAgain
from looplm.evaluation.kept_lines import KeptLines
from looplm.evaluation.rubrics import HIGHEST, LOWEST, Rubric

LONGEST_WAIT = 60.0
"""Seconds between two attempts, also where the endpoint asks for more."""

_SCORE = re.compile(r'\s*:\s*"?(\d)(?:\.0+)?"?\s*[,}]')


@dataclass(frozen=True)
class Judged:
    """What is judged."""

    question: str
    answer: str
    reference: str | None = None


@dataclass(frozen=True)
class Judgment:
    """What a judge made of one answer."""

    score: int | None
    """None: missing."""
    said: str
    """The judge's words, or why there are none."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    """An endpoint with a rubric, and a file of judgments that were made before."""

    endpoint: Endpoint
    rubric: Rubric
    cache: Path
    attempts: int = 5
    first_wait: float = 1.0
    """Seconds after the first failure; doubled after every other."""
    concurrency: int = 4
    """Questions that are asked at one time."""

    def judge(self, items: Sequence[Judged], say: Callable[[str], None] = print) -> list[Judgment]:
        """A judgment for each item, in order; each different item is asked about once, and never again once scored.

        The cache holds neither the key nor anything that failed: missing ones are asked for again by the next call.
        Raises UserError where no question can be answered: a wrong address, key or model.
        """
        kept = KeptLines(self.cache, ("key",))
        keys = [self.key(item) for item in items]
        left = {key: item for key, item in zip(keys, items, strict=True) if (key,) not in kept.records}
        missing: dict[str, Judgment] = {}
        stop = Event()
        say(f"{len(set(keys)) - len(left)} judgments are there, {len(left)} to ask for")
        with ThreadPoolExecutor(self.concurrency) as pool:
            asked = {pool.submit(self.ask, item, stop): key for key, item in left.items()}
            try:
                for done in as_completed(asked):
                    key, judgment = asked[done], done.result()
                    if judgment.score is None:
                        missing[key] = judgment
                    else:
                        kept.add(self.record(key, judgment))
            finally:
                stop.set()
                pool.shutdown(cancel_futures=True)
        found = {key: Judgment(held["score"], held["said"]) for (key,), held in kept.records.items()}
        return [(found | missing)[key] for key in keys]

    def key(self, item: Judged) -> str:
        """The same for the same model, rubric, question, answer and reference."""
        parts = (self.endpoint.model, self.rubric.digest, item.question, item.answer, item.reference)
        return sha256(repr(parts).encode("utf-8", "replace")).hexdigest()

    def record(self, key: str, judgment: Judgment) -> dict[str, object]:
        """What the cache keeps."""
        names = {"model": self.endpoint.model, "rubric": self.rubric.name}
        return {"key": key, **names, "score": judgment.score, "said": judgment.said}

    def ask(self, item: Judged, stop: Event) -> Judgment:
        """One judgment, over as many attempts as it takes; missing after the last of them, and once `stop` is set."""
        messages, wait, why = self.rubric.messages(item.question, item.answer, item.reference), self.first_wait, ""
        for attempt in range(self.attempts):
            asked_for = None
            try:
                said = self.endpoint.ask(messages)
                score = read_score(said)
                if score is not None:
                    return Judgment(score, self.endpoint.hide(said))
                why = "a reply without a score"
            except TryAgain as reason:
                why, asked_for = str(reason), reason.wait_seconds
            except NoAnswer as reason:
                return Judgment(None, str(reason))
            if attempt + 1 < self.attempts:
                if stop.wait(min(LONGEST_WAIT, max(wait, asked_for or 0.0))):
                    break
                wait *= 2
        return Judgment(None, f"{why}, {self.attempts} attempts")


def read_score(said: str) -> int | None:
    """The score that a reply ends on; None where there is none, or one outside the rubric."""
    _, found, rest = said.rpartition('"score"')
    match = _SCORE.match(rest) if found else None
    score = int(match.group(1)) if match else None
    return score if score is not None and LOWEST <= score <= HIGHEST else None
