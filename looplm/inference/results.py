"""What comes out of the engine: results, pieces of a text as it is written, and counts of the work."""

from dataclasses import dataclass

from looplm.inference.request import FinishReason, Request
from looplm.inference.text import TextStream, Tokenizer, final_text


@dataclass(kw_only=True, frozen=True)
class GenerationResult:
    """One continuation of one prompt. With the cache `per_loop`: the text and the depths of running all loops and
    then selecting.

    Exactly in float64; in float32 and bfloat16 wherever the margin of choice exceeds rounding. The same holds of the
    other prompts of the call: a result does not depend on them. (`Deadline` depends on time, and so on everything.)
    """

    index: int
    """Of the prompt in the list that was given."""
    sample: int
    """Which of the prompt's n samples."""
    prompt_token_ids: list[int]
    token_ids: list[int]
    """All generated tokens, the one that ended the text included."""
    text: str | None
    """Their text, without special tokens, the stop string and what follows it. None without a tokenizer."""
    logprobs: list[float] | None
    """Log-probability of each token under the model itself, before temperature and filters; None unless asked for."""
    prompt_logprobs: list[float] | None
    """The same of each prompt token but the first, read out at the depth the policy gives its position (at the last
    loop under ConfidenceExit and Deadline); None unless asked for."""
    loops: list[int]
    """Claimed depth: the loop, 1 to R, at which each token was read out."""
    token_loops: list[int]
    """Loops computed in the end at the position each token was read out at, catch-up for later tokens included."""
    rejected_token_loops: int
    """Loops computed beside these at positions of drafts that did not stand."""
    finish_reason: FinishReason
    error: str | None = None
    """What went wrong, for "error"; the reason a screen gave, for "screened"."""


@dataclass(kw_only=True, frozen=True)
class Piece:
    """What a step has added to a text that is being streamed. Texts of all pieces join to the result's text."""

    index: int
    sample: int
    text: str
    """Held back while it may be part of a stop string, or of a character whose bytes are not complete."""
    token_ids: list[int]
    loops: list[int]
    finish_reason: FinishReason | None
    """Of the whole, with its last piece."""


@dataclass(kw_only=True)
class EngineStats:
    """What an engine has done since it was made, or since its `stats` were replaced. Prompts are counted apart."""

    weight_passes: int = 0
    """Applications of the core's weights in decoding, however many rows each carried."""
    token_loops: int = 0
    """Positions times loops computed in decoding, drafts that did not stand included; padding is not counted."""
    head_reads: int = 0
    """Rows read by the LM head in decoding: one a token, and one more a loop under ConfidenceExit, one a draft."""
    draft_head_reads: int = 0
    """Rows read by the head of a part of the vocabulary instead (`Speculation.draft_vocab`)."""
    prompt_weight_passes: int = 0
    prompt_token_loops: int = 0
    prompt_head_reads: int = 0
    prompt_tokens: int = 0
    shared_prompt_tokens: int = 0
    """Of these, how many had been computed before, for another sample or a prompt that begins alike."""
    generated_tokens: int = 0
    claimed_loops: int = 0
    """Sum over generated tokens of the loop they were read out at."""
    drafted_tokens: int = 0
    """Drafts that were tested."""
    accepted_tokens: int = 0
    cache_bytes: int = 0
    """Keys and values there was room for, at most."""
    cache_bytes_in_use: int = 0
    """Most bytes of keys and values that held something at one time, seen when prompts are read or requests leave."""
    state_bytes: int = 0
    """Room for states that wait for deeper loops and what goes with them, at most."""

    @property
    def mean_loops(self) -> float:
        """Mean claimed depth of a generated token; nan before there is one."""
        return self.claimed_loops / self.generated_tokens if self.generated_tokens else float("nan")

    @property
    def acceptance(self) -> float:
        """Share of the tested drafts that stood; nan before there is one."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else float("nan")


def result_of(request: Request, tokenizer: Tokenizer | None) -> GenerationResult:
    """The result of a request that has finished."""
    assert request.finish_reason is not None
    sampling, text = request.sampling, None
    if tokenizer is not None:
        ended = request.token_ids and request.token_ids[-1] in request.end_token_ids
        shown = request.token_ids[:-1] if ended else request.token_ids
        text = final_text(tokenizer, shown, sampling.stop)
    return GenerationResult(
        index=request.index,
        sample=request.sample,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=request.token_ids,
        text=text,
        logprobs=request.logprobs if sampling.logprobs else None,
        prompt_logprobs=request.prompt_logprobs if sampling.prompt_logprobs else None,
        loops=request.loops,
        token_loops=request.token_loops(),
        rejected_token_loops=request.rejected_token_loops(),
        finish_reason=request.finish_reason,
        error=request.error,
    )


def next_piece(request: Request, text: TextStream) -> Piece | None:
    """What `request` has written since `text` was last brought up to date; None if there is nothing new to tell."""
    first = len(text.token_ids)
    new = request.token_ids[first:]
    shown = ""
    for token in new:
        if token not in request.end_token_ids:
            shown += text.add(token)
        else:
            text.token_ids.append(token)
    if request.finish_reason is not None:
        shown += text.finish()
    if not new and not shown and request.finish_reason is None:
        return None
    return Piece(
        index=request.index,
        sample=request.sample,
        text=shown,
        token_ids=new,
        loops=request.loops[first:],
        finish_reason=request.finish_reason,
    )
