"""Interventions on a model whose circuit is known, and on random ones."""

import pytest
import torch

from looplm.analysis.interventions import (
    Patch,
    effect,
    from_loop,
    gate_effects,
    noising,
    partners_of,
    patch_grid,
    replacing,
    run_pass,
    schedule_effects,
)
from looplm.analysis.readout import Labels
from looplm.errors import UserError

TOKEN, OTHERS, LAST = 1, (0, 2), 3
PAIRS = [([4, a, 4, 5], [4, b, 4, 5]) for a in range(4) for b in range(4) if a != b]
LABELS = Labels(("zero", "one", "two", "three"), ((0,), (1,), (2,), (3,)))


def grid_of(model, make=replacing(1.0), **options):  # noqa: B008
    grid = patch_grid(model, PAIRS, LABELS, make, "replace", positions=(TOKEN, *OTHERS, LAST), **options)
    return {(one.loop, one.position): one for one in grid.effects}


def test_only_the_state_that_carries_the_answer_moves_it(circuit):
    found = grid_of(circuit)
    for loop, position in ((1, TOKEN), (2, LAST)):
        assert found[loop, position].flipped == 1.0
        assert found[loop, position].moved == pytest.approx(1.0)
    for loop, position in ((1, LAST), (2, TOKEN), *((loop, at) for loop in (1, 2) for at in OTHERS)):
        assert found[loop, position].flipped == 0.0
        assert found[loop, position].moved == pytest.approx(0.0)
        assert found[loop, position].shift == pytest.approx(0.0)


def test_the_state_that_keeps_a_beginning_answers_as_the_spliced_prompt(circuit):
    # The token is all that a beginning holds: after loop 1 its own position has its value, after loop 2 the last one.
    found = grid_of(circuit)
    assert found[1, TOKEN].spliced == found[2, LAST].spliced == 1.0
    # The beginning up to position 2 holds the token too, but no state there is read by the rest.
    assert found[1, 2].spliced == found[2, TOKEN].spliced == found[1, LAST].spliced == 0.0
    # Up to position 0 there is nothing that answers could differ by.
    assert found[1, 0].spliced is None
    noisy = patch_grid(circuit, PAIRS, LABELS, noising(1.0), "noise", positions=(LAST,), has_source=False)
    assert all(one.spliced is None for one in noisy.effects)


def test_errors_over_pairs(circuit):
    # Two of the pairs can be flipped by the answer's own position, two have the same answer on both sides.
    pairs = [*PAIRS[:2], (PAIRS[0][0], PAIRS[0][0]), (PAIRS[0][1], PAIRS[0][1])]
    (found,) = patch_grid(circuit, pairs, LABELS, replacing(), "replace", positions=(TOKEN,), loops=(1,)).effects
    assert (found.flipped, found.moved) == (0.5, pytest.approx(0.5))
    assert found.flipped_stderr == pytest.approx((1 / 3) ** 0.5 / 2)  # variance 4/4 * 1/4 * 4/3 over four pairs
    assert found.moved_stderr == pytest.approx((1 / 3) ** 0.5 / 2)


def test_a_blend_moves_the_answer_in_part(circuit):
    # At loop 2 the head reads the last position's state directly, and logits are linear in it.
    found = grid_of(circuit, replacing(0.25))
    assert found[2, LAST].moved == pytest.approx(0.25)
    assert found[2, LAST].flipped == 0.0
    assert grid_of(circuit, replacing(0.75))[2, LAST].flipped == 1.0


def test_noise_and_states_of_another_loop(circuit):
    noisy = patch_grid(
        circuit, PAIRS, LABELS, noising(30.0), "noise", positions=(TOKEN, 0), has_source=False, loops=(1,)
    )
    by_position = {one.position: one for one in noisy.effects}
    assert by_position[TOKEN].moved is None
    assert by_position[TOKEN].shift > 0.2
    # The first loop's state at the last position knows no answer: putting it back takes the answer away.
    earlier = patch_grid(circuit, PAIRS, LABELS, from_loop(1), "loop", positions=(-1,), loops=(2,), has_source=False)
    assert earlier.effects[0].shift > 0.5
    same = patch_grid(circuit, PAIRS, LABELS, from_loop(2), "loop", positions=(-1,), loops=(2,), has_source=False)
    assert same.effects[0].shift == 0.0
    half = patch_grid(circuit, PAIRS, LABELS, from_loop(1, 0.5), "loop", positions=(-1,), loops=(2,), has_source=False)
    assert 0.0 < half.effects[0].shift < earlier.effects[0].shift
    assert (half.effects[0].moved, half.effects[0].moved_stderr) == (None, None)


