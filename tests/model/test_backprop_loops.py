"""Truncated back-propagation: which loops carry gradient, and what still learns at the others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from looplm.errors import UserError
from looplm.model.looped import LoopedOutput, LoopedTransformer

MakeModel = Callable[..., LoopedTransformer]

OPTIONS = [
    pytest.param({}, id="ouro"),
    pytest.param({"injection": "scalar", "num_prelude_layers": 1}, id="injection"),
    pytest.param({"num_coda_layers": 1, "lora_rank": 2, "injection": "add"}, id="coda-lora"),
    pytest.param({"loop_state": "raw", "final_norm": "none"}, id="raw"),
]


def loss_of(output: LoopedOutput) -> Tensor:
    """A scalar that reads every hidden state and gate logit, each with a weight of its own."""
    generator = torch.Generator().manual_seed(3)
    parts = [*output.loop_hidden_states, *output.gate_logits]
    weights = [torch.randn(part.shape, dtype=part.dtype, generator=generator) for part in parts]
    return torch.stack([(weight * part).sum() for weight, part in zip(weights, parts, strict=True)]).sum()


def gradients(model: LoopedTransformer, output: LoopedOutput) -> dict[str, Tensor | None]:
    named = dict(model.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss_of(output), list(named.values()), allow_unused=True), strict=True))


def by_hand(model: LoopedTransformer, ids: Tensor, num_loops: int, backprop_loops: int) -> LoopedOutput:
    """The same from the verbs: full passes, whose raw state is cut off from the graph at the early loops."""
    context = model.context(ids)
    embeds = model.encode(ids, context)
    state, hiddens, gates = embeds, [], []
    for loop_idx in range(num_loops):
        raw = model.run_core(state, loop_idx, embeds, context)
        early = loop_idx < num_loops - backprop_loops
        readout = model.readout(raw.detach() if early else raw)
        state = readout.state.detach() if early else readout.state
        hiddens.append(model.run_coda(readout.hidden, loop_idx, context))
        gates.append(readout.gate_logits)
    return LoopedOutput(tuple(hiddens), torch.stack(gates))


def assert_same(mine: dict[str, Tensor | None], theirs: dict[str, Tensor | None], atol: float = 0.0) -> None:
    for name, expected in theirs.items():
        found = mine[name]
        if expected is None or found is None:
            assert expected is found, name
        else:
            torch.testing.assert_close(found, expected, rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("backprop_loops", [3, 4, 100])
def test_as_many_as_there_are_loops_is_the_full_gradient(
    make_model: MakeModel, options: dict[str, Any], backprop_loops: int
):
    model, ids = make_model(**options), torch.randint(31, (2, 5))
    full = gradients(model, model(ids))
    assert all(grad is not None and grad.any() for grad in full.values())
    assert_same(gradients(model, model(ids, backprop_loops=backprop_loops)), full)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("backprop_loops", [1, 2, 3])
def test_it_is_the_computation_with_a_detached_state(
    make_model: MakeModel, options: dict[str, Any], backprop_loops: int
):
    model, ids = make_model(**options), torch.randint(31, (2, 5))
    truncated = model(ids, num_loops=4, backprop_loops=backprop_loops)
    full = model(ids, num_loops=4)
    for mine, theirs in zip(truncated.loop_hidden_states, full.loop_hidden_states, strict=True):
        assert torch.equal(mine, theirs)
    found = gradients(model, truncated)
    assert_same(found, gradients(model, by_hand(model, ids, 4, backprop_loops)), atol=1e-12)
    name = "layers.0.mlp.up_proj.weight"
    cut, whole = found[name], gradients(model, full)[name]
    assert cut is not None and whole is not None and (cut - whole).abs().max() > 1e-6


def test_early_readouts_still_teach_norm_gate_and_coda(make_model: MakeModel):
    """With a loss on loop 1 alone, and the core cut off there."""
    model, ids = make_model(num_coda_layers=1), torch.randint(31, (2, 5))
    output = model(ids, backprop_loops=1)
    loss = output.loop_hidden_states[0].square().sum() + output.gate_logits[0].sum()
    loss.backward()
    learned = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert {"norm.weight", "early_exit_gate.weight", "early_exit_gate.bias", "coda_norm.weight"} <= learned
    assert any(name.startswith("coda.0.") for name in learned)
    assert not any(name.startswith(("layers.", "embed_tokens")) for name in learned)


@pytest.mark.parametrize("injection", ["none", "scalar", "add", "concat"])
def test_embeddings_and_prelude_learn_through_the_injection(make_model: MakeModel, injection: str):
    model = make_model(injection=injection, num_prelude_layers=1)
    found = gradients(model, model(torch.randint(31, (2, 5)), backprop_loops=2))
    for name in ("embed_tokens.weight", "prelude.0.mlp.up_proj.weight"):
        assert (found[name] is None) == (injection == "none"), name


def test_early_loops_keep_no_activations(make_model: MakeModel):
    """Saved tensors do not grow with the loops before those that carry gradient."""
    model, ids = make_model(final_norm="frms"), torch.randint(31, (2, 5))

    def saved_in_core(num_loops: int, backprop_loops: int | None) -> int:
        count = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal count
            count += tensor.shape[-1] == 20  # of the MLP's width
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(ids, num_loops=num_loops, backprop_loops=backprop_loops)
        return count

    assert saved_in_core(6, 2) == saved_in_core(2, None) > 0
    assert saved_in_core(6, None) == 3 * saved_in_core(6, 2)


def test_without_gradients_it_changes_nothing(make_model: MakeModel):
    model, ids = make_model(), torch.randint(31, (2, 5))
    with torch.no_grad():
        output = model(ids, backprop_loops=1)
    assert not output.gate_logits.requires_grad and not output.loop_hidden_states[-1].requires_grad


@pytest.mark.parametrize("backprop_loops", [0, -2])
def test_less_than_one_loop_is_refused(make_model: MakeModel, backprop_loops: int):
    with pytest.raises(UserError, match=f"backprop_loops is {backprop_loops}; at least the last loop"):
        make_model()(torch.randint(31, (1, 3)), backprop_loops=backprop_loops)
