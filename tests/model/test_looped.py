"""The loop: its verbs, depth as an argument, causality, rows at different loops, and the names of the parameters."""

import itertools
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from looplm.errors import UserError
from looplm.model.config import LoopedConfig, NormPlacement
from looplm.model.looped import LoopedOutput, LoopedTransformer, check_num_loops

MakeModel = Callable[..., LoopedTransformer]

EVERYTHING: dict[str, Any] = {
    "num_prelude_layers": 1,
    "num_coda_layers": 1,
    "injection": "scalar",
    "lora_rank": 2,
    "loop_state": "raw",
    "qk_norm": True,
}


def random_ids(*shape: int) -> Tensor:
    return torch.randint(31, shape)


def assert_same(a: LoopedOutput, b: LoopedOutput) -> None:
    assert len(a.loop_hidden_states) == len(b.loop_hidden_states)
    for x, y in zip(a.loop_hidden_states, b.loop_hidden_states, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    torch.testing.assert_close(a.gate_logits, b.gate_logits, rtol=0, atol=1e-12)


# --- The verbs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["ouro", "everything"])
def test_forward_is_r_calls_of_the_verbs(make_model: MakeModel, options: dict[str, Any]):
    model = make_model(**options)
    ids = random_ids(2, 5)
    context = model.context(ids)
    embeds = model.encode(ids, context)
    state, hiddens, gates = embeds, [], []
    for loop_idx in range(3):
        readout = model.readout(model.run_core(state, loop_idx, embeds, context))
        state = readout.state
        hiddens.append(model.run_coda(readout.hidden, loop_idx, context))
        gates.append(readout.gate_logits)
    out = model(ids)
    assert all(torch.equal(a, b) for a, b in zip(out.loop_hidden_states, hiddens, strict=True))
    assert torch.equal(out.gate_logits, torch.stack(gates))


def test_output_shapes(make_model: MakeModel):
    out = make_model()(random_ids(2, 5))
    assert [h.shape for h in out.loop_hidden_states] == [(2, 5, 12)] * 3
    assert out.gate_logits.shape == (3, 2, 5)


def test_without_a_prelude_the_first_state_is_the_bare_embedding(make_model: MakeModel):
    model = make_model()
    ids = random_ids(2, 5)
    assert torch.equal(model.encode(ids, model.context(ids)), model.embed_tokens.weight[ids])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rotary_tables_have_the_dtype_of_the_weights(make_model: MakeModel, dtype: torch.dtype):
    """As in the released code, where a bfloat16 model rotates in bfloat16."""
    context = make_model().to(dtype).context(random_ids(2, 5))
    assert context.cos.dtype == context.sin.dtype == dtype


def test_normed_and_raw_loop_state(make_model: MakeModel):
    """What the next loop reads differs; what gate and head read does not."""
    raw_state = torch.randn(2, 4, 12, dtype=torch.float64)
    normed, raw = make_model(loop_state="normed"), make_model(loop_state="raw")
    hidden = normed.norm(raw_state)
    for model, state in ((normed, hidden), (raw, raw_state)):
        readout = model.readout(raw_state)
        assert torch.equal(readout.state, state)
        assert torch.equal(readout.hidden, hidden)
        assert torch.equal(readout.gate_logits, model.early_exit_gate(hidden)[..., 0])
    ids = random_ids(2, 5)
    first, second = normed(ids).loop_hidden_states, raw(ids).loop_hidden_states
    assert torch.equal(first[0], second[0])
    assert (first[1] - second[1]).abs().max() > 1e-2


def test_magic_is_pre_with_parameter_free_norms(make_model: MakeModel):
    """And with one more norm as the core ends, which a parameter-free final norm makes idle: N(N(x)) = N(x)."""
    tiny_eps = 1e-30
    magic = make_model(norm_placement="magic", final_norm="frms", rms_norm_eps=tiny_eps)
    pre = make_model(norm_placement="pre", final_norm="frms", rms_norm_eps=tiny_eps)
    ones = {name: torch.ones_like(p) for name, p in pre.state_dict().items() if "layernorm" in name}
    pre.load_state_dict(magic.state_dict() | ones)
    ids = random_ids(2, 5)
    assert_same(magic(ids), pre(ids))


def test_magic_norms_the_raw_state_at_the_exit_of_the_core(make_model: MakeModel):
    model = make_model(norm_placement="magic", final_norm="none", loop_state="raw")
    ids = random_ids(2, 5)
    context = model.context(ids)
    embeds = model.encode(ids, context)
    raw = model.run_core(embeds, 0, embeds, context)
    torch.testing.assert_close(raw.square().mean(-1), torch.ones(2, 5).double(), rtol=1e-4, atol=0)


# --- Depth ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_loops", [0, -1])
def test_depth_below_one_is_refused(make_model: MakeModel, num_loops: int):
    with pytest.raises(UserError, match=f"num_loops is {num_loops}; depth counts loops from 1"):
        make_model()(random_ids(1, 3), num_loops=num_loops)
    with pytest.raises(UserError):
        check_num_loops(num_loops)


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["ouro", "everything"])
def test_a_deeper_call_only_adds_loops(make_model: MakeModel, options: dict[str, Any]):
    model = make_model(**options)
    ids = random_ids(2, 5)
    deep = model(ids, num_loops=5)
    assert len(deep.loop_hidden_states) == 5
    for num_loops in (1, 3):
        shallow = model(ids, num_loops=num_loops)
        assert_same(shallow, LoopedOutput(deep.loop_hidden_states[:num_loops], deep.gate_logits[:num_loops]))
    assert_same(model(ids), model(ids, num_loops=3))
    assert all((a - b).abs().max() > 1e-6 for a, b in itertools.pairwise(deep.loop_hidden_states))


