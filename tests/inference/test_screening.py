"""Screens: what they see, and that nothing is out before they have seen it."""

import pytest

from looplm.errors import UserError
from looplm.inference import reference
from looplm.inference.engine import Engine
from looplm.inference.exit_policy import FixedDepth, QuantileExit
from looplm.inference.sampling import SamplingParams
from looplm.inference.screening import Mask, Redirect, Screen, Stop
from looplm.inference.speculative import Speculation

TEN = SamplingParams(max_tokens=10)
PROMPT = [1, 2, 3]


def plain(lm, exit=None):
    (result,) = Engine(lm).generate([PROMPT], TEN, exit or FixedDepth(4))
    return result


@pytest.mark.parametrize("speculation", [None, Speculation(1, 3)])
@pytest.mark.parametrize("exit", [FixedDepth(4), QuantileExit(0.9)])
def test_a_screen_that_lets_pass_changes_nothing(speculation, exit, make_lm):
    lm = make_lm()
    seen = []
    screen = Screen(lambda preview: seen.append(preview))
    (result,) = Engine(lm).generate([PROMPT], TEN, exit, speculation=speculation, screen=screen)
    expected = plain(lm, exit)
    assert (result.token_ids, result.loops) == (expected.token_ids, expected.loops)
    # Every token was looked at, after exactly the tokens before it, at the shallow loop.
    for i in range(10):
        looks = [p for p in seen if p.token_ids == result.token_ids[:i]]
        assert looks and all(p.loop == 1 and p.logprobs.shape == (29,) for p in looks)
        assert looks[-1].logprobs.exp().sum().item() == pytest.approx(1)
    assert any(p.num_drafted for p in seen) == (speculation is not None)


@pytest.mark.parametrize("speculation", [None, Speculation(1, 3), Speculation(2, 2)])
def test_stop_ends_before_the_token(speculation, make_lm):
    lm = make_lm()
    expected = plain(lm)
    screen = Screen(lambda p: Stop("enough") if len(p.token_ids) == 4 else None)
    (result,) = Engine(lm).generate([PROMPT], TEN, FixedDepth(4), speculation=speculation, screen=screen)
    assert result.token_ids == expected.token_ids[:4]
    assert (result.finish_reason, result.error) == ("screened", "enough")


@pytest.mark.parametrize("speculation", [None, Speculation(1, 3)])
def test_masked_tokens_do_not_come(speculation, make_lm):
    lm = make_lm()
    banned = set(plain(lm).token_ids)
    screen = Screen(lambda p: Mask(sorted(banned)))
    (result,) = Engine(lm).generate([PROMPT], TEN, FixedDepth(4), speculation=speculation, screen=screen)
    assert not banned & set(result.token_ids)
    import torch

    with torch.inference_mode():
        for i, token in enumerate(result.token_ids):
            logits, _ = reference.next_logits(lm, [*PROMPT, *result.token_ids[:i]], FixedDepth(4))
            logits[0, sorted(banned)] = -torch.inf
            assert token == int(logits.argmax())


@pytest.mark.parametrize("speculation", [None, Speculation(1, 3)])
def test_redirect_puts_its_tokens_there_and_goes_on(speculation, make_lm):
    lm = make_lm()
    expected = plain(lm)
    screen = Screen(lambda p: Redirect([7, 8, 9]) if p.token_ids == expected.token_ids[:3] else None)
    (result,) = Engine(lm).generate([PROMPT], TEN, FixedDepth(4), speculation=speculation, screen=screen)
    start = [*expected.token_ids[:3], 7, 8, 9]
    rest = reference.generate(lm, [*PROMPT, *start], SamplingParams(max_tokens=4), FixedDepth(4))
    assert result.token_ids == [*start, *rest.token_ids]
    assert result.loops[3:6] == [1, 1, 1] and set(result.loops[6:]) == {4}


def test_redirect_in_the_middle_of_a_draft(agreeing):
    """Drafts before it are untested when it is put there, and stand."""
    expected = plain(agreeing)
    drafted = []

    def look(preview):
        if preview.token_ids != expected.token_ids[:3]:
            return None
        drafted.append(preview.num_drafted)
        return Redirect([7, 8, 9])

    (result,) = Engine(agreeing).generate(
        [PROMPT], TEN, FixedDepth(4), speculation=Speculation(1, 6), screen=Screen(look)
    )
    assert drafted == [2]
    assert result.token_ids[:6] == [*expected.token_ids[:3], 7, 8, 9]
    rest = reference.generate(agreeing, [*PROMPT, *result.token_ids[:6]], SamplingParams(max_tokens=4), FixedDepth(4))
    assert result.token_ids[6:] == rest.token_ids


