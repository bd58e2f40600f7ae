"""The slow oracle: no cache, all loops of the whole text for every new token, and then the policy's choice.

What the engine gives on an exact path, in tokens, depths and log-probabilities, is what this gives.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from looplm.inference.exit_policy import ExitPolicy, exit_loops
from looplm.inference.runner import LanguageModel
from looplm.inference.sampling import SamplingParams, make_generator, sample, token_logprobs


@dataclass(kw_only=True, frozen=True)
class ReferenceResult:
    """What one prompt is continued with."""

    token_ids: list[int]
    loops: list[int]
    """The loop, from 1, at which each was read out."""
    logprobs: list[float]


@torch.inference_mode()
def generate(
    lm: LanguageModel,
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    exit: ExitPolicy,
    *,
    end_token_ids: Collection[int] = (),
    sample_index: int = 0,
) -> ReferenceResult:
    """Continues one prompt until `max_tokens`, one of `end_token_ids` or one of `sampling.stop_token_ids`.

    Strings in `sampling.stop` are not looked at. `sample_index` chooses among the n samples of a seed.
    """
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else end_token_ids)}
    generator = make_generator(sampling, sample_index)
    token_ids: list[int] = []
    loops: list[int] = []
    logprobs: list[float] = []
    while len(token_ids) < sampling.max_tokens and not (token_ids and token_ids[-1] in ends):
        logits, loop = next_logits(lm, [*prompt_token_ids, *token_ids], exit)
        token = sample(logits, [sampling], [generator])
        logprobs += token_logprobs(logits, token).tolist()
        token_ids += token.tolist()
        loops.append(loop)
    return ReferenceResult(token_ids=token_ids, loops=loops, logprobs=logprobs)


def next_logits(lm: LanguageModel, token_ids: Sequence[int], exit: ExitPolicy) -> tuple[Float[Tensor, "1 V"], int]:
    """Logits after `token_ids`, and the loop they are read out at.

    Every position is read out at the loop its own gate values choose; a coda runs over these states.
    """
    model = lm.model
    input_ids = torch.tensor([token_ids], device=model.embed_tokens.weight.device)
    context = model.context(input_ids)
    trained_loops = model.config.num_loops
    results = list(model.loops(model.encode(input_ids, context), exit.max_loops(trained_loops), context))
    loops = exit_loops(exit, torch.stack([result.gate_logits for result in results]), trained_loops)  # (1, S)
    hidden = torch.stack([result.hidden for result in results])  # (R, 1, S, D)
    chosen = hidden.gather(0, (loops - 1)[None, :, :, None].expand(1, -1, -1, hidden.shape[-1]))[0]  # (1, S, D)
    return lm.lm_head(model.run_coda(chosen, 0, context)[:, -1]), int(loops[0, -1])
