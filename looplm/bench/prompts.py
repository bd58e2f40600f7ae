"""What checkpoints are asked to continue: text or questions of the kind they know; exits and drafts depend on it."""

from collections.abc import Mapping
from typing import Any

from looplm.analysis.prompts import generated_prompts
from looplm.bench.caches import load_texts
from looplm.data.recipe import DataRecipe
from looplm.errors import UserError
from looplm.hf.load import load_tokenizer


def text_prompts(checkpoint: str, count: int, num_tokens: int) -> list[list[int]]:
    """Beginnings of what the standard library's text holds out, in the checkpoint's tokens."""
    held_out = DataRecipe.model_validate({"sources": [{"kind": "stdlib", "part": "held_out"}]})
    return load_texts(load_tokenizer(checkpoint), held_out, count, num_tokens - 1, 1).token_ids.tolist()


def task_prompts(function: str, arguments: Mapping[str, Any], count: int, num_tokens: int) -> list[list[int]]:
    """The first `num_tokens` tokens of a task's questions, where they have as many.

    Raises UserError where too few of them do.
    """
    asked = generated_prompts(function, arguments, 50 * count)
    prompts = [list(prompt.token_ids[:num_tokens]) for prompt in asked if len(prompt.token_ids) >= num_tokens]
    if len(prompts) < count:
        raise UserError(f"{function} gave {len(prompts)} questions of {num_tokens} tokens; {count} are needed.")
    return prompts[:count]
