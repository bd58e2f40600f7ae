"""A file of prompts to a file of answers, one JSON object a line, resumable after an interruption."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from looplm.errors import UserError

START = b'{"index": '
"""How every answer begins in the file."""

SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
"""Sampling parameters that an answer is marked with."""

if TYPE_CHECKING:
    from looplm.inference import Engine, ExitPolicy, GenerationResult, SamplingParams, Speculation


def answer_file(
    input: Path,
    output: Path,
    depth: dict[str, Any],
    sampling: "SamplingParams",
    policy: "ExitPolicy | None",
    load_engine: Callable[[], "Engine"],
    speculation: "Speculation | None" = None,
) -> None:
    """Answers every prompt of `input` that `output` has no answer to yet; each answer is appended at once.

    The files are checked before the model is loaded. An answer has the prompt's `index` (its line, from 0), `prompt`,
    `text`, `token_ids`, `loops`, `token_loops`, `finish_reason`, and the `settings` it was made with, those of `depth`
    and of `sampling`. Raises UserError for a malformed line (its number is said), for answers to other prompts or with
    other settings, when `output` cannot be written, is no regular file or is `input`. A file that does not hold
    answers to `input` is left as it is. A prompt that is over the context, or for which the model gives logits that
    are not finite, gets no answer; the others do, and a UserError at the end names its line.
    """
    settings = depth | {name: getattr(sampling, name) for name in SAMPLING}
    prompts = [read_prompt(input, number, line) for number, line in enumerate(read_lines(input), start=1)]
    if not prompts:
        raise UserError(f'{input} is empty; give one JSON object a line, such as {{"prompt": "Once upon"}}.')
    check_output(input, output)
    with writing(output), output.open("ab+") as file:
        answered = answered_indices(output, file, prompts, settings)
    left = [index for index in range(len(prompts)) if index not in answered]
    if answered:
        print(f"{len(answered)} of {len(prompts)} prompts are answered already.")
    if left:
        failed: dict[int, str] = {}
        engine = load_engine()
        token_ids = tokenised(input, prompts, left, sampling, engine, failed)
        results = answers(token_ids, sampling, policy, engine, speculation)
        with writing(output), output.open("ab") as file:
            for index, result in zip(token_ids, results, strict=True):
                if result.finish_reason == "error":
                    failed[index] = result.error or "The model failed."
                    continue
                record = answer_record(index, prompts[index], settings, result)
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
                file.flush()
        if failed:
            raise unanswered(input, failed)
    print(f"{len(prompts)} answers in {output}")


def unanswered(input: Path, failed: dict[int, str]) -> UserError:
    """What to say of the prompts that have no answer: their lines, and why the first of them has none."""
    lines = sorted(failed)
    named = ", ".join(str(index + 1) for index in lines[:5]) + (" ..." if len(lines) > 5 else "")
    return UserError(
        f"{input}, line {named}: no answer. {failed[lines[0]]} Answers to other prompts are kept; run again to answer "
        "what is left."
    )


def check_output(input: Path, output: Path) -> None:
    """Raises UserError unless `output` is new or a regular file, and another one than `input`."""
    with writing(output):
        if not output.exists():
            return
        same, regular = output.samefile(input), output.is_file()
    if same:
        raise UserError(f"--input and --output are the same file, {output}; choose another one for the answers.")
    if not regular:
        raise UserError(f"{output} cannot be written as answers: it is no regular file. Choose another --output.")


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Turns a failure to write `output` into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{output} cannot be written: {error.strerror}. Answers written so far are kept; run again to go on."
        ) from None


def tokenised(
    input: Path,
    prompts: list[str],
    left: list[int],
    sampling: "SamplingParams",
    engine: "Engine",
    failed: dict[int, str],
) -> dict[int, list[int]]:
    """Token ids of the prompts numbered in `left`, in order. Those that are too long go to `failed`, with the reason.

    Raises UserError that names the line of a prompt that has no tokens.
    """
    from looplm.inference.capacity import DoesNotFit

    token_ids: dict[int, list[int]] = {}
    for index in left:
        try:
            token_ids[index] = engine.prompt_token_ids(prompts[index], sampling)
        except DoesNotFit as error:
            failed[index] = str(error)
        except UserError as error:
            raise UserError(f"{input}, line {index + 1}: {error}") from None
    return token_ids


def answers(
    token_ids: dict[int, list[int]],
    sampling: "SamplingParams",
    policy: "ExitPolicy | None",
    engine: "Engine",
    speculation: "Speculation | None",
) -> Iterator["GenerationResult"]:
    """Generates for prompts by their number, in order."""
    # A seed of its own for every prompt, and the same one when a run is resumed.
    seeded = [
        sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + index) for index in token_ids
    ]
    return engine.generate(list(token_ids.values()), seeded, policy, speculation=speculation)


def answer_record(index: int, prompt: str, settings: dict[str, Any], result: "GenerationResult") -> dict[str, Any]:
    """One line of the output."""
    return {
        "index": index,
        "prompt": prompt,
        "text": result.text,
        "token_ids": result.token_ids,
        "loops": result.loops,
        "token_loops": result.token_loops,
        "finish_reason": result.finish_reason,
        "settings": settings,
    }


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file, without empty ones at its end. Raises UserError when it cannot be read."""
    try:
        return decode_lines(path, path.read_bytes().rstrip())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None


