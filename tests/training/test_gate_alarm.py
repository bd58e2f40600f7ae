"""The gate alarms, on made-up records and on traces of real runs; what they call dead, and what they advise."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from looplm.quickstart.shipped import read_training_log
from looplm.training.gate_alarm import COLLAPSED, DEAD_SHARE, TREND_RECORDS, WINDOW, GateAlarm, evenness
from looplm.training.stage_recipe import ExpectedLossRecipe, GateLossRecipe, LastLoopRecipe, RoutingRecipe
from looplm.training.telemetry_record import Record

STAGE_ONE = ExpectedLossRecipe(beta=0.1)
TRACES = json.loads((Path(__file__).parent / "gate_traces.json").read_text())
"""Of two-layer models of width 128 on the standard library's text, a record every five steps: two and four loops at
beta 0.02, learning rate 4e-3 and 6e-3 after 50 and 20 steps of warmup; two loops at beta 0.2, 2e-3 after 200."""


def record(step: int, exit_pdf: list[float], loop_losses: list[float] | None = None, num_steps: int = 1000) -> Record:
    return Record(
        stage="first",
        step=step,
        num_steps=num_steps,
        tokens=step,
        loss=2.0,
        loop_losses=[3 - 0.1 * loop for loop in range(len(exit_pdf))] if loop_losses is None else loop_losses,
        exit_pdf=exit_pdf,
        entropy=0.5,
        expected_loops=1.5,
        lr=1e-3,
        grad_norm=1.0,
        tokens_per_second=1.0,
        seconds=1.0,
    )


def fired(alarm: GateAlarm, records: list[Record]) -> list[tuple[int, str]]:
    """Step and first words of every warning."""
    return [(r.step, " ".join(message.split()[:4]).rstrip(":")) for r in records for message in alarm.check(r)]


def of_trace(points: list[dict[str, Any]], num_steps: int) -> list[Record]:
    return [record(point["step"], point["exit_pdf"], point["loop_losses"], num_steps) for point in points]


# --- Collapse ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "exit_pdf",
    [[1.0], [0.25, 0.25, 0.25, 0.25], [0.97, 0.01, 0.01, 0.01], [0.0, 0.5, 0.5], [0.01, 0.99]],
)
def test_a_gate_that_uses_more_than_one_loop_is_healthy(exit_pdf: list[float]):
    assert GateAlarm(STAGE_ONE).check(record(1, exit_pdf)) == []


@pytest.mark.parametrize(
    ("exit_pdf", "loop"),
    [([1.0, 0.0, 0.0], 1), ([0.0, 1.0], 2), ([0.001, 0.998, 0.001, 0.0], 2), ([1e-5, 1e-5, 1e-5, 1 - 3e-5], 4)],
)
def test_a_gate_on_one_loop_is_collapsed(exit_pdf: list[float], loop: int):
    (message,) = GateAlarm(STAGE_ONE).check(record(1, exit_pdf))
    assert f"collapsed onto loop {loop}: mean exit pdf {exit_pdf[0]:.3f}, " in message
    assert "a longer warmup or a lower learning rate, or a beta above 0.1." in message


def test_the_border_is_a_share_of_the_largest_entropy():
    inside, outside = [0.998, 0.002], [0.9985, 0.0015]
    assert evenness(outside) < COLLAPSED < evenness(inside)
    assert evenness([0.5, 0.5]) == pytest.approx(1) and evenness([1.0]) == 1 and evenness([1.0, 0.0]) == 0
    assert GateAlarm(STAGE_ONE).check(record(1, inside)) == []
    assert len(GateAlarm(STAGE_ONE).check(record(1, outside))) == 1


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        (GateLossRecipe(), "lower learning rate."),
        (RoutingRecipe(phase_steps=9, gate_weight=0.3), "gate_weight below 0.3"),
    ],
)
def test_without_an_entropy_term_it_does_not_advise_a_larger_beta(objective: Any, words: str):
    (message,) = GateAlarm(objective).check(record(1, [1.0, 0.0]))
    assert "beta" not in message and words in message


def test_a_step_that_was_not_finite_says_nothing():
    alarm, nan = GateAlarm(STAGE_ONE), math.nan
    assert alarm.check(record(1, [nan, nan])) == alarm.check(record(2, [0.5, 0.5], [nan, 2.0])) == []
    assert alarm.state_dict() == GateAlarm(STAGE_ONE).state_dict()


def test_it_speaks_once_an_episode():
    """Again only after a recovery, not when the entropy flickers about the border."""
    pdfs = [[1.0, 0.0], [0.997, 0.003], [1.0, 0.0], [0.9, 0.1], [0.999, 0.001]]
    assert [step for step, _ in fired(GateAlarm(STAGE_ONE), [record(i, pdf) for i, pdf in enumerate(pdfs)])] == [0, 4]


# --- Trend ------------------------------------------------------------------------------------------------------


def two_loops(even: float) -> list[float]:
    """The exit pdf of two loops with a given evenness, by bisection."""
    low, high = 0.0, 0.5
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if evenness([1 - middle, middle]) < even else (low, middle)
    return [1 - low, low]


def test_a_steady_fall_is_told_before_the_end_once():
    records = [record(10 * i, two_loops(1 - 0.04 * i)) for i in range(25)]
    ((step, words),) = fired(GateAlarm(STAGE_ONE), records)
    assert words == "The exit gate is"
    assert 10 * TREND_RECORDS <= step <= 150
    message = next(m for alarm in [GateAlarm(STAGE_ONE)] for r in records for m in alarm.check(r))
    even = 1 - 0.04 * step / 10
    assert f"to {even:.0%} of its maximum in 110 steps" in message
    assert f"in {round((even - COLLAPSED) / 0.004)} more" in message and "a beta above 0.1" in message


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([1 - 0.01 * i for i in range(40)], id="slow"),
        pytest.param([0.3] * 40, id="low but steady"),
        pytest.param([0.3 + 0.02 * i for i in range(30)], id="rising"),
        pytest.param([0.5 + (0.2 if i % 2 else -0.2) for i in range(40)], id="noisy"),
        pytest.param([0.4 - 0.025 * i + (0.12 if i % 2 else -0.12) for i in range(12)], id="noise above all"),
        pytest.param([1 - 0.02 * i for i in range(13)] + [0.75] * 20, id="high"),
    ],
)
def test_no_trend_no_alarm(values: list[float]):
    assert fired(GateAlarm(STAGE_ONE), [record(10 * i, two_loops(v)) for i, v in enumerate(values)]) == []


def test_a_trend_that_turned_may_be_told_again():
    fall = [1 - 0.04 * i for i in range(18)]
    values = fall + [0.32] * 20 + fall[8::-1] + [1.0] * 12 + fall
    steps = [step for step, _ in fired(GateAlarm(STAGE_ONE), [record(i, two_loops(v)) for i, v in enumerate(values)])]
    assert len(steps) == 2 and steps[0] < 18 and steps[1] > 18 + 20 + 9 + 12


# --- Dead and idle loops ----------------------------------------------------------------------------------------


def test_a_loop_without_exits_is_dead():
    records = [record(10 * i, [0.004, 0.496, 0.496, 0.004]) for i in range(1, 40)]
    alarm = GateAlarm(STAGE_ONE)
    messages = [(r.step, m) for r in records for m in alarm.check(r)]
    ((step, message),) = messages
    assert step == 10 * WINDOW
    assert message.startswith("Loops 1, 4 are dead: over the last 20 records they got 1.6%, 1.6% of an even share")
    assert "try smoothing 0.05, or a beta above 0.1" in message


def test_the_border_of_a_dead_loop_is_a_part_of_an_even_share():
    for share, dead in ((0.99 * DEAD_SHARE / 2, True), (1.01 * DEAD_SHARE / 2, False)):
        records = [record(i, [1 - share, share]) for i in range(1, WINDOW + 1)]
        assert bool(fired(GateAlarm(STAGE_ONE), records)) == dead


def test_a_loop_that_comes_back_may_die_again():
    dead, alive = [0.005, 0.995], [0.5, 0.5]
    pdfs = [dead] * 25 + [alive] * 25 + [dead] * 40
    steps = [step for step, _ in fired(GateAlarm(STAGE_ONE), [record(i, pdf) for i, pdf in enumerate(pdfs)])]
    assert len(steps) >= 2 and steps[0] == WINDOW - 1 and steps[-1] > 50


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        (ExpectedLossRecipe(beta=0.1, smoothing=0.2), "Smoothing 0.2 still trains it"),
        (GateLossRecipe(), "label_shift"),
        (RoutingRecipe(phase_steps=9), "shorter phase"),
    ],
)
def test_what_to_do_about_a_dead_loop_depends_on_the_objective(objective: Any, words: str):
    alarm = GateAlarm(objective)
    messages = [m for i in range(WINDOW) for m in alarm.check(record(i, [0.005, 0.5, 0.495]))]
    assert len(messages) == 1 and words in messages[0]


def test_a_loop_that_adds_no_nats_is_idle_in_the_second_half():
    """Gains are over the best loop before: loop 4 beats loop 3, but not loop 2."""
    losses = [3.0, 2.5, 2.7, 2.6]
    records = [record(10 * i, [0.25] * 4, losses) for i in range(1, 101)]
    alarm = GateAlarm(STAGE_ONE)
    ((step, message),) = [(r.step, m) for r in records for m in alarm.check(r)]
    assert step == 510
    assert message.startswith("Loops 3, 4 are idle: over the last 20 records they gained -0.2000, -0.1000 nats")


@pytest.mark.parametrize("objective", [GateLossRecipe(), RoutingRecipe(phase_steps=5)])
def test_where_losses_do_not_say_so_no_loop_is_idle(objective: Any):
    assert fired(GateAlarm(objective), [record(10 * i, [0.5, 0.5], [2.0, 2.5]) for i in range(1, 101)]) == []


def test_a_gate_that_is_not_trained_alarms_nobody():
    records = [record(10 * i, [1.0, 0.0, 0.0], [2.0, 2.5, 3.0]) for i in range(1, 101)]
    assert fired(GateAlarm(LastLoopRecipe()), records) == []


def test_a_collapsed_gate_says_so_and_not_that_its_other_loops_are_dead_or_idle():
    records = [record(10 * i, [1.0, 0.0, 0.0], [2.0, 2.5, 3.0]) for i in range(1, 101)]
    assert [words for _, words in fired(GateAlarm(STAGE_ONE), records)] == ["The exit gate has"]


def test_drawn_depths_are_judged_loop_by_loop():
    """Loop 3, wherever it runs, gets next to nothing; a step of one loop is no collapse."""
    pdfs = [[1.0], [0.6, 0.4], [0.5, 0.499, 0.001]]
    records = [record(i, pdfs[i % 3]) for i in range(90)]
    assert fired(GateAlarm(STAGE_ONE), records) == [(3 * WINDOW - 1, "Loop 3 is dead")]


# --- Real runs --------------------------------------------------------------------------------------------------


def test_the_shipped_checkpoint_s_run_raises_no_alarm_but_that_loop_4_adds_nothing():
    """Which is so: on held-out text its loops 3 and 4 are equal."""
    log = read_training_log()
    records = [record(p.step, list(p.exit_pdf), list(p.loss_nats), 5500) for p in log.training]
    assert len(records) > 150
    alarm = GateAlarm(ExpectedLossRecipe(beta=0.1, smoothing=0.2))
    ((step, words),) = fired(alarm, records)
    assert step > 2750 and words == "Loop 4 is idle"


def test_a_healthy_small_run_raises_no_alarm_but_that_loop_2_adds_nothing_yet():
    found = fired(GateAlarm(ExpectedLossRecipe(beta=0.2)), of_trace(TRACES["stays_even"], 500))
    assert [words for _, words in found] == ["Loop 2 is idle"]


@pytest.mark.parametrize(("name", "collapses"), [("collapses_two_loops", 175), ("collapses_four_loops", 245)])
def test_a_collapsing_run_is_told_a_hundred_steps_ahead(name: str, collapses: int):
    records = of_trace(TRACES[name], 700)
    found = fired(GateAlarm(ExpectedLossRecipe(beta=0.02)), records)
    assert found[0][1] == "The exit gate is" and found[0][0] <= collapses - 100
    assert [step for step, words in found if words == "The exit gate has"] == [collapses]
    assert all(words.startswith("Loop") for _, words in found[1:-1])


# --- Resuming ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [5, 20, 36, 55])
def test_a_resumed_run_neither_repeats_nor_forgets_an_alarm(cut: int):
    records = of_trace(TRACES["collapses_four_loops"], 700)
    straight = fired(GateAlarm(STAGE_ONE), records)
    before, after = GateAlarm(STAGE_ONE), GateAlarm(STAGE_ONE)
    first = fired(before, records[:cut])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert first + fired(after, records[cut:]) == straight
