"""What a layer keeps for the backward pass: as little as it needs, with autograd's own numbers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from looplm.model.autocast import matmul_input
from looplm.model.block import MLP
from looplm.model.norm import RMSNorm, normalize

EPS = 1e-6


def kept(function: Callable[[], Tensor], *known: Tensor) -> list[Tensor]:
    """What autograd keeps while `function` runs: one tensor for each storage, those of `known` left out."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in known}
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in storages:
            storages.add(tensor.untyped_storage().data_ptr())
            found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function()
    return found


def by_autograd(norm: RMSNorm, x: Tensor) -> Tensor:
    normed = normalize(x, norm.eps)
    return normed if norm.weight is None else norm.weight * normed


def random_norm(learned_scale: bool, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(16, EPS, learned_scale=learned_scale)
    if norm.weight is not None:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm.to(dtype)


@pytest.mark.parametrize("learned_scale", [True, False])
@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "tolerance"),
    [
        (torch.float64, torch.float64, 1e-13),
        (torch.float32, torch.float32, 1e-6),
        (torch.bfloat16, torch.bfloat16, 1e-2),
        (torch.bfloat16, torch.float32, 1e-2),
    ],
)
def test_a_norm_has_the_value_and_the_gradients_of_autograd(learned_scale, dtype, weight_dtype, tolerance):
    norm = random_norm(learned_scale, weight_dtype)
    x = (3 * torch.randn(2, 5, 16)).to(dtype).requires_grad_()
    upstream = torch.randn(2, 5, 16).to(norm(x).dtype)
    inputs = [x, *norm.parameters()]
    ours, plain = norm(x), by_autograd(norm, x)
    assert torch.equal(ours, plain) and ours.dtype == plain.dtype
    gradients = (torch.autograd.grad(output, inputs, upstream) for output in (ours, plain))
    for mine, theirs in zip(*gradients, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).double().norm() <= tolerance * theirs.double().norm()


@pytest.mark.parametrize("learned_scale", [True, False])
def test_a_norm_may_be_differentiated_twice_and_mapped(learned_scale):
    norm = random_norm(learned_scale, torch.float64)
    x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(norm, x)
    per_row = torch.func.vmap(torch.func.grad(lambda row: norm(row).square().mul(row).sum()))(x.detach())
    (together,) = torch.autograd.grad(by_autograd(norm, x).square().mul(x).sum(), x)
    torch.testing.assert_close(per_row, together, rtol=0, atol=1e-13)


def test_a_norm_keeps_its_input_alone():
    norm = random_norm(True, torch.float32)
    x = torch.randn(2, 5, 16, requires_grad=True)
    assert kept(lambda: norm(x), x, norm.weight) == []
    assert kept(lambda: by_autograd(norm, x), x, norm.weight) != []


def test_a_norm_is_the_same_without_gradients():
    norm, x = random_norm(True, torch.float32), torch.randn(2, 16)
    with torch.no_grad():
        assert torch.equal(norm(x), by_autograd(norm, x))


@pytest.fixture
def mlp(make_config) -> MLP:
    return MLP(make_config())  # D 12, feed-forward 20


def test_the_mlp_has_the_gradients_of_autograd_bit_for_bit_in_bfloat16(mlp):
    mlp = mlp.bfloat16()
    x = torch.randn(2, 5, 12).bfloat16().requires_grad_()
    inputs = [x, *mlp.parameters()]
    plain = mlp.down_proj(silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    ours = mlp(x, {})
    assert torch.equal(ours, plain)
    for mine, theirs in zip(
        torch.autograd.grad(ours.sum(), inputs), torch.autograd.grad(plain.sum(), inputs), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_the_mlp_may_be_differentiated_twice(mlp):
    mlp = mlp.double()
    x = torch.randn(1, 3, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: mlp(x, {}), x)


def test_under_autocast_the_mlp_keeps_one_narrow_input_and_three_wide_states(mlp):
    """The input once for both products, gate, up and what down reads; not the input twice, nor silu(gate)."""
    x = torch.randn(2, 5, 12, requires_grad=True) * 2  # no leaf: autocast keeps the casts of those
    with torch.autocast("cpu", torch.bfloat16):
        mlp(x, {})  # the weights' casts are cached by the surrounding autocast, as in a step of several loops
        found = kept(lambda: mlp(x, {}), x)
    states = sorted(tensor.shape[-1] for tensor in found if tensor.numel() // tensor.shape[-1] == 10)
    assert states == [12, 20, 20, 20]


def test_an_input_is_cast_where_autocast_would_cast_it_and_only_there():
    x = torch.randn(2, 4)
    assert matmul_input(x) is x
    with torch.autocast("cpu", torch.bfloat16):
        assert matmul_input(x).dtype == torch.bfloat16
        for other in (x.double(), x.bfloat16(), x.half()):
            assert matmul_input(other) is other
        with torch.autocast("cpu", enabled=False):
            assert matmul_input(x) is x
    assert matmul_input(x.to("meta")).device.type == "meta"
