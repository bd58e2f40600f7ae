"""What is sampled over HTTP is distributed as the model says: chi-square over all texts of a tiny vocabulary."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import scipy.stats
import tokenizers
import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

import looplm
from looplm.inference import reference
from looplm.inference.sampling import filtered_probabilities
from looplm.model.config import LoopedConfig
from looplm.model.looped import LoopedTransformer

WORDS = ("a", "b", "c", "d", "e")
PROMPT = [1, 2, 3]
LENGTH = 2


class TinyLM(nn.Module):
    """A model of five words in float64, with random weights and tokens that leave at every loop."""

    def __init__(self) -> None:
        super().__init__()
        config = LoopedConfig(
            vocab_size=len(WORDS),
            hidden_size=12,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=6,
            num_loops=4,
            max_position_embeddings=64,
        )
        self.model = LoopedTransformer(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.double()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5, generator=generator)
            self.model.early_exit_gate.bias.fill_(-0.5)


def tokenizer_of_words() -> PreTrainedTokenizerFast:
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model))


def exact(lm: TinyLM, params: looplm.SamplingParams, exit: Any) -> dict[tuple[int, ...], float]:
    """Every text of LENGTH tokens and its probability, from the oracle: all loops of the whole text for each token."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for text, p in texts.items():
            with torch.inference_mode():
                logits, _ = reference.next_logits(lm, [*PROMPT, *text], exit)
            for token, q in enumerate(filtered_probabilities(logits, params)[0].tolist()):
                if q > 0:
                    longer[(*text, token)] = p * q
        texts = longer
    return texts


def chi_square_p(found: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """The chance of counts as far off as these. Texts expected fewer than five times count as one."""
    total = found.total()
    frequent = [text for text, p in expected.items() if p * total >= 5]
    observed = [found[text] for text in frequent]
    wanted = [expected[text] * total for text in frequent]
    if (rest := total - sum(wanted)) > 1e-6 * total:
        observed, wanted = [*observed, total - sum(observed)], [*wanted, rest]
    assert len(wanted) > 5
    return scipy.stats.chisquare(observed, wanted).pvalue


def sampled(answer: Any) -> list[tuple[int, ...]]:
    """The tokens of each choice, of an answer or of a stream."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [tuple(choice["token_ids"]) for choice in answer.json()["choices"]]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    return [tuple(choice["token_ids"]) for choice in choices if choice["finish_reason"]]


@pytest.mark.parametrize(
    ("depth", "exit", "seeded"),
    [
        ({"num_loops": 2}, looplm.FixedDepth(2), True),
        ({"exit_threshold": 0.6}, looplm.QuantileExit(0.6), False),
        ({"num_loops": 4, "draft_loops": 1, "draft_tokens": 2}, looplm.FixedDepth(4), True),
        ({"exit_threshold": 0.6, "logprobs": 1, "top_k": 4}, looplm.QuantileExit(0.6), True),
        ({"exit_threshold": 0.6, "stream": True, "top_p": 0.9}, looplm.QuantileExit(0.6), True),
    ],
)
def test_samples_are_distributed_as_the_model_says(
    serve: Callable[..., Any], depth: dict[str, Any], exit: Any, seeded: bool
) -> None:
    """Unseeded requests take their seeds from torch's generator, which every test begins anew: nothing here is by
    chance, and 1 in 1000 is the chance that a right server would have had of failing."""
    lm = TinyLM()
    server = serve(engine=looplm.Engine(lm, tokenizer_of_words(), max_batch=128))
    body = {"model": "stdlib-small", "prompt": PROMPT, "max_tokens": LENGTH, "temperature": 1.3, "n": 125}
    found: Counter[tuple[int, ...]] = Counter()
    with server.client() as http:
        for number in range(4 if "logprobs" in depth else 8):  # alternatives take a request of their own each
            seed = {"seed": 1_000_000 * number} if seeded else {}
            found.update(sampled(http.post("/v1/completions", json={**body, **depth, **seed, "return_depths": True})))
    filters = {name: depth[name] for name in ("top_k", "top_p") if name in depth}
    expected = exact(lm, looplm.SamplingParams(temperature=1.3, **filters), exit)
    assert found.total() >= 500 and set(found) <= set(expected)
    assert chi_square_p(found, expected) > 0.001
    # It can tell: another temperature, and another depth, would not pass for this.
    for params, other in (({"temperature": 0.8}, exit), ({"temperature": 1.3}, looplm.FixedDepth(1))):
        unlike = exact(lm, looplm.SamplingParams(**params, **filters), other)
        assert not set(found) <= set(unlike) or chi_square_p(found, unlike) < 0.001