# --- Causality --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", get_args(NormPlacement))
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_a_later_token_changes_nothing_before_it(
    make_model: MakeModel, placement: NormPlacement, options: dict[str, Any]
):
    model = make_model(norm_placement=placement, **options)
    ids = random_ids(2, 6)
    other = ids.clone()
    other[:, 3] = (ids[:, 3] + 1) % 31
    before, after = model(ids), model(other)
    for a, b in zip(before.loop_hidden_states, after.loop_hidden_states, strict=True):
        torch.testing.assert_close(a[:, :3], b[:, :3], rtol=0, atol=1e-13)
        assert ((a - b)[:, 3:].abs().amax(dim=(0, 2)) > 1e-8).all(), "the token itself and all later ones change"
    torch.testing.assert_close(before.gate_logits[..., :3], after.gate_logits[..., :3], rtol=0, atol=1e-13)


# --- Rows at different loops ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="none"),
        pytest.param({"injection": "scalar"}, id="scalar"),
        pytest.param({"injection": "add"}, id="add"),
        pytest.param({"injection": "concat"}, id="concat"),
        pytest.param({"lora_rank": 2}, id="lora"),
        pytest.param(EVERYTHING, id="everything"),
    ],
)
def test_a_vector_of_loops_is_each_row_at_its_own(make_model: MakeModel, options: dict[str, Any]):
    model = make_model(**options)
    loop_idx = torch.tensor([2, 0, 1, 0, 4])  # 4 is beyond the trained loops
    ids = random_ids(5, 6)
    context = model.context(ids)
    embeds = model.encode(ids, context)
    state = torch.randn_like(embeds)
    together = model.run_core(state, loop_idx, embeds, context)
    for row, loop in enumerate(loop_idx.tolist()):
        alone = model.run_core(state[row : row + 1], loop, embeds[row : row + 1], context)
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-12)
    if options:
        elsewhere = model.run_core(state, (loop_idx == 0).long(), embeds, context)
        changed = (elsewhere - together).abs().amax(dim=(1, 2)) > 1e-6
        assert changed.all(), "loops must differ for the comparison to mean anything"


