"""Texts that a model is asked for at several depths, kept on disk; only those that are missing are generated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from looplm.errors import UserError
from looplm.evaluation.kept_lines import KeptLines
from looplm.inference import Engine, ExitPolicy, GenerationResult, SamplingParams

KEY = ("setting", "name", "sample")
"""What tells kept texts apart."""


@dataclass(frozen=True)
class AskedText:
    """One prompt, and how it is continued; the seed is that of `generate_missing`."""

    name: str
    """Of the prompt, and of its way of decoding where there are several."""
    token_ids: list[int]
    sampling: SamplingParams


def generate_missing(
    engine: Engine,
    exits: Mapping[str, ExitPolicy],
    asked: Sequence[AskedText],
    kept: KeptLines,
    *,
    num_samples: int = 1,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> None:
    """Brings `kept` up to `num_samples` texts of every prompt under every policy, by the policy's name.

    A text depends on its seed alone, so that a run that was interrupted ends as one that was not. A prompt that
    breaks the model gets a record without a text, which says why in `error`. Raises UserError for one that with its
    answer goes over the context.
    """
    check_length(asked, engine.max_len)
    for setting, exit in exits.items():
        missing = [
            (one, sample)
            for one in asked
            for sample in range(num_samples)
            if (setting, one.name, sample) not in kept.records
        ]
        say(f"{setting}: {len(asked) * num_samples - len(missing)} texts are there, {len(missing)} to write")
        if not missing:
            continue
        numbers = {one.name: number for number, one in enumerate(asked)}
        # More samples, or other depths, leave the seeds of what is there alone.
        sampling = [replace(one.sampling, seed=seed + (numbers[one.name] << 24) + sample) for one, sample in missing]
        results = engine.generate([one.token_ids for one, _ in missing], sampling, exit)
        for (one, sample), result in zip(missing, results, strict=True):
            kept.add({"setting": setting, "name": one.name, "sample": sample, **text_record(result)})


def check_length(asked: Sequence[AskedText], max_len: int) -> None:
    """Raises UserError for a prompt that with its answer goes over the context."""
    for one in asked:
        length, most = len(one.token_ids), one.sampling.max_tokens
        if length + most > max_len:
            raise UserError(
                f"The prompt {one.name} has {length} tokens; with {most} of answer that is over the {max_len} "
                "positions of the context. Give a smaller --max-tokens."
            )


def text_record(result: GenerationResult) -> dict[str, Any]:
    """What is kept of one text."""
    if result.finish_reason == "error":
        return {"text": None, "error": result.error, "num_tokens": 0, "mean_loops": None, "finish_reason": "error"}
    loops = result.loops
    return {
        "text": result.text,
        "error": None,
        "num_tokens": len(loops),
        "mean_loops": sum(loops) / len(loops) if loops else None,
        "finish_reason": result.finish_reason,
    }


def mean_loops(records: Sequence[dict[str, Any]]) -> float | None:
    """Loop that a token was read out at, over all tokens of `records`; None without a token."""
    tokens = sum(record["num_tokens"] for record in records)
    loops = sum(record["num_tokens"] * (record["mean_loops"] or 0.0) for record in records)
    return loops / tokens if tokens else None


def check_samples(num_samples: int, temperature: float) -> None:
    """Raises UserError for several samples that would all be the same."""
    if num_samples > 1 and temperature == 0:
        raise UserError(
            f"{num_samples} samples at temperature 0 are one text {num_samples} times; give --temperature."
        )
