"""From kept completions to pass@k: runs what has not been run, and counts."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from looplm.evaluation.code_execution import Isolation, Limits, Outcome, run_programs
from looplm.evaluation.code_problems import Problem
from looplm.evaluation.kept_lines import KeptLines
from looplm.evaluation.pass_at_k import Estimate, mean_pass_at_k
from looplm.evaluation.sampled_texts import mean_loops

KEY = ("setting", "name", "sample", "limits")
"""What tells kept outcomes apart."""


@dataclass(frozen=True)
class CodeScore:
    """All problems under one setting."""

    setting: str
    num_problems: int
    num_samples: int
    """Of each problem."""
    mean_loops: float | None
    """Loop that a token was read out at."""
    pass_at_k: dict[int, Estimate]
    failures: dict[str, int]
    """How often samples failed by kind: the exception, the limit or the refusal."""


def describe(limits: Limits, isolation: Isolation) -> str:
    """What programs were run under, in one line."""
    return f"{limits.cpu_seconds} s of CPU, {limits.memory_mb} MB, files {limits.disk_mb} MB, isolation {isolation}"


def run_missing(
    problems: Sequence[Problem],
    settings: Sequence[str],
    texts: KeptLines,
    outcomes: KeptLines,
    limits: Limits,
    isolation: Isolation,
    *,
    num_samples: int,
    chat: bool = False,
    num_processes: int = 1,
    say: Callable[[str], None] = print,
) -> None:
    """Runs each text in `texts` that `outcomes` knows nothing of under these limits; `chat` says that they are replies
    to questions."""
    under = describe(limits, isolation)
    left: list[tuple[Problem, dict[str, Any]]] = []
    for setting in settings:
        for problem in problems:
            for sample in range(num_samples):
                if (setting, problem.name, sample, under) not in outcomes.records:
                    left.append((problem, texts.records[setting, problem.name, sample]))
    say(f"{len(left)} programs to run ({under})")

    def keep(problem: Problem, record: dict[str, Any], outcome: Outcome) -> None:
        key = {"setting": record["setting"], "name": problem.name, "sample": record["sample"], "limits": under}
        outcomes.add({**key, "passed": outcome.passed, "reason": outcome.reason})

    written = []
    for problem, record in left:
        if record["text"] is None:
            keep(problem, record, Outcome(False, f"no text: {record['error']}"))
        else:
            written.append((problem, record))
    programs = [problem.program(record["text"], chat=chat) for problem, record in written]
    found = run_programs(programs, limits, isolation, num_processes)
    for (problem, record), outcome in zip(written, found, strict=True):
        keep(problem, record, outcome)


def score(
    problems: Sequence[Problem],
    setting: str,
    texts: KeptLines,
    outcomes: KeptLines,
    under: str,
    *,
    num_samples: int,
    ks: Sequence[int],
) -> CodeScore:
    """pass@k of one setting, each problem with `num_samples` samples. Raises UserError for a k beyond them."""
    samples = range(num_samples)
    ran = {p.name: [outcomes.records[setting, p.name, sample, under] for sample in samples] for p in problems}
    counts = [(num_samples, sum(one["passed"] for one in ran[problem.name])) for problem in problems]
    failed = [one["reason"] for several in ran.values() for one in several if not one["passed"]]
    written = [texts.records[setting, problem.name, sample] for problem in problems for sample in samples]
    return CodeScore(
        setting,
        len(problems),
        num_samples,
        mean_loops(written),
        {k: mean_pass_at_k(counts, k) for k in ks},
        dict(Counter(failure_kind(reason) for reason in failed).most_common()),
    )


def failure_kind(reason: str) -> str:
    """An outcome's reason without its particulars."""
    return reason if reason.startswith("refused: ") else reason.partition(":")[0]
