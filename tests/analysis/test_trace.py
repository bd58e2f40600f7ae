"""The recorded pass."""

import pytest
import torch

from looplm.analysis.trace import record_trace
from looplm.conversion.trace import Place, trace_looped
from looplm.errors import UserError

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [3], [2, 2, 7, 1]]


@pytest.mark.parametrize(
    "changes", [{}, {"num_prelude_layers": 1, "num_coda_layers": 1, "loop_state": "raw"}, {"norm_placement": "magic"}]
)
def test_states_are_those_of_each_prompt_run_alone(make_model, changes):
    model = make_model(**changes)
    trace = record_trace(model, PROMPTS, num_loops=4, batch_size=3)
    assert trace.layer_states is not None
    assert trace.layer_states.shape == (4, 2, 4, 16)
    assert trace.trained_loops == 3
    for i, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        output = model.model(ids, num_loops=4)
        whole = trace_looped(model, ids, 4)
        for loop in range(4):
            torch.testing.assert_close(trace.hidden[loop, i], output.loop_hidden_states[loop][0, -1])
            torch.testing.assert_close(trace.gate_logits[loop, i], output.gate_logits[loop, 0, -1])
            for layer in range(2):
                expected = whole.values[Place(loop + 1, "core", layer + 1)][0, -1]
                torch.testing.assert_close(trace.layer_states[loop, layer, i], expected)
            if loop + 1 < 4:
                entering = whole.values[Place(loop + 2, "input")][0, -1]
                torch.testing.assert_close(trace.states[loop, i], entering)


def test_chosen_positions_come_in_the_order_of_the_prompts(make_model):
    model = make_model()
    trace = record_trace(model, PROMPTS, positions=[[0, -1], [2], [], [1, 1]], layers=False, batch_size=2)
    assert trace.layer_states is None
    assert trace.prompt_ids.tolist() == [0, 0, 1, 3, 3]
    assert trace.positions.tolist() == [0, 2, 2, 1, 1]
    alone = model.model(torch.tensor([PROMPTS[1]])).loop_hidden_states[-1][0, 2]
    torch.testing.assert_close(trace.hidden[-1, 2], alone)


def test_it_stays_within_its_memory(make_model):
    with pytest.raises(UserError, match=r"4 points at 3 loops need .* GiB"):
        record_trace(make_model(), PROMPTS, max_bytes=1000)


@pytest.mark.parametrize(
    ("prompts", "positions", "message"),
    [
        ([], None, "no prompt"),
        ([[1], []], None, "Prompt 2 has 0 tokens: it is empty"),
        ([[1, 2]], [[2]], "position 2 is outside"),
        ([[1, 2]], [[0], [1]], "positions for 2 prompts, and 1 prompts"),
    ],
)
def test_impossible_points_are_refused(make_model, prompts, positions, message):
    with pytest.raises(UserError, match=message):
        record_trace(make_model(), prompts, positions=positions)


def test_hooks_are_gone_afterwards(make_model):
    model = make_model()
    record_trace(model, PROMPTS)
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_some_of_the_points(make_model):
    trace = record_trace(make_model(), PROMPTS)
    some = trace.points([3, 1])
    assert some.prompt_ids.tolist() == [3, 1]
    assert some.layer_states is not None and trace.layer_states is not None
    assert torch.equal(some.layer_states, trace.layer_states[:, :, [3, 1]])
    assert torch.equal(some.gate_logits, trace.gate_logits[:, [3, 1]])
