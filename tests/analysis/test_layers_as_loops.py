"""A dense model whose layers are taken for loops does what it always did."""

import pytest
import torch

from looplm.analysis.interventions import Patch, run_pass, schedule_effects
from looplm.analysis.layers_as_loops import layers_as_loops
from looplm.analysis.lens import lens
from looplm.analysis.trace import record_trace
from looplm.errors import UserError

IDS = [3, 9, 14, 2]


@pytest.mark.parametrize(
    "changes",
    [{}, {"norm_placement": "magic"}, {"num_prelude_layers": 1, "num_coda_layers": 1, "coda_input": "raw"}],
)
@pytest.mark.parametrize("layers_per_loop", [1, 2, 4])
def test_the_states_are_those_of_the_layers(make_model, changes, layers_per_loop):
    model = make_model(num_loops=1, num_hidden_layers=4, **changes)
    view = layers_as_loops(model, layers_per_loop)
    plain, found = record_trace(model, [IDS, IDS[:2]]), record_trace(view, [IDS, IDS[:2]])
    assert found.num_loops == found.trained_loops == 4 // layers_per_loop
    torch.testing.assert_close(found.layer_states.flatten(0, 1), plain.layer_states[0])
    torch.testing.assert_close(found.hidden[-1], plain.hidden[0])
    # The lens reads the dense model's layers as the view's loops are read.
    readings = lens(model, IDS).readings[layers_per_loop - 1 :: layers_per_loop]
    seen = [one for one in lens(view, IDS).readings if one.layer == layers_per_loop]
    assert [one.top_ids for one in seen] == [one.top_ids for one in readings]
    torch.testing.assert_close([one.entropy for one in seen], [one.entropy for one in readings])
    hidden = run_pass(view, IDS).hidden[:, -1]
    torch.testing.assert_close(hidden, found.hidden[:, 0])


def test_layers_are_patched_and_skipped(make_model):
    model = make_model(num_loops=1, num_hidden_layers=4)
    view = layers_as_loops(model, 2)
    other = run_pass(view, [1, 1, 5, 2])
    patched = run_pass(view, IDS, patches=[Patch(loop=1, positions=(0, 1, 2, 3), source=other.raw[0])])
    torch.testing.assert_close(patched.hidden, other.hidden)
    assert [one.change for one in schedule_effects(view, [IDS], None)] == ["skip 1", "skip 2", "repeat 1", "repeat 2"]
    # Skipping loop 1 runs layers 3 and 4 alone.
    skipped = run_pass(view, IDS, schedule=(2,))
    del model.model.layers[:2]
    torch.testing.assert_close(skipped.hidden, run_pass(model, IDS).hidden)


def test_what_does_not_divide_is_refused(make_model):
    with pytest.raises(UserError, match="4 layers do not divide into loops of 3"):
        layers_as_loops(make_model(num_loops=1, num_hidden_layers=4), 3)
    with pytest.raises(UserError, match="has 2 loops of its own"):
        layers_as_loops(make_model(num_loops=2), 1)
    with pytest.raises(UserError, match="no loop after 2"):
        record_trace(layers_as_loops(make_model(num_loops=1), 1), [IDS], 3)
