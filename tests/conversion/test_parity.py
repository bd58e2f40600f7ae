"""Comparing models: equal ones agree everywhere, and a change is found at the very place where it was made."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, kl_div, log_softmax

import looplm
from looplm.conversion.dense_to_looped import dense_to_looped
from looplm.conversion.parity import compare, loop_losses
from looplm.conversion.sides import compare_sources
from looplm.conversion.trace import Layers, Place, Trace, trace_dense, trace_looped
from looplm.conversion.upcycling import upcycle
from looplm.errors import UserError

IDS = torch.tensor([[5, 9, 2, 7, 31, 30, 4, 4, 11, 20, 1, 36], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])
GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def damaged(model, name):
    other = type(model)(model.config).double().eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.get_parameter(name).mul_(1.5)
    return other


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.embed_tokens.weight", "the embedding"),
        ("model.prelude.0.input_layernorm_2.weight", "layer 1 of the prelude"),
        ("model.layers.1.self_attn.k_proj.weight", "loop 1, layer 2"),
        ("model.norm.weight", "loop 1, the norm behind the core"),
        ("model.early_exit_gate.weight", "loop 1, the gate logits"),
        ("model.coda.0.input_layernorm.weight", "loop 1, layer 1 of the coda"),
        ("model.coda_norm.weight", "loop 1, the state that the head reads"),
        ("lm_head.weight", "loop 1, the logits"),
        ("model.injection.logit", "loop 2, the state that enters the core"),
        ("model.lora.0.q_proj.b", "loop 1, layer 1"),
    ],
)
def test_the_first_place_where_two_part(make_looped, name, place):
    model = make_looped(num_prelude_layers=1, num_coda_layers=1, injection="scalar", lora_rank=2)
    with torch.no_grad():
        for bank in model.model.lora.parameters():
            bank.normal_(std=0.3)
    found = compare(trace_looped(model, IDS), trace_looped(damaged(model, name), IDS))
    assert str(found.first_parting.place) == place
    assert compare(trace_looped(model, IDS), trace_looped(model, IDS), tolerance=0.0).first_parting is None


def test_a_trace_holds_the_forward(make_looped):
    model = make_looped(num_prelude_layers=1, num_coda_layers=1, loop_state="raw", coda_input="raw")
    trace, out = trace_looped(model, IDS, num_loops=3), model(IDS, num_loops=3, labels=IDS)
    assert torch.equal(trace.values[Place(3, "logits")], out.logits)
    assert torch.equal(trace.values[Place(2, "hidden")], out.loop_hidden_states[1])
    assert torch.equal(trace.values[Place(2, "input")], trace.values[Place(1, "core", 2)])
    assert torch.equal(trace.values[Place(1, "input")], trace.values[Place(0, "prelude", 1)])
    assert torch.equal(trace.values[Place(2, "gate")], out.gate_logits[1])
    assert loop_losses(trace)[2] == pytest.approx(
        cross_entropy(out.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).item(), rel=1e-6
    )
    assert not model.model.layers[0]._forward_hooks  # nothing stays on the model


def test_figures_of_the_predictions():
    a, b = torch.randn(2, 12, 37, dtype=torch.float64), torch.randn(2, 12, 37, dtype=torch.float64)
    traces = [Trace(name, IDS, {Place(1, "logits"): logits}, 1) for name, logits in (("a", a), ("b", b))]
    (row,) = compare(*traces).logits
    expected = kl_div(log_softmax(b, -1), log_softmax(a, -1), log_target=True, reduction="none").sum(-1).mean()
    assert row.kl_nats == pytest.approx(expected.item())
    assert row.top1_agreement == (a.argmax(-1) == b.argmax(-1)).double().mean()
    assert row.largest == (a - b).abs().max()
    # Padding counts neither as a place nor as a target.
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    masked = compare(Trace("a", IDS, traces[0].values, 1, mask), traces[1]).logits[0]
    rows = torch.cat(
        (
            cross_entropy(a[0, 5:-1], IDS[0, 6:], reduction="none"),
            cross_entropy(a[1, :-1], IDS[1, 1:], reduction="none"),
        )
    )
    assert masked.loss[0] == pytest.approx(rows.mean().item(), rel=1e-5)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_a_parting(make_looped, broken):
    model = make_looped()
    other = damaged(model, "lm_head.weight")
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight[0, 0] = broken
    found = compare(trace_looped(model, IDS), trace_looped(other, IDS))
    assert str(found.first_parting.place) == "loop 1, layer 1"
    # The same on both sides is no agreement: nothing was compared.
    same = compare(trace_looped(other, IDS), trace_looped(other, IDS))
    assert str(same.first_parting.place) == "loop 1, layer 1" and same.first_parting.largest == math.inf


@pytest.mark.parametrize("core", [None, (1, 4)])
def test_dense_and_looped_layer_by_layer(make_dense, core):
    dense = make_dense("qwen3")
    looped = dense_to_looped(dense, core=core)
    layers = Layers.of(looped.model.config)
    found = compare(trace_dense(dense, IDS, layers), trace_looped(looped, IDS), tolerance=1e-9)
    assert found.first_parting is None
    kinds = {place.place.part for place in found.places}
    assert kinds == {"embedding", "input", "core", "hidden", "logits"} | ({"prelude", "coda"} if core else set())
    with torch.no_grad():
        looped.model.layers[1].self_attn.q_norm.weight.add_(0.1)
    found = compare(trace_dense(dense, IDS, layers), trace_looped(looped, IDS))
    assert str(found.first_parting.place) == "loop 1, layer 2"
    with pytest.raises(UserError, match="has 6 layers, and the looped model stands for 5"):
        trace_dense(dense, IDS, Layers(1, 3, 1))


# --- Sources --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["base", "gqa", "one_step", "deep", "tied_mqa"])
@pytest.mark.parametrize("case", ["full", "left", "right"])
def test_golden_states_of_the_released_code(request, name, case):
    directory = GOLDEN / name
    if not directory.is_dir():
        directory = request.getfixturevalue("shared_dir") / "ouro" / "golden" / name
    report = compare_sources(directory, directory / "expected.safetensors", tolerance=2e-5, case=case)
    assert report.comparison.first_parting is None
    assert report.ids_from == "the file of states"
    assert {"core", "gate", "hidden", "logits"} == {place.place.part for place in report.comparison.places}
    loops = looplm.load(directory).model.config.num_loops
    assert len(report.comparison.logits) == loops
    # The other way round, and at fewer loops.
    fewer = compare_sources(directory / "expected.safetensors", directory, num_loops=1, tolerance=2e-5, case=case)
    assert fewer.comparison.first_parting is None
    assert len(fewer.comparison.logits) == 1


def test_another_checkpoint_parts_from_the_golden_states(tmp_path):
    model = looplm.load(GOLDEN / "gqa")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] += 0.5
    changed = looplm.save_checkpoint(model, tmp_path / "changed")
    found = compare_sources(changed, GOLDEN / "gqa" / "expected.safetensors").comparison
    assert str(found.first_parting.place) == "loop 1, layer 2"


def test_converted_against_its_source(save_dense, tmp_path):
    source = save_dense("llama")
    looped = looplm.save_checkpoint(dense_to_looped(source, core=(1, 5)), tmp_path / "looped")
    report = compare_sources(source, looped)
    assert report.comparison.first_parting is None
    assert (report.ids_from, len(report.comparison.logits)) == ("random ids", 1)
    tied = dense_to_looped(source, injection="none", lora_rank=24, lora_from="svd", dtype="fp64")
    tied = looplm.save_checkpoint(tied, tmp_path / "tied")
    found = compare_sources(source, tied).comparison
    assert found.first_parting is None
    assert [row.num_loops for row in found.logits] == [3]
    assert compare_sources(source, source).comparison.first_parting is None


def test_upcycled_against_its_source(make_looped, tmp_path):
    """Other numbers of layers: the states between loops are still comparable."""
    model = make_looped()
    before = looplm.save_checkpoint(model, tmp_path / "before")
    after = looplm.save_checkpoint(upcycle(model, 4), tmp_path / "after")
    report = compare_sources(before, after)
    assert not report.layers_compared
    assert str(report.comparison.first_parting.place) == "loop 1, the norm behind the core"


def test_what_cannot_be_compared(make_looped, save_dense, tmp_path):
    ours = looplm.save_checkpoint(make_looped(), tmp_path / "ours")
    states = GOLDEN / "gqa" / "expected.safetensors"
    with pytest.raises(UserError, match="6 layers; the looped one passes 2 at one loop and 8 at 4"):
        compare_sources(ours, save_dense("llama"))
    with pytest.raises(UserError, match="differ in shape at"):
        compare_sources(GOLDEN / "tied_mqa", GOLDEN / "gqa")
    with pytest.raises(UserError, match="num_loops is 9, and the file of states has"):
        compare_sources(GOLDEN / "gqa", states, num_loops=9)
    with pytest.raises(UserError, match="of the case 'wide'; cases in it: .*'left'"):
        compare_sources(GOLDEN / "gqa", states, case="wide")
    with pytest.raises(UserError, match="no tokenizer to read"):
        compare_sources(ours, ours, text=tmp_path / "text")
    with pytest.raises(UserError, match="brings its own token ids"):
        compare_sources(GOLDEN / "gqa", states, text=tmp_path / "text")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="cases in it: none"):
        compare_sources(ours, tmp_path / "other.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"broken")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        compare_sources(ours, tmp_path / "broken.safetensors")
