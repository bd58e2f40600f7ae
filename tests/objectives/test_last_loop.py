"""The last loop's loss against PyTorch's own cross entropy."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from looplm.objectives import expected_loss, last_loop_loss, shift_labels

LOOPS = [1, 2, 3]


@pytest.mark.parametrize("num_loops", LOOPS)
def test_it_is_the_cross_entropy_of_the_last_loop_in_value_and_in_every_gradient(make_model, make_batch, num_loops):
    model, (input_ids, labels) = make_model(), make_batch()
    output = model.model(input_ids, num_loops=num_loops)
    ours, _ = last_loop_loss(model, output, labels)
    logits = model.model(input_ids, num_loops=num_loops).loop_hidden_states[-1] @ model.lm_head.weight.T
    theirs = cross_entropy(logits.flatten(0, 1), shift_labels(labels).flatten())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    names, parameters = zip(*model.named_parameters(), strict=True)
    mine = torch.autograd.grad(ours, parameters, allow_unused=True)
    expected = torch.autograd.grad(theirs, parameters, allow_unused=True)
    for name, found, wanted in zip(names, mine, expected, strict=True):
        assert (found is None) == (wanted is None) == ("early_exit_gate" in name), name
        if found is not None:
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("num_loops", LOOPS)
def test_it_measures_all_loops_as_stage_one_does(make_model, make_batch, num_loops):
    model, (input_ids, labels) = make_model(), make_batch()
    output = model.model(input_ids, num_loops=num_loops)
    loss, ours = last_loop_loss(model, output, labels)
    _, theirs = expected_loss(model, output, labels, beta=0.1)
    assert ours["loss"] == loss and ours["loop_losses"][-1].item() == pytest.approx(loss.item(), abs=1e-12)
    assert ours.keys() == theirs.keys()
    for name in ours.keys() - {"loss"}:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-12, msg=name)


def test_loops_before_the_last_get_no_gradient_of_their_own(make_output):
    class Head:
        weight = torch.randn(13, 8, dtype=torch.float64, requires_grad=True)

        def apply_head(self, function, *args):
            return function(self.weight, *args)

    output = make_output()
    loss, _ = last_loop_loss(Head(), output, torch.randint(13, (2, 7)))
    loss.backward()
    *before, last = output.loop_hidden_states
    assert last.grad is not None and last.grad.abs().sum() > 0
    assert all(state.grad is None for state in before) and output.gate_logits.grad is None


def test_parts_add_up_to_the_whole(make_model, make_batch):
    model, (input_ids, labels) = make_model(), make_batch(4)
    whole, metrics = last_loop_loss(model, model.model(input_ids), labels)
    count = (shift_labels(labels) != -100).sum()
    parts = [
        last_loop_loss(model, model.model(ids), own, num_tokens=count)
        for ids, own in zip(input_ids.split(1), labels.split(1), strict=True)
    ]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole, rtol=0, atol=1e-12)
    together = sum(found["loop_losses"] for _, found in parts)
    torch.testing.assert_close(together, metrics["loop_losses"], rtol=0, atol=1e-12)


def test_a_batch_without_a_token_weighs_nothing(make_model, make_batch):
    model, (input_ids, labels) = make_model(), make_batch()
    loss, metrics = last_loop_loss(model, model.model(input_ids), torch.full_like(labels, -100))
    assert loss.item() == 0.0 and metrics["loop_losses"].tolist() == [0.0] * 3
