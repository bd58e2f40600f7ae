"""Gradient of the state entering each (loop, layer), against autograd on the computation written out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from looplm.hf.modeling import LoopLMForCausalLM
from looplm.objectives import expected_loss
from looplm.training.gradients import measure_state_gradients
from looplm.training.layer_wrapping import wrap_layers

MakeModel = Callable[..., LoopLMForCausalLM]

OPTIONS = [
    pytest.param({}, id="ouro"),
    pytest.param({"injection": "scalar", "num_prelude_layers": 1, "num_coda_layers": 1}, id="injection-coda"),
    pytest.param({"loop_state": "raw", "norm_placement": "pre", "lora_rank": 2}, id="raw-lora"),
]


@pytest.fixture
def make_double(make_model: MakeModel) -> MakeModel:
    return lambda **options: make_model(num_hidden_layers=2, **options).double()


def batch(num_rows: int = 4) -> tuple[Tensor, Tensor]:
    ids = torch.randint(17, (num_rows, 9))
    labels = ids.clone()
    labels[0, 3:] = labels[1, :5] = -100
    return ids, labels


def loss_of(model: LoopLMForCausalLM, output: Any, labels: Tensor, num_tokens: int | None = None) -> Tensor:
    return expected_loss(model, output, labels, beta=0.1, num_tokens=num_tokens)[0]


def unrolled(model: LoopLMForCausalLM, ids: Tensor, labels: Tensor, num_loops: int) -> Tensor:
    """Norms (R, L): each layer reads its state plus a zero of its own, and autograd asks for that zero's gradient."""
    bare = model.model
    context = bare.context(ids)
    embeds = bare.encode(ids, context)
    state, hiddens, gates, zeros = embeds, [], [], []
    for loop_idx in range(num_loops):
        x = state
        for i, layer in enumerate(bare.layers):
            x = bare._inject(x, i, loop_idx, embeds)
            zeros.append(torch.zeros_like(x, requires_grad=True))
            x = layer(x + zeros[-1], context, loop_idx, bare.lora[i](loop_idx) if bare.lora is not None else {})
        readout = bare.readout(bare.core_exit_norm(x))
        state = readout.state
        hiddens.append(bare.run_coda(readout.hidden, loop_idx, context))
        gates.append(readout.gate_logits)
    output = type("Output", (), {"loop_hidden_states": tuple(hiddens), "gate_logits": torch.stack(gates)})()
    grads = torch.autograd.grad(loss_of(model, output, labels), zeros)
    return torch.stack([grad.norm() for grad in grads]).view(num_loops, len(bare.layers))


def measured(model: LoopLMForCausalLM, ids: Tensor, labels: Tensor, **forward: Any) -> Tensor:
    with measure_state_gradients(model.model) as gradients:
        loss_of(model, model.model(ids, **forward), labels).backward()
    return gradients.norms(forward.get("num_loops", 3))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("num_loops", [1, 3, 5])
def test_they_are_what_autograd_gives(make_double: MakeModel, options: dict[str, Any], num_loops: int):
    model, (ids, labels) = make_double(**options), batch()
    expected = unrolled(model, ids, labels, num_loops)
    assert expected.min() > 0
    torch.testing.assert_close(measured(model, ids, labels, num_loops=num_loops), expected, rtol=1e-12, atol=0)


def test_measuring_changes_no_gradient_but_by_rounding_and_leaves_no_hook(make_double: MakeModel):
    """Rounding: a state that others read too sums their gradients in another order."""
    model, (ids, labels) = make_double(), batch()
    loss_of(model, model.model(ids), labels).backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    measured(model, ids, labels)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name], rtol=1e-10, atol=1e-16)
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)
    with pytest.raises(ZeroDivisionError), measure_state_gradients(model.model):
        _ = 1 / 0
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)


@pytest.mark.parametrize("checkpointing", ["layer", "loop", "both"])
@pytest.mark.parametrize("options", OPTIONS)
def test_activation_checkpointing_counts_nothing_twice(
    make_double: MakeModel, options: dict[str, Any], checkpointing: Any
):
    model, (ids, labels) = make_double(**options), batch()
    expected = unrolled(model, ids, labels, 3)
    wrap_layers(model, False, checkpointing)
    torch.testing.assert_close(measured(model, ids, labels), expected, rtol=1e-12, atol=0)


def test_micro_batches_add_up(make_double: MakeModel):
    model, (ids, labels) = make_double(), batch()
    num_tokens = int((labels[:, 1:] != -100).sum())
    with measure_state_gradients(model.model) as gradients:
        for rows in (slice(0, 1), slice(1, 4)):
            loss_of(model, model.model(ids[rows]), labels[rows], num_tokens).backward()
    torch.testing.assert_close(gradients.norms(3), unrolled(model, ids, labels, 3), rtol=1e-12, atol=0)


def test_truncated_loops_have_none(make_double: MakeModel):
    model, (ids, labels) = make_double(injection="add"), batch()
    norms = measured(model, ids, labels, num_loops=4, backprop_loops=2)
    assert not norms[:2].any() and norms[2:].min() > 0


def test_a_forward_without_gradients_is_left_alone(make_double: MakeModel):
    model, (ids, labels) = make_double(), batch()
    with measure_state_gradients(model.model) as gradients:
        with torch.no_grad():
            model.model(ids)
        assert not gradients.norms(3).any()
        loss_of(model, model.model(ids), labels).backward()
    torch.testing.assert_close(gradients.norms(3), unrolled(model, ids, labels, 3), rtol=1e-12, atol=0)
