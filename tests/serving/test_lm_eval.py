"""lm-eval's own client, `local-completions`, unchanged; skips where lm-eval or what its clients need is missing."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

import looplm
from looplm.hf.checkpoint import find_checkpoint

PAIRS = [("def main(", "self, event"), ("import", " os"), ("class A:\n    def __init__(", "self")]

if find_spec("lm_eval") is None or find_spec("tenacity") is None or find_spec("aiohttp") is None:
    pytest.skip("needs lm-eval[api]", allow_module_level=True)


@pytest.mark.filterwarnings("default")
def test_it_scores_and_generates(
    server: Any, make_engine: Callable[..., looplm.Engine], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    client = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="stdlib-small",
        tokenizer_backend="huggingface",
        tokenizer=str(find_checkpoint("stdlib-small")),
        max_length=512,
        batch_size=2,
    )

    def asked(kind: Any, arguments: tuple[Any, ...]) -> Instance:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    found = client.loglikelihood([asked("loglikelihood", pair) for pair in PAIRS])
    for (context, said), (logprob, is_greedy) in zip(PAIRS, found, strict=True):
        before, whole = tokenizer.encode(context), tokenizer.encode(context + said)
        params = looplm.SamplingParams(max_tokens=1, prompt_logprobs=True)
        (scored,) = make_engine().generate([whole], params)
        assert logprob == pytest.approx(sum((scored.prompt_logprobs or [])[len(before) - 1 :]), abs=1e-3)
        greedy = next(
            iter(make_engine().generate([before], looplm.SamplingParams(max_tokens=len(whole) - len(before))))
        )
        assert is_greedy == (greedy.token_ids == whole[len(before) :])
    options = {"until": ["\n"], "max_gen_toks": 12, "temperature": 0}
    (text,) = client.generate_until([asked("generate_until", ("def main(", options))])
    (result,) = make_engine().generate("def main(", looplm.SamplingParams(max_tokens=12, stop="\n"))
    assert text == result.text
