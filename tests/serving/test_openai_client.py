"""The official client, as it is: what people have in their programs works with another base URL."""

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

import looplm

MODEL = "stdlib-small"
PROMPT = "def main("


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
    assert server.idle()


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL and client.models.retrieve(MODEL).id == MODEL
    assert model.model_extra is not None and model.model_extra["num_loops"] == 4


def test_completion_is_the_engines(client: openai.OpenAI, make_engine: Callable[..., looplm.Engine]) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0)
    (result,) = make_engine().generate(PROMPT, looplm.SamplingParams(max_tokens=12))
    (choice,) = answer.choices
    assert choice.text == result.text and choice.finish_reason == "length"
    assert answer.usage is not None and answer.usage.prompt_tokens == len(result.prompt_token_ids)
    assert answer.usage.completion_tokens == 12 and answer.usage.total_tokens == len(result.prompt_token_ids) + 12
    # The first token is read out of the prompt.
    extra = {"token_loops": sum(result.token_loops[1:]), "claimed_loops": sum(result.loops)}
    assert answer.usage.model_extra == extra


def test_n_and_seed_are_the_engines(client: openai.OpenAI, make_engine: Callable[..., looplm.Engine]) -> None:
    sampling = {"max_tokens": 10, "temperature": 0.9, "top_p": 0.95, "n": 3, "seed": 5}
    answer = client.completions.create(model=MODEL, prompt=[PROMPT, "import "], **sampling)  # type: ignore[call-overload]
    results = list(make_engine().generate([PROMPT, "import "], looplm.SamplingParams(**sampling)))
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [result.text for result in results]
    assert len({choice.text for choice in answer.choices}) > 2


def test_temperature_is_1_unless_said_otherwise(
    client: openai.OpenAI, make_engine: Callable[..., looplm.Engine]
) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, seed=3)
    (result,) = make_engine().generate(PROMPT, looplm.SamplingParams(max_tokens=8, temperature=1, seed=3))
    assert answer.choices[0].text == result.text


def test_stop_strings(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0).choices[0].text
    stop = whole[4:9]
    cut = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, stop=["~~", stop])
    assert cut.choices[0].text == whole[: whole.index(stop)] and cut.choices[0].finish_reason == "stop"
    pieces = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, stop=stop, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in pieces) == cut.choices[0].text


@pytest.mark.parametrize("alternatives", [0, 3])
def test_logprobs_and_echo(
    client: openai.OpenAI, make_engine: Callable[..., looplm.Engine], alternatives: int
) -> None:
    params = looplm.SamplingParams(max_tokens=6, logprobs=True, prompt_logprobs=True)
    (result,) = make_engine().generate(PROMPT, params)
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=alternatives, echo=True
    )
    (choice,) = answer.choices
    found = choice.logprobs
    assert found is not None and found.tokens is not None and found.token_logprobs is not None
    assert choice.text == PROMPT + (result.text or "") == "".join(found.tokens)
    assert found.token_logprobs[0] is None
    assert result.prompt_logprobs is not None and result.logprobs is not None
    assert found.token_logprobs[1:] == pytest.approx(result.prompt_logprobs + result.logprobs, abs=1e-4)
    assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(len(found.tokens))]
    if not alternatives:
        assert found.top_logprobs is None
        return
    tops = found.top_logprobs
    assert tops is not None and tops[0] is None and len(tops) == len(found.tokens)
    for token, logprob, top in list(zip(found.tokens, found.token_logprobs, tops, strict=True))[1:]:
        assert alternatives <= len(top) <= alternatives + 1 and top[token] == logprob
    # Greedy: each generated token is the likeliest, to the last bit, which is what lm-eval looks at.
    for logprob, top in zip(found.token_logprobs[-6:], tops[-6:], strict=True):
        assert logprob == max(top.values())


def test_echo_alone_scores_a_prompt(client: openai.OpenAI) -> None:
    scored = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=0, logprobs=1, echo=True)
    longer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1, logprobs=1, echo=True)
    assert scored.choices[0].text == PROMPT
    assert scored.choices[0].logprobs is not None and longer.choices[0].logprobs is not None
    assert scored.choices[0].logprobs.token_logprobs == longer.choices[0].logprobs.token_logprobs[:-1]  # type: ignore[index]
    assert scored.usage is not None and scored.usage.completion_tokens == 0


def test_a_prompt_that_fills_the_context_can_be_scored(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=[1] * 2048, max_tokens=0, logprobs=0, echo=True)
    found = answer.choices[0].logprobs
    assert found is not None and found.token_logprobs is not None and len(found.token_logprobs) == 2048


def test_n_with_alternatives_is_n_without(client: openai.OpenAI) -> None:
    """Alternatives are seen by a screen, which has every sample run as a request of its own."""
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "n": 3, "seed": 11}
    plain = client.completions.create(**asked)
    scored = client.completions.create(**asked, logprobs=2)
    assert [c.text for c in plain.choices] == [c.text for c in scored.choices]