@pytest.mark.parametrize("changes", [{}, {"num_prelude_layers": 1, "num_coda_layers": 1, "injection": "add"}])
def test_without_edits_a_pass_is_the_model_s_own(make_model, changes):
    model = make_model(**changes)
    ids = [3, 9, 14, 2]
    found, output = run_pass(model, ids, 4), model.model(torch.tensor([ids]), num_loops=4)
    torch.testing.assert_close(found.hidden, torch.cat(output.loop_hidden_states))
    torch.testing.assert_close(found.gate_logits, output.gate_logits[:, 0])
    # A state replaced by itself changes nothing; the schedule 1..R is the plain order.
    patch = Patch(loop=2, positions=(1, 3), source=found.raw[1, [1, 3]])
    torch.testing.assert_close(run_pass(model, ids, 4, patches=[patch]).hidden, found.hidden)
    torch.testing.assert_close(run_pass(model, ids, schedule=(1, 2, 3, 4)).hidden, found.hidden)


def test_a_full_patch_of_all_positions_is_the_other_prompt_from_there_on(make_model):
    model = make_model()
    own, other = [3, 9, 14, 2], [1, 1, 5, 2]
    source = run_pass(model, other)
    patch = Patch(loop=1, positions=(0, 1, 2, 3), source=source.raw[0])
    patched = run_pass(model, own, patches=[patch])
    torch.testing.assert_close(patched.hidden, source.hidden)


def test_schedules_skip_and_repeat(make_model, circuit):
    model = make_model()
    ids = [3, 9, 14, 2]
    assert len(run_pass(model, ids, schedule=(1, 3)).hidden) == 2
    torch.testing.assert_close(run_pass(model, ids, schedule=(1, 2, 2, 3)).hidden[:2], run_pass(model, ids).hidden[:2])
    found = {one.change: one for one in schedule_effects(circuit, [pair[0] for pair in PAIRS], LABELS)}
    assert list(found) == ["skip 1", "skip 2", "repeat 1", "repeat 2"]
    assert found["skip 1"].changed == found["skip 2"].changed == 0.75  # one loop knows no answer, and says 0
    assert found["repeat 1"].changed == found["repeat 2"].changed == 0.0
    assert found["repeat 2"].schedule == (1, 2, 2)


def test_the_gate_s_part():
    logits = torch.tensor([[9.0, -9.0, -9.0], [-9.0, 9.0, -9.0], [0.0, 0.0, 0.0]])
    answers = torch.tensor([[0, 1, 2], [0, 5, 2], [7, 1, 2]])
    first, second = gate_effects(logits, answers, partners=[1, 0, 0], threshold=0.5)
    # Loops before: 1, 2, 3. With each other's first gate: prompt 1 goes on to 3, the others leave at 1.
    assert first.mean_loops_before == pytest.approx(2.0)
    assert first.mean_loops_after == pytest.approx((3 + 1 + 1) / 3)
    assert first.changed_depth == 1.0
    assert first.changed_answer == pytest.approx(2 / 3)
    assert (second.loop, second.changed_depth) == (2, pytest.approx(1 / 3))


def test_partners_answer_differently():
    answers = [0, 0, 1, 2]
    for seed in range(5):
        assert all(answers[j] != answers[i] for i, j in enumerate(partners_of(answers, seed)))
    assert partners_of([3, 3]) == [0, 1]


def test_effects_where_both_answer_alike():
    logits = torch.tensor([1.0, 0.0])
    assert effect(logits, logits + 1, torch.tensor([0.0, 1.0]), has_source=True)[:2] == (0.0, 0.0)


def test_impossible_edits_are_refused(make_model):
    model = make_model()
    with pytest.raises(UserError, match="lies outside"):
        run_pass(model, [1, 2], patches=[Patch(loop=4, positions=(0,))])
    with pytest.raises(UserError, match="lies outside"):
        run_pass(model, [1, 2], patches=[Patch(loop=1, positions=(2,))])
    with pytest.raises(UserError, match="schedule"):
        run_pass(model, [1, 2], schedule=())
    with pytest.raises(UserError, match="Position 5"):
        patch_grid(model, [([1], [2])], None, replacing(), "replace", positions=(5,))
    with pytest.raises(UserError, match="at least one token"):
        run_pass(model, [])
    for pairs, nothing in (([], {}), ([([1], [2])], {"positions": ()}), ([([1], [2])], {"loops": ()})):
        with pytest.raises(UserError, match="at least one pair"):
            patch_grid(model, pairs, None, replacing(), "replace", **nothing)
