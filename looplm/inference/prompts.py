"""From what a user gives to requests: prompts, lists of parameters, and all that can be wrong with them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from looplm.errors import UserError
from looplm.inference.capacity import DoesNotFit
from looplm.inference.exit_policy import ExitPolicy, FixedDepth, HiddenDiffExit, QuantileExit
from looplm.inference.sampling import SamplingParams, check_text, whole_numbers
from looplm.inference.text import Tokenizer
from looplm.model.language_model import LoopLM
from looplm.model.looped import LoopedTransformer


@dataclass(frozen=True, init=False)
class Parts:
    """A prompt in parts, each a text or token ids: examples and a question, or the turns of a chat.

    Each part is read as a prompt of its own after those before it. Where the cache keeps one set of keys for all
    loops (`last`, `mean`, `first`) it reads the kept set of earlier parts, so that a part computed once serves every
    prompt that begins with the same parts; `per_loop` and `fill` share any common beginning, and parts are joined.
    """

    parts: tuple[str | tuple[int, ...], ...]

    def __init__(self, *parts: str | Sequence[int]) -> None:
        given = tuple(part if isinstance(part, str) else tuple(whole_numbers("A part", part)) for part in parts)
        object.__setattr__(self, "parts", given)


Prompt = str | Sequence[int] | Parts


@runtime_checkable
class CheckpointModel(LoopLM, Protocol):
    """A language model with what its checkpoint has saved, as `looplm.load` returns it."""

    config: Any
    """With `eos_token_id` (one, several or None), `exit_threshold` (None: all loops) and `exit_epsilon` (or None)."""
    generation_config: Any
    """With `eos_token_id`."""


def read_prompt(
    prompt: Prompt, sampling: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int, max_len: int
) -> list[list[int]]:
    """The token ids of a prompt, part by part. Raises UserError when it cannot be continued as `sampling` asks, and
    DoesNotFit when it is too long."""
    parts = prompt_parts(prompt, sampling, tokenizer, vocab_size)
    check_length(parts, sampling, max_len)
    return parts


def prompt_parts(
    prompt: Prompt, sampling: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int
) -> list[list[int]]:
    """As `read_prompt`, whatever the length."""
    given = prompt.parts if isinstance(prompt, Parts) else (prompt,)
    parts = [part_token_ids(part, tokenizer, first=not i) for i, part in enumerate(given)]
    if not parts or not all(parts):
        empty = "has an empty part" if any(parts) else "is empty"
        raise UserError(f"The prompt {empty}; give at least one token.")
    for token in (token for part in parts for token in part):
        if not 0 <= token < vocab_size:
            raise UserError(f"The prompt has the token id {token}, outside the vocabulary of {vocab_size}.")
    if sampling.stop and tokenizer is None:
        raise UserError("Stop strings need a tokenizer: give the engine one, or use stop_token_ids.")
    return parts


def check_length(parts: Sequence[list[int]], sampling: SamplingParams, max_len: int) -> None:
    """Raises DoesNotFit for a prompt that with `max_tokens` goes over the context."""
    prompt_tokens = sum(len(part) for part in parts)
    length = prompt_tokens + sampling.max_tokens
    if length > max_len:
        raise DoesNotFit(
            f"The prompt has {prompt_tokens} tokens; with max_tokens {sampling.max_tokens} that is {length}, "
            f"more than the {max_len} positions of the context. Shorten the prompt or lower max_tokens."
        )


def part_token_ids(part: object, tokenizer: Tokenizer | None, *, first: bool) -> list[int]:
    """Token ids of one part; special tokens that a tokenizer puts around a text only with the `first`."""
    if isinstance(part, str):
        if tokenizer is None:
            raise UserError("The prompt is text, but there is no tokenizer: give the engine one, or token ids.")
        check_text("The prompt", part)
        return tokenizer.encode(part) if first else tokenizer.encode(part, add_special_tokens=False)
    if isinstance(part, Sequence) and not isinstance(part, bytes | bytearray):
        return whole_numbers("The prompt", part)
    raise UserError(f"The prompt is {part!r}; it must be a string or a list of token ids.")


def listed(prompts: Any) -> list[Any]:
    """One prompt, or several, as a list. Raises UserError for anything else."""
    if isinstance(prompts, str | Parts):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray):
        raise UserError(f"The prompts are {prompts!r}; give a string, or a list of strings or lists of token ids.")
    return list(prompts)


Given = TypeVar("Given")


def one_for_each(name: str, given: Given | Sequence[Given], kind: type[Given], count: int) -> list[Given]:
    """`given` once for every prompt, or as it is when it is a list of that length. UserError when it is not."""

    def fits(one: object) -> bool:
        # A class passes for the protocol that its instances follow.
        return isinstance(one, kind) and not isinstance(one, type)

    if fits(given):
        return [given] * count  # type: ignore[list-item]
    if not isinstance(given, Sequence) or not all(fits(one) for one in given):
        raise UserError(f"{name} is {given!r}; give one {kind.__name__}, or a list with one for each prompt.")
    if len(given) != count:
        raise UserError(f"{name} has {len(given)} entries for {count} prompts; give one, or one for each prompt.")
    return list(given)


def check_model(model: object) -> None:
    """Raises UserError for what is no looped language model, or one without numbers."""
    if not isinstance(model, LoopLM) or not isinstance(model.model, LoopedTransformer):
        raise UserError(f"The model is a {type(model).__name__}; give the engine what looplm.load returns.")
    if model.model.embed_tokens.weight.is_meta:
        raise UserError("The model is on the meta device, which holds shapes and no numbers; load it on cpu or cuda.")


def model_defaults(model: LoopLM) -> tuple[frozenset[int], ExitPolicy]:
    """The end tokens and the exit rule that a checkpoint brings; none and all loops for a bare model."""
    all_loops = FixedDepth(model.model.config.num_loops)
    if not isinstance(model, CheckpointModel):
        return frozenset(), all_loops
    ends: set[int] = set()
    for given in (model.config.eos_token_id, model.generation_config.eos_token_id):
        ends.update([given] if isinstance(given, int) else given or [])
    threshold, epsilon = model.config.exit_threshold, model.config.exit_epsilon
    if epsilon is not None:
        return frozenset(ends), HiddenDiffExit(epsilon)
    return frozenset(ends), all_loops if threshold is None or threshold >= 1 else QuantileExit(threshold)