@pytest.mark.parametrize("extra", [{}, {"logprobs": 2}, {"echo": True, "logprobs": 0}, {"n": 2, "seed": 1}])
def test_streams_join_to_the_whole(client: openai.OpenAI, extra: dict[str, Any]) -> None:
    asked = {"model": MODEL, "prompt": [PROMPT, "# naïve "], "max_tokens": 9, "temperature": 0.8, "seed": 2, **extra}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    for choice in whole.choices:
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert "".join(c.text for c in own) == choice.text
        assert [c.finish_reason for c in own if c.finish_reason] == [choice.finish_reason]
        if choice.logprobs is not None:
            parts = [c.logprobs for c in own if c.logprobs is not None]
            for name in ("tokens", "token_logprobs", "text_offset"):
                assert [x for part in parts for x in getattr(part, name)] == getattr(choice.logprobs, name)


def test_chat(client: openai.OpenAI, make_engine: Callable[..., looplm.Engine], tokenizer: Any) -> None:
    messages: list[Any] = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Open a file"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    (result,) = make_engine().generate([ids], looplm.SamplingParams(max_tokens=10, logprobs=True))
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 0, "max_completion_tokens": 10}
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n")
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert choice.message.content == result.text and choice.message.role == "assistant"
    assert choice.logprobs is not None and choice.logprobs.content is not None and result.logprobs is not None
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(result.logprobs, abs=1e-4)
    assert all(entry.top_logprobs[0].token == entry.token for entry in choice.logprobs.content)
    assert bytes(b for entry in choice.logprobs.content for b in entry.bytes or []).decode() == result.text
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == result.text
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("extra", "exit"),
    [
        ({"num_loops": 2}, looplm.FixedDepth(2)),
        ({"exit_threshold": 0.9}, looplm.QuantileExit(0.9)),
        ({"exit": "hidden-diff:3"}, looplm.HiddenDiffExit(3)),
        ({"exit": "stable:1"}, looplm.ConfidenceExit(stable_loops=1)),
        ({"exit_threshold": 0.9, "draft_loops": 1, "draft_tokens": 2}, looplm.QuantileExit(0.9)),
        ({"exit_threshold": 0.9, "draft_loops": 10**20}, looplm.QuantileExit(0.9)),  # every token leaves before: final
        ({"deadline_ms": 0}, looplm.Deadline(0)),
    ],
)
def test_depth_is_a_dial(
    client: openai.OpenAI, make_engine: Callable[..., looplm.Engine], extra: dict[str, Any], exit: Any
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 10, "temperature": 0}
    answer = client.completions.create(**asked, extra_body={**extra, "return_depths": True})
    (result,) = make_engine().generate(PROMPT, looplm.SamplingParams(max_tokens=10), exit)
    choice = answer.choices[0]
    assert choice.text == result.text and choice.model_extra is not None
    assert choice.model_extra["loops"] == result.loops
    assert choice.model_extra["token_ids"] == result.token_ids
    if "draft_loops" not in extra:
        assert choice.model_extra["token_loops"] == result.token_loops
        # The first token is read out of the prompt; alone, each further one takes a pass for each of its loops.
        assert choice.model_extra["weight_passes"] == sum(result.loops[1:])


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-4' does not exist"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=MODEL, prompt="x", max_tokens=-1)
    with pytest.raises(openai.BadRequestError, match="with one to write that is more than the 2048 positions"):
        client.completions.create(model=MODEL, prompt="x " * 5000)
    with pytest.raises(openai.BadRequestError, match="with one to write that is more than the 2048 positions"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x " * 5000}])


def test_key(serve: Callable[..., Any]) -> None:
    from looplm.serving.limits import Limits

    server = serve(Limits(api_key="secret"))
    for key, good in (("secret", True), ("wrong", False)):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60) as client:
            if good:
                assert client.models.list().data
            else:
                with pytest.raises(openai.AuthenticationError, match="API key"):
                    client.models.list()


def test_what_lm_eval_asks_for(
    client: openai.OpenAI, make_engine: Callable[..., looplm.Engine], tokenizer: Any
) -> None:
    """`local-completions`: token ids of context and continuation, echoed, with one alternative."""
    pairs = [("def main(", "self, event"), ("import ", "zzz"), ("class A:\n    def __init__(", "self")]
    ids = [(tokenizer.encode(context), tokenizer.encode(said)) for context, said in pairs]
    answer = client.completions.create(
        model=MODEL, prompt=[a + b for a, b in ids], max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234
    )
    for (context, said), choice in zip(ids, answer.choices, strict=True):
        assert choice.logprobs is not None and choice.logprobs.token_logprobs and choice.logprobs.top_logprobs
        found = choice.logprobs.token_logprobs[len(context) : -1]
        tops = choice.logprobs.top_logprobs[len(context) : -1]
        params = looplm.SamplingParams(max_tokens=1, prompt_logprobs=True)
        (scored,) = make_engine().generate([context + said], params)
        (greedy,) = make_engine().generate([context], looplm.SamplingParams(max_tokens=len(said)))
        assert sum(found) == pytest.approx(sum((scored.prompt_logprobs or [])[-len(said) :]), abs=1e-3)
        is_greedy = all(logprob == max(top.values()) for logprob, top in zip(found, tops, strict=True))
        assert is_greedy == (greedy.token_ids == said)
