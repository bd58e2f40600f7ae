"""A looped model is the unrolled dense model with copied weights: exact, in float64, for every wiring.

The dense model is written here a second time, from the released format's formulas and in other terms (plain
functions on weight dictionaries, softmax written out, heads repeated): R * L layers one after the other, the
final norm after every L of them.
"""

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from looplm.model.config import FinalNorm, Injection, LoopedConfig, LoopState, NormPlacement
from looplm.model.looped import LoopedTransformer

Weights = dict[str, Tensor]
MakeModel = Callable[..., LoopedTransformer]


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return x if weight is None else x * weight


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    out = x @ w[f"{name}.weight"].T
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def rope(x: Tensor, config: LoopedConfig) -> Tensor:
    """(B, N, S, d): frequencies, angles and tables in float32, as the released code has them."""
    d = config.head_dim
    inv_freq = 1.0 / (config.rope_theta ** (torch.arange(0, d, 2).float() / d))
    angles = torch.outer(torch.arange(x.shape[2]).float(), inv_freq)
    cos, sin = angles.cos().double(), angles.sin().double()
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attention(x: Tensor, w: Weights, config: LoopedConfig) -> Tensor:
    def heads(name: str, count: int) -> Tensor:
        return linear(x, w, f"self_attn.{name}_proj").reshape(*x.shape[:2], count, -1).transpose(1, 2)

    q = heads("q", config.num_attention_heads)
    k, v = heads("k", config.num_key_value_heads), heads("v", config.num_key_value_heads)
    if config.qk_norm:
        q = rms(q, w["self_attn.q_norm.weight"], config.rms_norm_eps)
        k = rms(k, w["self_attn.k_norm.weight"], config.rms_norm_eps)
    group = config.num_attention_heads // config.num_key_value_heads
    k, v = rope(k, config).repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = rope(q, config) @ k.transpose(2, 3) * config.head_dim**-0.5
    future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    out = scores.masked_fill(future, -torch.inf).softmax(-1) @ v  # (B, H, S, d)
    return linear(out.transpose(1, 2).reshape(*x.shape[:2], -1), w, "self_attn.o_proj")


def mlp(x: Tensor, w: Weights) -> Tensor:
    gate = linear(x, w, "mlp.gate_proj")
    return linear(gate * torch.sigmoid(gate) * linear(x, w, "mlp.up_proj"), w, "mlp.down_proj")


def dense_layer(x: Tensor, w: Weights, config: LoopedConfig) -> Tensor:
    def norm(y: Tensor, name: str) -> Tensor:
        return rms(y, w.get(f"{name}.weight"), config.rms_norm_eps)

    branches = (
        ("input_layernorm", "input_layernorm_2", lambda y: attention(y, w, config)),
        ("post_attention_layernorm", "post_attention_layernorm_2", lambda y: mlp(y, w)),
    )
    for first, second, branch in branches:
        if config.norm_placement == "ouro":
            x = x + norm(branch(norm(x, first)), second)
        elif config.norm_placement in ("pre", "magic"):
            x = x + branch(norm(x, first))
        elif config.norm_placement == "post":
            x = norm(x + branch(x), second)
        else:
            x = norm(x + branch(norm(x, first)), second)
    return x


def layer_weights(state: Weights, stack: str, index: int) -> Weights:
    prefix = f"{stack}.{index}."
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def corrected(w: Weights, state: Weights, layer: int, bank: int, config: LoopedConfig) -> Weights:
    """The layer's weights with the loop's low-rank correction added in, as one would merge LoRA."""
    w = dict(w)
    for name in [name for name in w if name.endswith("_proj.weight")]:
        path = f"lora.{layer}.{name.split('.')[1]}"
        b, a = state[f"{path}.b"][bank], state[f"{path}.a"][bank]
        w[name] = w[name] + config.lora_alpha / config.lora_rank * b @ a
    return w


def injected(e: Tensor, h: Tensor, state: Weights, config: LoopedConfig) -> Tensor:
    if config.injection == "scalar":
        w = torch.sigmoid(state["injection.logit"])
        return w * e + (1 - w) * rms(h, state["injection.norm.weight"], config.rms_norm_eps)
    if config.injection == "add":
        return h + e
    if config.injection == "concat_norm":
        h = rms(h, state["injection.state_norm.weight"], config.rms_norm_eps)
        e = rms(e, state["injection.embeds_norm.weight"], config.rms_norm_eps)
    if config.injection in ("concat", "concat_random", "concat_norm"):
        return concatenated(e, h, state["injection.proj.weight"])
    return h


def concatenated(e: Tensor, h: Tensor, w: Tensor) -> Tensor:
    """W [h; e], a half at a time."""
    d = h.shape[-1]
    return h @ w[:, :d].T + e @ w[:, d:].T


