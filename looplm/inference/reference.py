"""The slow oracle: no cache, all loops of the whole text for every new token, and then the policy's choice.

What the engine gives on an exact path, in tokens, depths and log-probabilities, is what this gives. The strategies
that approximate have an oracle of their own, `reference_shared`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looplm.inference.exit_policy import ExitPolicy, FixedDepth, decides_per_position, exit_loops
from looplm.inference.sampling import SamplingParams, make_generator, penalised, sample, token_logprobs
from looplm.model.language_model import LoopLM


@dataclass(kw_only=True, frozen=True)
class ReferenceResult:
    """What one prompt is continued with."""

    token_ids: list[int]
    loops: list[int]
    """The loop, from 1, at which each was read out."""
    logprobs: list[float]
    prompt_logprobs: list[float]
    """Of each prompt token but the first."""


@torch.inference_mode()
def generate(
    lm: LoopLM,
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    exit: ExitPolicy,
    *,
    end_token_ids: Collection[int] = (),
    sample_index: int = 0,
    forced_loops: Sequence[int] | None = None,
) -> ReferenceResult:
    """Continues one prompt until `max_tokens`, one of `end_token_ids` or one of `sampling.stop_token_ids`.

    Strings in `sampling.stop` are not looked at. `sample_index` chooses among the n samples of a seed. With
    `forced_loops` the tokens leave at these loops, one after another, whatever the policy would say.
    """
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else end_token_ids)}
    generator = make_generator(sampling, sample_index)
    token_ids: list[int] = []
    loops: list[int] = []
    logprobs: list[float] = []
    while len(token_ids) < sampling.max_tokens and not (token_ids and token_ids[-1] in ends):
        text = [*prompt_token_ids, *token_ids]
        forced = None if forced_loops is None else forced_loops[len(loops)]
        logits, loop = next_logits(lm, text, exit, num_prompt=len(prompt_token_ids), read_at=loops, forced=forced)
        token = pick(logits[0], sampling, generator, text)
        logprobs += token_logprobs(logits, torch.tensor([token])).tolist()
        token_ids.append(token)
        loops.append(loop)
    scores = prompt_logprobs(lm, prompt_token_ids, exit)
    return ReferenceResult(token_ids=token_ids, loops=loops, logprobs=logprobs, prompt_logprobs=scores)


def pick(
    logits: Float[Tensor, " V"], sampling: SamplingParams, generator: torch.Generator, text: Sequence[int]
) -> int:
    """The token that follows `text`."""
    logits = penalised(logits, float(sampling.repetition_penalty), text)
    return int(sample(logits[None], [sampling], [generator]))


def next_logits(
    lm: LoopLM,
    token_ids: Sequence[int],
    exit: ExitPolicy,
    *,
    num_prompt: int | None = None,
    read_at: Sequence[int] = (),
    forced: int | None = None,
) -> tuple[Float[Tensor, "1 V"], int]:
    """Logits after `token_ids`, and the loop they are read out at.

    Every position is read out at the loop its own gate values (or changes) choose; a coda runs over these states.
    Policies that decide on distributions or time read out the prompt's positions but the last, `num_prompt` - 1, at
    the last loop; those from there on were read out at `read_at`. `forced` is the loop of the last position.
    """
    hidden, gate_logits = all_loops(lm, token_ids, exit)
    trained, deepest = lm.model.config.num_loops, len(hidden)
    if decides_per_position(exit):
        loops = exit_loops(exit, gate_logits, trained, hidden=hidden)  # (1, S)
    else:
        before = (len(token_ids) if num_prompt is None else num_prompt) - 1
        loops = torch.tensor([[deepest] * before + [*read_at, deepest]], device=hidden.device)
    if forced is not None:
        loops[0, -1] = forced
    elif exit.needs == "logits":
        logits = []
        for loop in range(1, deepest + 1):
            loops[0, -1] = loop
            logits.append(read_out(lm, hidden, loops)[:, -1])
        loops[0, -1] = exit_loops(exit, gate_logits[:, :, -1], trained, logits=torch.stack(logits))
    return read_out(lm, hidden, loops)[:, -1], int(loops[0, -1])


def prompt_logprobs(lm: LoopLM, token_ids: Sequence[int], exit: ExitPolicy) -> list[float]:
    """Log-probability of each token of a prompt but the first, every position read out at its own loop."""
    hidden, gate_logits = all_loops(lm, token_ids, exit)
    policy = exit if decides_per_position(exit) else FixedDepth(len(hidden))
    loops = exit_loops(policy, gate_logits, lm.model.config.num_loops, hidden=hidden)
    return token_logprobs(read_out(lm, hidden, loops)[0, :-1], torch.tensor(token_ids[1:], dtype=torch.long)).tolist()


def all_loops(
    lm: LoopLM, token_ids: Sequence[int], exit: ExitPolicy
) -> tuple[Float[Tensor, "R 1 S D"], Float[Tensor, "R 1 S"]]:
    """Hidden states and gate logits of every loop that `exit` may reach, at every position."""
    model = lm.model
    input_ids = torch.tensor([list(token_ids)], device=model.embed_tokens.weight.device)
    context = model.context(input_ids)
    results = list(model.loops(model.encode(input_ids, context), exit.max_loops(model.config.num_loops), context))
    return torch.stack([r.hidden for r in results]), torch.stack([r.gate_logits for r in results])


def read_out(lm: LoopLM, hidden: Float[Tensor, "R 1 S D"], loops: Int[Tensor, "1 S"]) -> Float[Tensor, "1 S V"]:
    """Logits with every position read out at its own loop, through the coda."""
    chosen = hidden.gather(0, (loops - 1)[None, :, :, None].expand(1, -1, -1, hidden.shape[-1]))[0]  # (1, S, D)
    context = lm.model.context(torch.zeros(chosen.shape[:2], dtype=torch.long, device=hidden.device))
    return lm.lm_head(lm.model.run_coda(chosen, 0, context))
