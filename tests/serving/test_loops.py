"""What every loop says: against the model itself, and against what the engine says of prompts."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch

import looplm
from looplm.inference import ExitPolicy
from looplm.model.gate import exit_cdf
from looplm.serving import loops as views
from looplm.serving.loops import loop_views, prompt_scores

PROMPT = "def read_lines(path):\n    return"


@pytest.mark.parametrize("num_loops", [None, 2, 6])
def test_every_loop_is_the_models(model: Any, tokenizer: Any, num_loops: int | None) -> None:
    ids = tokenizer.encode(PROMPT)
    depth = num_loops or 4
    found = loop_views(model, tokenizer, ids, start=2, top=3, num_loops=num_loops)
    with torch.inference_mode():
        out = model(torch.tensor([ids]), num_loops=depth)
        logprobs = [model.lm_head(hidden)[0].float().log_softmax(-1) for hidden in out.loop_hidden_states]
        cdf = exit_cdf(out.gate_logits[:4])[:, 0]
    assert found["num_loops"] == depth and [one["token_id"] for one in found["tokens"]] == ids[2:]
    assert "".join(one["token"] for one in found["tokens"]) == tokenizer.decode(ids)[len(tokenizer.decode(ids[:2])) :]
    for at, one in enumerate(found["tokens"], start=2):
        assert len(one["loops"]) == depth
        for loop, view in enumerate(one["loops"]):
            spread = logprobs[loop][at - 1]
            assert view["logprob"] == pytest.approx(spread[ids[at]].item(), abs=1e-4)
            assert [t["token_id"] for t in view["top"]] == spread.topk(3).indices.tolist()
            assert [t["logprob"] for t in view["top"]] == pytest.approx(spread.topk(3).values.tolist(), abs=1e-4)
            assert view["exit_cdf"] == pytest.approx(cdf[loop, at - 1].item() if loop < 4 else 1.0, abs=1e-5)


def test_a_long_text_is_read_in_chunks(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokenizer.encode(PROMPT * 3)
    whole = loop_views(model, tokenizer, ids, start=0, top=2, num_loops=None)
    scores = prompt_scores(model, ids, looplm.QuantileExit(0.5), 2)
    monkeypatch.setattr(views, "CHUNK", 5)
    pieces = loop_views(model, tokenizer, ids, start=0, top=2, num_loops=None)
    assert whole["tokens"][0]["loops"] == [] and len(whole["tokens"]) == len(ids) == len(pieces["tokens"])
    for one, other in zip(whole["tokens"], pieces["tokens"], strict=True):
        assert [v["logprob"] for v in one["loops"]] == pytest.approx([v["logprob"] for v in other["loops"]], abs=1e-4)
    assert prompt_scores(model, ids, looplm.QuantileExit(0.5), 2)[0] == pytest.approx(scores[0], abs=1e-4)


@pytest.mark.parametrize(
    "policy",
    [looplm.QuantileExit(0.4), looplm.FixedDepth(2), looplm.HiddenDiffExit(4.0), looplm.ConfidenceExit(kl=0.1)],
)
def test_prompt_scores_are_the_engines(
    model: Any, tokenizer: Any, make_engine: Callable[..., looplm.Engine], policy: ExitPolicy
) -> None:
    ids = tokenizer.encode(PROMPT)
    (result,) = make_engine().generate([ids], looplm.SamplingParams(max_tokens=1, prompt_logprobs=True), policy)
    logprobs, alternatives = prompt_scores(model, ids, policy, 4)
    assert logprobs == pytest.approx(result.prompt_logprobs, abs=1e-4)
    assert all(len(row) == 4 and row[0][1] >= row[3][1] for row in alternatives)


def test_a_greedy_token_is_the_likeliest_at_the_loop_it_left_at(http: httpx.Client) -> None:
    asked = {"model": "stdlib-small", "prompt": "def main(", "max_tokens": 12, "temperature": 0, "return_depths": True}
    (choice,) = http.post("/v1/completions", json=asked).json()["choices"]
    before, own = choice["prompt_token_ids"], choice["token_ids"]
    body = {"model": "stdlib-small", "prompt": [*before, *own], "start": len(before), "top": 1}
    found = http.post("/v1/loops", json=body).json()["tokens"]
    assert len(set(choice["loops"])) > 1
    for token, loop, one in zip(own, choice["loops"], found, strict=True):
        assert one["token_id"] == token == one["loops"][loop - 1]["top"][0]["token_id"]
        assert one["loops"][loop - 1]["exit_cdf"] >= 0.3 > (one["loops"][loop - 2]["exit_cdf"] if loop > 1 else 0)
