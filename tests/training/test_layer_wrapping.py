"""Compiled or recomputed, the gradients are those of the bare model, and one graph serves every loop and depth."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from looplm.training.forward import weigh_loops
from looplm.training.layer_wrapping import wrap_layers

from .runs import tiny_model, tiny_rows, tiny_stage

SHAPE = {"num_prelude_layers": 1, "num_coda_layers": 1, "num_hidden_layers": 2, "injection": "scalar", "lora_rank": 2}


def gradients(how: str, backprop_loops: int | None = None) -> dict[str, Tensor]:
    """Of one batch, in float64."""
    model = tiny_model(**SHAPE).double()
    wrap_layers(model, False, how)  # type: ignore[arg-type]
    batch = tiny_rows().take(3)
    stage = tiny_stage(backprop_loops=backprop_loops)
    loss, _ = model.within(weigh_loops, batch, stage, 3, 20)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("backprop_loops", [None, 2])
@pytest.mark.parametrize("how", ["layer", "loop", "both"])
def test_recomputing_gives_the_same_gradients(how: str, backprop_loops: int | None) -> None:
    plain, recomputed = gradients("none", backprop_loops), gradients(how, backprop_loops)
    assert plain.keys() == recomputed.keys() and len(plain) > 20
    for name, expected in plain.items():
        assert torch.equal(recomputed[name], expected), name


def applications(how: str) -> dict[str, int]:
    """How often the MLP of the prelude's, core's first and coda's layer runs in a forward and a backward pass."""
    model = tiny_model(**SHAPE)
    wrap_layers(model, False, how)  # type: ignore[arg-type]
    counts: dict[str, int] = {}

    def count(name: str) -> None:
        counts[name] = counts.get(name, 0) + 1

    for name in ("prelude.0", "layers.0", "coda.0"):
        model.model.get_submodule(name).mlp.register_forward_hook(lambda *_, name=name: count(name))
    loss, _ = model.within(weigh_loops, tiny_rows().take(2), tiny_stage(), 3, 20)
    loss.backward()
    return counts


def test_each_layer_is_run_again_once_and_not_more_and_the_core_twice_under_both() -> None:
    assert applications("none") == {"prelude.0": 1, "layers.0": 3, "coda.0": 3}
    for how in ("layer", "loop"):
        assert applications(how) == {"prelude.0": 2, "layers.0": 6, "coda.0": 6}, how
    assert applications("both") == {"prelude.0": 2, "layers.0": 9, "coda.0": 6}


def kept_bytes(how: str) -> int:
    """What autograd holds for the backward pass, parameters aside."""
    model = tiny_model(num_hidden_layers=3)
    wrap_layers(model, False, how)  # type: ignore[arg-type]
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result, _ = model.within(weigh_loops, tiny_rows().take(4), tiny_stage(), 3, 20)
    assert result.requires_grad
    return sum(held.values())


def test_recomputing_keeps_less_and_per_loop_the_least() -> None:
    none, layer, loop, both = (kept_bytes(how) for how in ("none", "layer", "loop", "both"))
    assert both == loop < layer < none / 2


def test_names_and_hooks_stay_and_unwrapping_leaves_nothing() -> None:
    model = tiny_model(**SHAPE)
    names = [name for name, _ in model.named_parameters()]
    seen: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(1))
    for how in ("loop", "layer", "both"):
        wrap_layers(model, False, how)  # type: ignore[arg-type]
        assert [name for name, _ in model.named_parameters()] == names
        assert list(model.state_dict()) == list(tiny_model(**SHAPE).state_dict())
    loss, _ = model.within(weigh_loops, tiny_rows().take(1), tiny_stage(), 3, 20)
    loss.backward()
    assert len(seen) == 6, "hooks of a layer run again with its loop, not with the layer"
    wrap_layers(model, False, "none")
    bare = model.model
    assert not any("forward" in layer.__dict__ for layer in (*bare.prelude, *bare.layers, *bare.coda))
    assert "run_core" not in bare.__dict__


def test_without_gradient_nothing_is_recomputed_or_refused() -> None:
    model = tiny_model()
    plain = model.model(torch.arange(5)[None]).gate_logits
    for how in ("layer", "loop", "both"):
        wrap_layers(model, False, how)  # type: ignore[arg-type]
        with torch.no_grad():
            assert torch.equal(model.model(torch.arange(5)[None]).gate_logits, plain)


COMPILED = """
import runpy, sys
import torch
from torch._dynamo.utils import counters
from looplm.training.layer_wrapping import wrap_layers
from looplm.training.forward import weigh_loops
runs = runpy.run_path(sys.argv[1])
torch._dynamo.config.recompile_limit = 1000

def gradients(compiled, how, depths=(3,)):
    model = runs["tiny_model"](num_prelude_layers=1, num_hidden_layers=2, lora_rank=2).double()
    wrap_layers(model, compiled, how)
    batch = runs["tiny_rows"]().take(3)
    for depth in depths:
        loss, _ = model.within(weigh_loops, batch, runs["tiny_stage"](), depth, 20)
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}

for how in ("none", "layer", "loop", "both"):
    plain, compiled = gradients(False, how), gradients(True, how)
    for name, expected in plain.items():
        close = torch.allclose(compiled[name], expected, rtol=0, atol=1e-12)
        assert close, (how, name, (compiled[name] - expected).abs().max())
    gradients(True, how, depths=(1, 2, 3, 4, 7))
    # A layer with LoRA slices, and a prelude layer without.
    assert counters["stats"]["unique_graphs"] == 2, (how, counters["stats"])
"""


@pytest.mark.slow
def test_compiled_is_eager_and_one_graph_serves_all_loops_and_depths() -> None:
    """In a process of its own, as in tests/model/test_compile.py. Under every kind of recomputing too."""
    from .processes import RUNS

    command = [sys.executable, "-c", COMPILED, str(RUNS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
