"""Held-out loss by depth during a run, against the evaluation's own record of the same windows."""

import math
from collections.abc import Callable

import pytest
import torch

from looplm.data.evaluation_windows import EvaluationWindows
from looplm.errors import UserError
from looplm.evaluation.depth_sweep import depth_sweep
from looplm.evaluation.record import record
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.training.held_out import HeldOut, sum_of_losses

MakeModel = Callable[..., LoopLMForCausalLM]


def test_losses_and_bits_are_those_of_the_depth_sweep(make_model: MakeModel, windows: EvaluationWindows):
    model = make_model().double()
    found = HeldOut(windows, max_loops=5, batch_rows=3).measure(model)
    passed = record(model, windows.batches(2), windows.document_bytes, 5)
    expected = passed.cross_entropy.mean(1)
    torch.testing.assert_close(torch.tensor(found.loop_losses).double(), expected, rtol=0, atol=1e-6)
    assert found.num_tokens == windows.num_predicted_tokens == passed.num_tokens
    bits = [point.bits_per_byte for point in depth_sweep(passed).points]
    assert found.bits_per_byte == pytest.approx(bits, abs=1e-9)
    assert found.bits_per_byte[0] == pytest.approx(found.loop_losses[0] * found.num_tokens / math.log(2) / 143)


def test_how_windows_are_batched_changes_nothing(make_model: MakeModel, windows: EvaluationWindows):
    model = make_model().double()
    by_rows = [HeldOut(windows, 3, rows).measure(model).loop_losses for rows in (1, 2, 7, 100)]
    for other in by_rows[1:]:
        assert other == pytest.approx(by_rows[0], abs=1e-12)


def test_one_forward_a_batch_gives_every_depth(
    make_model: MakeModel, windows: EvaluationWindows, monkeypatch: pytest.MonkeyPatch
):
    model, calls = make_model(), []
    forward = model.model.forward
    monkeypatch.setattr(
        model.model, "forward", lambda *args, **kw: (calls.append(kw["num_loops"]), forward(*args, **kw))[1]
    )
    HeldOut(windows, max_loops=6, batch_rows=4).measure(model)
    assert calls == [6, 6]


@pytest.mark.parametrize("training", [True, False])
def test_the_model_comes_back_as_it_was(make_model: MakeModel, windows: EvaluationWindows, training: bool):
    model = make_model().train(training)
    seen = []
    handle = model.model.layers[0].register_forward_pre_hook(
        lambda layer, args: seen.append((layer.training, args[0].requires_grad))
    )
    HeldOut(windows, 2).measure(model)
    handle.remove()
    assert model.training == training and model.model.layers[0].training == training
    assert set(seen) == {(False, False)}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


def test_an_error_too_brings_it_back(
    make_model: MakeModel, windows: EvaluationWindows, monkeypatch: pytest.MonkeyPatch
):
    model = make_model().train()
    monkeypatch.setattr(model, "within", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        HeldOut(windows, 2).measure(model)
    assert model.training


def test_everything_runs_inside_one_verb_a_batch(
    make_model: MakeModel, windows: EvaluationWindows, monkeypatch: pytest.MonkeyPatch
):
    """Which is what a sharded model is gathered for."""
    model, calls = make_model(), []
    monkeypatch.setattr(model, "within", lambda function, *args: (calls.append(function), function(model, *args))[1])
    HeldOut(windows, 2, batch_rows=3).measure(model)
    assert calls == [sum_of_losses] * 3


@pytest.mark.parametrize(("max_loops", "batch_rows"), [(0, 8), (3, 0)])
def test_nothing_to_measure_is_refused(windows: EvaluationWindows, max_loops: int, batch_rows: int):
    with pytest.raises(UserError, match="at least one loop and one row"):
        HeldOut(windows, max_loops, batch_rows)