def decode_lines(path: Path, content: bytes) -> list[str]:
    """The lines of `content`, read from `path`. Raises UserError that names the line that is not UTF-8."""
    try:
        return content.decode().split("\n") if content else []
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: the text is not UTF-8. Save it as UTF-8.") from None


def read_object(path: Path, number: int, line: str) -> dict[str, Any]:
    """The JSON object in a line. Raises UserError that names file and line."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {number}: not valid JSON ({error.msg} at column {error.colno}).") from None
    except RecursionError:
        raise UserError(f"{path}, line {number}: the JSON is nested too deeply to be read.") from None
    except ValueError as error:  # a whole number of thousands of digits
        raise UserError(f"{path}, line {number}: the JSON cannot be read ({error}).") from None
    if not isinstance(record, dict):
        raise UserError(f"{path}, line {number}: holds a {type(record).__name__}; it must be a JSON object.")
    return record


def read_prompt(path: Path, number: int, line: str) -> str:
    """The prompt in a line of the input. Raises UserError that names file and line."""
    prompt = read_object(path, number, line).get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise UserError(f'{path}, line {number}: "prompt" is {shown(prompt)}; it must be a text that is not empty.')
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(
            f'{path}, line {number}: "prompt" is not valid Unicode text: it has half of a surrogate pair.'
        ) from None
    return prompt


def shown(value: object) -> str:
    """A JSON value for a message: simple ones as they are, others by their type."""
    return f"a {type(value).__name__}" if isinstance(value, list | dict) else repr(value)


# --- Going on ---------------------------------------------------------------------------------------------------


def answered_indices(path: Path, file: BinaryIO, prompts: list[str], settings: dict[str, Any]) -> set[int]:
    """Which prompts an output, open for reading and appending, has answers to.

    A last line that was cut short when the run was killed is taken out, once everything before it is known to be
    answers. Raises UserError, and leaves the file as it is, unless all lines are answers to `prompts` with these
    `settings`.
    """
    file.seek(0)
    whole, newline, rest = file.read().rpartition(b"\n")
    lines = (decode_lines(path, whole) or [""]) if newline else []
    answered = {
        check_answer(path, number, read_object(path, number, line), prompts, settings)
        for number, line in enumerate(lines, start=1)
    }
    if rest:  # every answer ends its line, so this one was cut short
        check_cut_answer(path, len(lines) + 1, rest, prompts, settings, bool(answered))
        file.truncate(len(whole + newline))
    return answered


def check_answer(path: Path, number: int, record: dict[str, Any], prompts: list[str], settings: dict[str, Any]) -> int:
    """The index of the prompt that `record` answers. Raises UserError when it is no answer made with `settings`."""
    index = record.get("index")
    if type(index) is not int or not 0 <= index < len(prompts) or record.get("prompt") != prompts[index]:
        raise UserError(f"{path}, line {number}: answers another prompt than the input has. Choose another --output.")
    found = record.get("settings")
    if found != settings:
        had = found if isinstance(found, dict) else {}
        names = [name for name in settings | had if name not in had or had[name] != settings.get(name)]
        options = ", ".join(f"{name} {shown(had[name])}" if name in had else f"no {name}" for name in names)
        raise UserError(
            f"{path}, line {number}: was made with other options ({options}). Use the same ones to go on, or choose "
            "another --output."
        )
    return index


def check_cut_answer(
    path: Path, number: int, rest: bytes, prompts: list[str], settings: dict[str, Any], after_answers: bool
) -> None:
    """Raises UserError unless a line without an end may be an answer that was cut short, which is safe to take out."""
    try:
        record = json.loads(rest)
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict):  # whole but for its end
        check_answer(path, number, record, prompts, settings)
    elif record is not None or not (after_answers or rest.startswith(START) or START.startswith(rest)):
        raise UserError(f"{path}, line {number}: is no answer, nor the beginning of one. Choose another --output.")