def unrolled(model: LoopedTransformer, ids: Tensor, num_loops: int) -> tuple[list[Tensor], list[Tensor]]:
    """States that the head reads and gate logits, at each of the `num_loops` depths of the unrolled model."""
    config, state = model.config, {name: value.clone() for name, value in model.state_dict().items()}
    num_layers = config.num_hidden_layers
    # One list of R * L layers, each with its own copy of the weights.
    layers = [layer_weights(state, "layers", i % num_layers) for i in range(num_loops * num_layers)]
    if config.lora_rank:
        banks = [min(i // num_layers, config.num_loops - 1) for i in range(len(layers))]
        layers = [corrected(w, state, i % num_layers, banks[i], config) for i, w in enumerate(layers)]

    def final_norm(y: Tensor, name: str) -> Tensor:
        return y if config.final_norm == "none" else rms(y, state.get(name), config.rms_norm_eps)

    x = state["embed_tokens.weight"][ids]
    for i in range(config.num_prelude_layers):
        x = dense_layer(x, layer_weights(state, "prelude", i), config)
    e, hiddens, gate_logits = x, [], []
    for depth, w in enumerate(layers):
        if depth and depth % num_layers == 0:
            x = injected(e, x, state, config)
        if depth >= num_layers and config.injection == "concat_layers":
            x = concatenated(e, x, state[f"injection.layers.{depth % num_layers}.proj.weight"])
        x = dense_layer(x, w, config)
        if (depth + 1) % num_layers:
            continue
        if config.norm_placement == "magic":
            x = rms(x, None, config.rms_norm_eps)
        hidden = final_norm(x, "norm.weight")
        gate = hidden @ state["early_exit_gate.weight"][0] + state["early_exit_gate.bias"]
        x = hidden if config.loop_state == "normed" else x
        for i in range(config.num_coda_layers):
            hidden = dense_layer(hidden, layer_weights(state, "coda", i), config)
        hiddens.append(final_norm(hidden, "coda_norm.weight") if config.num_coda_layers else hidden)
        gate_logits.append(gate)
    return hiddens, gate_logits


def assert_equals_unrolled(model: LoopedTransformer, num_loops: int | None = None) -> None:
    ids = torch.randint(model.config.vocab_size, (2, 7))
    with torch.no_grad():
        out = model(ids, num_loops=num_loops)
    hiddens, gate_logits = unrolled(model, ids, model.config.num_loops if num_loops is None else num_loops)
    assert len(out.loop_hidden_states) == len(hiddens)
    for loop, (ours, dense) in enumerate(zip(out.loop_hidden_states, hiddens, strict=True)):
        torch.testing.assert_close(ours, dense, rtol=1e-12, atol=1e-12, msg=lambda m, r=loop: f"loop {r + 1}: {m}")
    torch.testing.assert_close(out.gate_logits, torch.stack(gate_logits), rtol=1e-12, atol=1e-12)


def test_ouro_is_the_unrolled_dense_model(make_model: MakeModel):
    assert_equals_unrolled(make_model(num_hidden_layers=3, num_loops=4, num_key_value_heads=4))


@pytest.mark.parametrize("placement", get_args(NormPlacement))
@pytest.mark.parametrize("final_norm", get_args(FinalNorm))
@pytest.mark.parametrize("loop_state", get_args(LoopState))
def test_every_norm_and_loop_state(
    make_model: MakeModel, placement: NormPlacement, final_norm: FinalNorm, loop_state: LoopState
):
    assert_equals_unrolled(make_model(norm_placement=placement, final_norm=final_norm, loop_state=loop_state))


@pytest.mark.parametrize("injection", get_args(Injection))
@pytest.mark.parametrize("loop_state", get_args(LoopState))
def test_every_injection(make_model: MakeModel, injection: Injection, loop_state: LoopState):
    assert_equals_unrolled(make_model(injection=injection, loop_state=loop_state))


@pytest.mark.parametrize("num_loops", [1, 2, 5])
def test_any_depth_of_call(make_model: MakeModel, num_loops: int):
    """Also beyond the trained R = 3, where the last loop's correction goes on."""
    assert_equals_unrolled(make_model(lora_rank=3, injection="scalar"), num_loops)


@pytest.mark.parametrize("rank", [1, 4, 12])
def test_lora_is_a_correction_of_the_weights_loop_by_loop(make_model: MakeModel, rank: int):
    assert_equals_unrolled(make_model(lora_rank=rank, lora_alpha=3.0))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_key_value_heads": 4}, id="no-groups"),
        pytest.param({"num_key_value_heads": 1}, id="multi-query"),
        pytest.param({"qk_norm": True}, id="qk-norm"),
        pytest.param({"attention_bias": True}, id="qkv-bias"),
        pytest.param({"attention_output_bias": True, "mlp_bias": True}, id="output-and-mlp-bias"),
        pytest.param({"rms_norm_eps": 0.3, "qk_norm": True}, id="large-eps"),
        pytest.param({"rope_theta": 20.0}, id="small-theta"),
    ],
)
def test_every_attention_option(make_model: MakeModel, options: dict[str, Any]):
    assert_equals_unrolled(make_model(**options))


@pytest.mark.parametrize(("prelude", "coda"), [(2, 0), (0, 2), (1, 1)])
@pytest.mark.parametrize("final_norm", get_args(FinalNorm))
def test_prelude_and_coda(make_model: MakeModel, prelude: int, coda: int, final_norm: FinalNorm):
    model = make_model(
        num_prelude_layers=prelude, num_coda_layers=coda, final_norm=final_norm, injection="concat", loop_state="raw"
    )
    assert_equals_unrolled(model)


@pytest.mark.parametrize("placement", get_args(NormPlacement))
def test_one_loop_is_a_plain_transformer(make_model: MakeModel, placement: NormPlacement):
    """L layers and a final norm; neither loop state nor what enters later loops has a say."""
    plain = make_model(norm_placement=placement, num_loops=1)
    assert_equals_unrolled(plain)
    ids = torch.randint(31, (2, 7))
    expected = plain(ids).loop_hidden_states[0]
    for options in ({"loop_state": "raw"}, {"injection": "add"}, {"injection": "scalar"}, {"injection": "concat"}):
        other = make_model(norm_placement=placement, num_loops=1, **options)
        other.load_state_dict(plain.state_dict(), strict=False)
        assert torch.equal(other(ids).loop_hidden_states[0], expected)