def test_a_redirection_is_not_screened_itself(make_lm):
    """A screen that always redirects gives its tokens over and over, each time whole."""
    screen = Screen(lambda p: Redirect([7, 8, 9]))
    (result,) = Engine(make_lm()).generate([PROMPT], TEN, FixedDepth(4), screen=screen)
    assert result.token_ids == [7, 8, 9, 7, 8, 9, 7, 8, 9, 7]


def test_at_the_first_token(make_lm):
    for verdict, tokens in ((Stop(), []), (Redirect([5]), [5])):
        screen = Screen(lambda p, verdict=verdict: verdict if not p.token_ids else Stop())
        (result,) = Engine(make_lm()).generate([PROMPT], TEN, FixedDepth(4), screen=screen)
        assert result.token_ids == tokens and result.finish_reason == "screened"


@pytest.mark.parametrize("shape", ["ouro", "prelude_coda"])
def test_a_screen_that_raises_ends_its_request_alone(shape, make_lm):
    lm = make_lm(shape)
    (expected,) = Engine(lm).generate([[4, 5]], TEN, FixedDepth(4))

    def look(preview):
        return 1 / (3 - len(preview.token_ids)) and None

    engine = Engine(lm)
    (broken,) = engine.submit(PROMPT, TEN, FixedDepth(4), screen=Screen(look))
    (other,) = engine.submit([4, 5], TEN, FixedDepth(4))
    while engine.num_unfinished:
        engine.step()
    assert broken.finish_reason == "error" and len(broken.token_ids) == 3
    assert broken.error == "The screen failed: ZeroDivisionError: division by zero"
    assert other.token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        (True, "it returned True"),
        (Mask([29]), "29, which is no token"),
        (Redirect([]), "without tokens"),
        (Redirect([True]), "True, which is no token"),
    ],
)
def test_a_verdict_that_is_none_is_said(verdict, message, make_lm):
    screen = Screen(lambda p: verdict)
    (result,) = Engine(make_lm()).generate([PROMPT], TEN, FixedDepth(4), screen=screen)
    assert result.finish_reason == "error" and message in result.error


def test_it_costs_a_read_of_the_head_where_there_was_none(make_lm):
    engine = Engine(make_lm())
    list(engine.generate([PROMPT], TEN, FixedDepth(4), screen=Screen(lambda p: None, loops=2)))
    assert engine.stats.head_reads == 2 * 9 and engine.stats.prompt_head_reads == 2


@pytest.mark.parametrize(("look", "loops"), [(None, 1), (print, 0), (print, True)])
def test_impossible_screens_are_refused(look, loops):
    with pytest.raises((UserError, Exception), match="Screen"):
        Screen(look, loops)


@pytest.mark.parametrize("loops", [1, 3])
def test_a_screen_may_cancel(loops, make_lm):
    """Itself or another: at the end of the step, and nobody else is touched."""
    engine = Engine(make_lm())
    requests = []

    def look(preview):
        if len(preview.token_ids) == 3:
            engine.cancel(requests[:2])

    requests += engine.submit(PROMPT, TEN, FixedDepth(4), screen=Screen(look, loops))
    requests += engine.submit([7, 8], TEN, FixedDepth(4))
    requests += engine.submit([5], TEN, FixedDepth(4))
    while engine.num_unfinished:
        engine.step()
    assert [request.finish_reason for request in requests] == ["cancelled", "cancelled", "length"]
    (expected,) = Engine(make_lm()).generate([[5]], TEN, FixedDepth(4))
    assert requests[2].token_ids == expected.token_ids
    with pytest.raises(UserError, match="not one of this engine's"):
        Engine(make_lm()).cancel(engine.submit(PROMPT, TEN, FixedDepth(4)))


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_reason_is_a_text():
    with pytest.raises(UserError, match="reason of Stop is 3"):
        Stop(3)  # type: ignore[arg-type]