# --- Names ------------------------------------------------------------------------------------------------------


def ouro_names(num_layers: int) -> list[str]:
    """Tensors of a released checkpoint less the LM head and the `model.` prefix, sorted as it stores them."""
    in_layer = (
        "input_layernorm.weight",
        "input_layernorm_2.weight",
        "mlp.down_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "post_attention_layernorm.weight",
        "post_attention_layernorm_2.weight",
        "self_attn.k_proj.weight",
        "self_attn.o_proj.weight",
        "self_attn.q_proj.weight",
        "self_attn.v_proj.weight",
    )
    layers = [f"layers.{i}.{name}" for i in range(num_layers) for name in in_layer]
    return sorted(["early_exit_gate.bias", "early_exit_gate.weight", "embed_tokens.weight", *layers, "norm.weight"])


def test_state_dict_has_the_names_and_shapes_of_the_released_checkpoints():
    with torch.device("meta"):
        model = LoopedTransformer(
            LoopedConfig(
                vocab_size=49_152,
                hidden_size=2048,
                intermediate_size=5632,
                num_hidden_layers=24,
                num_attention_heads=16,
                num_key_value_heads=16,
                head_dim=128,
            )
        )
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert sorted(shapes) == ouro_names(24)
    assert len(shapes) == 269 - 1, "all but lm_head.weight"
    assert sum(value.numel() for value in model.parameters()) == 1_434_652_673 - 49_152 * 2048
    assert shapes["embed_tokens.weight"] == (49_152, 2048)
    assert shapes["early_exit_gate.weight"] == (1, 2048) and shapes["early_exit_gate.bias"] == (1,)
    assert shapes["layers.23.mlp.down_proj.weight"] == (2048, 5632)
    assert shapes["layers.0.mlp.gate_proj.weight"] == shapes["layers.0.mlp.up_proj.weight"] == (5632, 2048)


@pytest.mark.parametrize(
    ("options", "added", "removed"),
    [
        ({"final_norm": "frms"}, set(), {"norm.weight"}),
        ({"final_norm": "none"}, set(), {"norm.weight"}),
        ({"injection": "scalar"}, {"injection.logit", "injection.norm.weight"}, set()),
        ({"injection": "add"}, set(), set()),
        ({"injection": "concat"}, {"injection.proj.weight"}, set()),
        ({"qk_norm": True}, {f"layers.{i}.self_attn.{n}_norm.weight" for i in (0, 1) for n in "qk"}, set()),
        ({"attention_bias": True}, {f"layers.{i}.self_attn.{n}_proj.bias" for i in (0, 1) for n in "qkv"}, set()),
        ({"attention_output_bias": True}, {f"layers.{i}.self_attn.o_proj.bias" for i in (0, 1)}, set()),
        (
            {"mlp_bias": True},
            {f"layers.{i}.mlp.{n}_proj.bias" for i in (0, 1) for n in ("gate", "up", "down")},
            set(),
        ),
        (
            {"lora_rank": 2},
            {
                f"lora.{i}.{n}_proj.{m}"
                for i in (0, 1)
                for n in ("q", "k", "v", "o", "gate", "up", "down")
                for m in "ab"
            },
            set(),
        ),
        (
            {"num_prelude_layers": 1, "num_coda_layers": 1},
            {name.replace("layers.0", stack) for name in ouro_names(1) for stack in ("prelude.0", "coda.0")}
            - {"early_exit_gate.bias", "early_exit_gate.weight", "embed_tokens.weight", "norm.weight"}
            | {"coda_norm.weight"},
            set(),
        ),
    ],
)
def test_what_each_option_adds_to_the_names(
    make_model: MakeModel, options: dict[str, Any], added: set[str], removed: set[str]
):
    names = set(make_model(**options).state_dict())
    assert names == set(ouro_names(2)) - removed | added
