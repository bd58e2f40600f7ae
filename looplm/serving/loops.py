"""What every loop says of a text: one forward over the whole of it, beside the engine.

The engine reads a token out at one loop, and keeps no distribution. This reads all of them: for a page that shows
them, and for log-probabilities of prompts with alternatives. Under the cache `per_loop` it sees what the engine saw.
"""

from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from looplm.inference.exit_policy import ExitPolicy, FixedDepth, decides_per_position, exit_loops
from looplm.inference.reference import all_loops
from looplm.inference.text import Tokenizer, token_texts
from looplm.model.gate import exit_cdf
from looplm.model.language_model import LoopLM
from looplm.serving.worker import Alternatives

CHUNK = 128
"""Positions whose logits exist at one time."""


@torch.inference_mode()
def prompt_scores(
    lm: LoopLM, token_ids: list[int], exit: ExitPolicy, top: int
) -> tuple[list[float], list[Alternatives]]:
    """Log-probability of each token but the first, with `top` alternatives, every position at its own depth.

    As the engine's `prompt_logprobs`: at the last loop under policies that decide while a token is generated.
    """
    hidden, gate_logits = all_loops(lm, token_ids, exit)  # (R, 1, S, D), (R, 1, S)
    policy = exit if decides_per_position(exit) else FixedDepth(len(hidden))
    loops = exit_loops(policy, gate_logits, lm.model.config.num_loops, hidden=hidden)  # (1, S)
    chosen = hidden.gather(0, (loops - 1)[None, :, :, None].expand(1, -1, -1, hidden.shape[-1]))[0]  # (1, S, D)
    states = _past_coda(lm, chosen)[:-1]
    logprobs: list[float] = []
    alternatives: list[Alternatives] = []
    for start in range(0, len(states), CHUNK):
        spread = _log_distribution(lm, states[start : start + CHUNK])
        own = torch.tensor(token_ids[start + 1 : start + 1 + len(spread)], device=spread.device)
        logprobs += spread.gather(-1, own[:, None])[:, 0].tolist()
        alternatives += _likeliest(spread, top)
    return logprobs, alternatives


@torch.inference_mode()
def loop_views(
    lm: LoopLM, tokenizer: Tokenizer, token_ids: list[int], *, start: int, top: int, num_loops: int | None
) -> dict[str, Any]:
    """For every token from `start` on and every loop: the exit cdf, the token's log-probability, the likeliest tokens.

    The first token of a text is predicted from nothing, and has no loops.
    """
    trained = lm.model.config.num_loops
    depth = trained if num_loops is None else num_loops
    hidden, gate_logits = all_loops(lm, token_ids, FixedDepth(depth))
    # The gate has learned nothing of deeper loops: whatever it says, tokens leave at the trained depth.
    cdf = exit_cdf(gate_logits[:trained])[:, 0]  # (R, S)
    views: list[list[dict[str, Any]]] = [[] for _ in token_ids]
    first = max(start, 1)
    text_of = cache(lambda token: tokenizer.decode([token]))
    for loop in range(depth):
        states = _past_coda(lm, hidden[loop])
        for begin in range(first, len(token_ids), CHUNK):
            spread = _log_distribution(lm, states[begin - 1 : min(begin + CHUNK, len(token_ids)) - 1])
            likeliest = _likeliest(spread, top)
            for i, row in enumerate(likeliest):
                at = begin + i
                view = {
                    "exit_cdf": cdf[loop, at - 1].item() if loop < trained else 1.0,
                    "logprob": finite(spread[i, token_ids[at]].item()),
                    "top": [{"token": text_of(t), "token_id": t, "logprob": finite(p)} for t, p in row],
                }
                views[at].append(view)
    texts = token_texts(tokenizer, token_ids)
    tokens = [{"token": texts[i], "token_id": token_ids[i], "loops": views[i]} for i in range(start, len(token_ids))]
    return {"object": "loops", "num_loops": depth, "trained_loops": trained, "tokens": tokens}


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for it."""
    return logprob if logprob > -9999.0 else -9999.0


def _past_coda(lm: LoopLM, hidden: Float[Tensor, "1 S D"]) -> Float[Tensor, "S D"]:
    context = lm.model.context(torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device))
    return lm.model.run_coda(hidden, 0, context)[0]


def _log_distribution(lm: LoopLM, states: Float[Tensor, "S D"]) -> Float[Tensor, "S V"]:
    logits = lm.lm_head(states)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _likeliest(spread: Float[Tensor, "S V"], top: int) -> list[Alternatives]:
    found = spread.topk(min(top, spread.shape[-1]), dim=-1)
    pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return [list(zip(ids, values, strict=True)) for ids, values in pairs]
