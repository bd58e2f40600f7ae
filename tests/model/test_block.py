"""One layer: the five norm placements against their formulas, and which norms hold parameters."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from looplm.model.attention import AttentionContext
from looplm.model.block import MLP, Block
from looplm.model.cache import GrowingKVCache
from looplm.model.config import LoopedConfig, NormPlacement
from looplm.model.rope import rope_cos_sin

PLACEMENTS = get_args(NormPlacement)

# A layer of width 2 with one head, small enough to follow by hand. A single token attends to itself alone,
# so attention is O V x whatever the queries and keys.
V = torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=torch.float64)
O = torch.tensor([[0.5, 0.0], [1.0, -1.0]], dtype=torch.float64)  # noqa: E741
GATE = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
UP = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
DOWN = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, -1.0]], dtype=torch.float64)
NORM_WEIGHTS = {
    "input_layernorm": torch.tensor([1.0, 2.0], dtype=torch.float64),
    "input_layernorm_2": torch.tensor([0.5, 1.5], dtype=torch.float64),
    "post_attention_layernorm": torch.tensor([3.0, 1.0], dtype=torch.float64),
    "post_attention_layernorm_2": torch.tensor([2.0, 0.25], dtype=torch.float64),
}
X = torch.tensor([[[3.0, -4.0]]], dtype=torch.float64)


def attend(x: Tensor) -> Tensor:
    return x @ V.T @ O.T


def feed_forward(x: Tensor) -> Tensor:
    gate = x @ GATE.T
    return (gate / (1 + (-gate).exp()) * (x @ UP.T)) @ DOWN.T


def unit(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def n1(x: Tensor) -> Tensor:
    return unit(x) * NORM_WEIGHTS["input_layernorm"]


def n2(x: Tensor) -> Tensor:
    return unit(x) * NORM_WEIGHTS["input_layernorm_2"]


def n3(x: Tensor) -> Tensor:
    return unit(x) * NORM_WEIGHTS["post_attention_layernorm"]


def n4(x: Tensor) -> Tensor:
    return unit(x) * NORM_WEIGHTS["post_attention_layernorm_2"]


FORMULAS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "ouro": (lambda x: x + n2(attend(n1(x))), lambda y: y + n4(feed_forward(n3(y)))),
    "pre": (lambda x: x + attend(n1(x)), lambda y: y + feed_forward(n3(y))),
    "post": (lambda x: n2(x + attend(x)), lambda y: n4(y + feed_forward(y))),
    "sandwich": (lambda x: n2(x + attend(n1(x))), lambda y: n4(y + feed_forward(n3(y)))),
    "magic": (lambda x: x + attend(unit(x)), lambda y: y + feed_forward(unit(y))),
}


def hand_made_block(placement: NormPlacement) -> Block:
    config = LoopedConfig(
        vocab_size=1,
        hidden_size=2,
        intermediate_size=3,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
        norm_placement=placement,
    )
    block = Block(config, layer_idx=0).double()
    projections = {
        "self_attn.q_proj": torch.ones(2, 2),
        "self_attn.k_proj": torch.ones(2, 2),
        "self_attn.v_proj": V,
        "self_attn.o_proj": O,
        "mlp.gate_proj": GATE,
        "mlp.up_proj": UP,
        "mlp.down_proj": DOWN,
    }
    norms = {name: weight for name, weight in NORM_WEIGHTS.items() if f"{name}.weight" in block.state_dict()}
    block.load_state_dict({f"{name}.weight": weight for name, weight in (projections | norms).items()})
    return block


def context(seq_len: int, head_dim: int) -> AttentionContext:
    return AttentionContext(*rope_cos_sin(torch.arange(seq_len)[None], head_dim, 1e4, torch.float64))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placement_is_its_formula(placement: NormPlacement):
    attention, mlp = FORMULAS[placement]
    out = hand_made_block(placement)(X, context(1, 2), 0, {})
    torch.testing.assert_close(out, mlp(attention(X)), rtol=1e-14, atol=1e-14)


def test_placements_all_differ():
    outs = [hand_made_block(placement)(X, context(1, 2), 0, {}) for placement in PLACEMENTS]
    for i, out in enumerate(outs):
        assert all((out - other).abs().max() > 1e-2 for other in outs[:i])


@pytest.mark.parametrize(
    ("placement", "names"),
    [
        ("ouro", set(NORM_WEIGHTS)),
        ("sandwich", set(NORM_WEIGHTS)),
        ("pre", {"input_layernorm", "post_attention_layernorm"}),
        ("post", {"input_layernorm_2", "post_attention_layernorm_2"}),
        ("magic", set()),
    ],
)
def test_norms_with_parameters(placement: NormPlacement, names: set[str]):
    block = hand_made_block(placement)
    assert {name.removesuffix(".weight") for name in block.state_dict() if "norm" in name} == names


def test_mlp_is_swiglu_with_its_biases(make_config: Callable[..., LoopedConfig]):
    mlp = MLP(make_config(mlp_bias=True)).double()
    for parameter in mlp.parameters():
        nn.init.normal_(parameter)
    p = dict(mlp.named_parameters())
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    gate = x @ p["gate_proj.weight"].T + p["gate_proj.bias"]
    wide = gate * torch.sigmoid(gate) * (x @ p["up_proj.weight"].T + p["up_proj.bias"])
    torch.testing.assert_close(
        mlp(x, {}), wide @ p["down_proj.weight"].T + p["down_proj.bias"], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_under_autocast_keeps_keys_as_narrow_as_values(
    qk_norm: bool, make_config: Callable[..., LoopedConfig]
):
    """RoPE and q/k norm widen to float32 there; a cache would hold keys of twice the size it should."""
    config = make_config(qk_norm=qk_norm)
    attention, cache = Block(config, layer_idx=0).self_attn, GrowingKVCache(config)
    x = torch.randn(2, 4, 12)
    tables = rope_cos_sin(torch.arange(4)[None], config.head_dim, 1e4, torch.float32)
    exact = attention(x, AttentionContext(*tables), 0, {})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(x, AttentionContext(*tables, cache=cache), 0, {})
    assert out.dtype == cache.keys[0].dtype == cache.values[0].dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), exact, rtol=0.05, atol=0.02)
