"""The two sides compute the same thing, or a comparison of their speed means nothing."""

import dataclasses

import pytest
import torch
from torch import Tensor

from looplm.bench.sides import Side, build_side
from looplm.bench.sizes import SMOKE, TrainSizes
from looplm.errors import UserError

SIZES = dataclasses.replace(SMOKE, num_layers=2, num_loops=3, precision="fp64", beta=0.3)


def with_weights_of(naive: Side, ours: Side) -> Side:
    """`naive` with the weights of `ours`, under the names that Llama gives them."""
    weights = {name.removeprefix("model."): value for name, value in ours.model.state_dict().items()}
    llama = {}
    for name in naive.model.llama.state_dict():
        parts = name.removeprefix("model.").split(".")
        if parts[0] == "layers":
            parts[1] = str(int(parts[1]) % SIZES.num_layers)
        llama[name] = weights[".".join(parts)]
    naive.model.llama.load_state_dict(llama)
    gate = {name: weights[f"early_exit_gate.{name}"] for name in ("weight", "bias")}
    naive.model.gate.load_state_dict(gate)
    return naive


def gradients(side: Side) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and every gradient by its name without `model.` and `llama.`."""
    loss = side.loss(side.input_ids, side.input_ids)
    loss.backward()
    named = {}
    for name, parameter in side.model.named_parameters():
        short = name.removeprefix("llama.").removeprefix("model.").replace("early_exit_gate", "gate")
        assert parameter.grad is not None
        named[short] = parameter.grad
    return loss, named


def randomized(side: Side) -> Side:
    """Weights that no part of the model is without effect at."""
    with torch.no_grad():
        for name, parameter in side.model.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(std=0.3)
    return side


def test_the_baseline_has_the_loss_and_the_gradients_of_ours():
    ours = randomized(build_side("looplm", SIZES))
    naive = with_weights_of(build_side("naive", SIZES), ours)
    loss, mine = gradients(ours)
    expected, theirs = gradients(naive)
    # Llama takes norms and rotary tables in float32 whatever the model's dtype.
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert mine.keys() == theirs.keys()
    for name, gradient in mine.items():
        assert (gradient - theirs[name]).norm() < 1e-5 * theirs[name].norm(), name


def test_both_hold_the_same_parameters_and_the_baseline_stores_its_layers_once():
    ours, naive = build_side("looplm", SIZES), build_side("naive", SIZES)
    assert ours.num_parameters == naive.num_parameters
    assert len(naive.model.llama.model.layers) == SIZES.num_layers * SIZES.num_loops
    assert sum(len(group["params"]) for group in naive.optimizer.param_groups) == len(list(naive.model.parameters()))


def kept_bytes(side: Side) -> int:
    """Bytes that autograd keeps for the backward pass, weights aside."""
    seen = {parameter.untyped_storage().data_ptr() for parameter in side.model.parameters()}
    kept: list[torch.UntypedStorage] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = side.loss(side.input_ids, side.input_ids)  # noqa: F841  (the graph must stay alive)
    return sum(storage.nbytes() for storage in kept)


@pytest.mark.parametrize("checkpointing", ["layer", "loop", "both"])
def test_recomputation_changes_no_number_and_keeps_less(checkpointing):
    plain = randomized(build_side("looplm", SIZES))
    lean = build_side("looplm", SIZES, checkpointing=checkpointing)
    lean.model.load_state_dict(plain.model.state_dict())
    assert lean.model.state_dict().keys() == plain.model.state_dict().keys()
    assert kept_bytes(lean) < 0.7 * kept_bytes(plain)
    (loss, mine), (expected, theirs) = gradients(lean), gradients(plain)
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["naive", "looplm"])
def test_a_step_learns_the_batch_and_leaves_no_gradient(name):
    side = build_side(name, dataclasses.replace(SMOKE, beta=0.0))
    losses = [side.step() for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert all(parameter.grad is None for parameter in side.model.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in side.model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seq_len": 1}, "seq_len is 1"),
        ({"hidden_size": 40}, "not a multiple of head_dim"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"precision": "fp16"}, "precision is 'fp16'"),
        ({"num_loops": 0}, "num_loops is 0"),
    ],
)
def test_impossible_sizes_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(SMOKE, **change)


def test_the_default_is_the_comparison_that_docs_speak_of():
    sizes = TrainSizes()
    assert (sizes.hidden_size, sizes.num_layers, sizes.num_loops, sizes.vocab_size) == (512, 6, 4, 49_152)
    assert (sizes.seq_len, sizes.batch_size, sizes.precision, sizes.num_tokens) == (512, 8, "bf16", 4096)
