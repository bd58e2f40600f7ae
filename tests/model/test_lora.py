"""Per-loop LoRA banks: neutral at the start, one bank a loop, able to make every loop a layer of its own."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from looplm.model.config import LoopedConfig
from looplm.model.looped import LoopedTransformer
from looplm.model.lora import LayerLora, project, projection_sizes

MakeModel = Callable[..., LoopedTransformer]
MakeConfig = Callable[..., LoopedConfig]


def test_starts_as_identity(make_config: MakeConfig):
    plain = LoopedTransformer(make_config()).double()
    adapted = LoopedTransformer(make_config(lora_rank=4)).double()
    adapted.load_state_dict(plain.state_dict(), strict=False)
    ids = torch.randint(31, (2, 5))
    for a, b in zip(plain(ids).loop_hidden_states, adapted(ids).loop_hidden_states, strict=True):
        assert torch.equal(a, b)


def test_a_zero_b_still_gets_a_gradient(make_config: MakeConfig):
    model = LoopedTransformer(make_config(lora_rank=2))
    model(torch.randint(31, (2, 5))).loop_hidden_states[-1].square().sum().backward()
    for name, p in model.named_parameters():
        if name.endswith(".b"):
            assert p.grad is not None and all(loop.any() for loop in p.grad), name


def test_the_seven_matrices_have_the_sizes_of_the_layer(make_model: MakeModel):
    model = make_model(lora_rank=2)
    linears = {name.split(".")[-1]: m for name, m in model.layers[0].named_modules() if isinstance(m, nn.Linear)}
    assert projection_sizes(model.config) == {name: (m.in_features, m.out_features) for name, m in linears.items()}
    assert len(linears) == 7


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
def test_each_projection_is_corrected_in_its_own_loop_only(make_model: MakeModel, name: str):
    model = make_model(lora_rank=2, num_hidden_layers=1)
    ids = torch.randint(31, (2, 5))
    before = model(ids).loop_hidden_states
    with torch.no_grad():
        model.get_parameter(f"lora.0.{name}.b")[1] += 1
    after = model(ids).loop_hidden_states
    assert torch.equal(before[0], after[0])
    assert (before[1] - after[1]).abs().max() > 1e-4


def test_full_rank_makes_every_loop_a_layer_of_its_own(make_model: MakeModel):
    """Relaxed to full rank, R loops of one layer are any R layers: here those of a dense model three deep."""
    dense = make_model(num_hidden_layers=3, num_loops=1, norm_placement="pre", final_norm="frms")
    norm_free = {name: torch.ones_like(p) for name, p in dense.state_dict().items() if "layernorm" in name}
    dense.load_state_dict(norm_free, strict=False)
    looped = make_model(
        num_hidden_layers=1,
        num_loops=3,
        norm_placement="pre",
        final_norm="frms",
        loop_state="raw",
        lora_rank=24,
        lora_alpha=5.0,
    )
    source = dense.state_dict()
    shared = {name: p for name, p in source.items() if not name.startswith("layers.")}
    looped.load_state_dict(shared | {n: p for n, p in norm_free.items() if n.startswith("layers.0.")}, strict=False)
    for name, (in_features, _) in projection_sizes(looped.config).items():
        part = "mlp" if name.split("_")[0] in ("gate", "up", "down") else "self_attn"
        base = looped.get_parameter(f"layers.0.{part}.{name}.weight")
        a, b = (looped.get_parameter(f"lora.0.{name}.{m}") for m in "ab")
        for loop in range(3):
            missing = source[f"layers.{loop}.{part}.{name}.weight"] - base.detach()
            with torch.no_grad():  # b a = missing * rank / alpha, with a = [I; 0]
                a[loop].copy_(torch.eye(24, in_features))
                b[loop].zero_()[:, :in_features] = missing * 24 / 5.0
    ids = torch.randint(31, (2, 6))
    expected = dense(ids).loop_hidden_states[0]
    torch.testing.assert_close(looped(ids).loop_hidden_states[2], expected, rtol=0, atol=1e-12)


def test_a_vector_of_loops_gathers_a_slice_for_each_row(make_model: MakeModel):
    layer = make_model(lora_rank=2).get_submodule("lora.0")
    assert isinstance(layer, LayerLora)
    rows = layer(torch.tensor([1, 0, 7]))
    for row, loop in enumerate((1, 0, 2)):  # 7 is beyond the trained loops: the last bank
        for name, (a, b) in layer(loop).items():
            assert torch.equal(rows[name][0][row], a) and torch.equal(rows[name][1][row], b)


def test_project_adds_b_a_x():
    linear = nn.Linear(4, 6).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    a, b = torch.randn(2, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    assert torch.equal(project(linear, x, None), linear(x))
    expected = linear(x) + torch.einsum("or,ri,bsi->bso", b, a, x)
    torch.testing.assert_close(project(linear, x, (a, b)), expected, rtol=1e-12, atol=1e-12)
    rows = (torch.stack((a, 2 * a)), torch.stack((b, -b)))
    shift = expected - linear(x)
    by_row = linear(x) + torch.stack((shift[0], -2 * shift[1]))
    torch.testing.assert_close(project(linear, x, rows), by_row, rtol=1e-12, atol=1e-12)
