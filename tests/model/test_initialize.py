"""Starting values: their statistics, and that they do not depend on how the module came to memory."""

from typing import Any

import pytest
import torch

from looplm.model.config import LoopedConfig
from looplm.model.looped import LoopedTransformer, initialize

SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_loops": 3,
    "num_prelude_layers": 1,
    "num_coda_layers": 1,
    "attention_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "qk_norm": True,
    "lora_rank": 8,
    "initializer_range": 0.05,
}


def built(injection: str) -> LoopedTransformer:
    return LoopedTransformer(LoopedConfig(**SIZES, injection=injection))  # pyright: ignore[reportArgumentType]


def built_on_meta(injection: str) -> LoopedTransformer:
    """As sharded training and transformers build: no memory at first, then memory with anything in it."""
    with torch.device("meta"):
        model = built(injection)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model.apply(lambda module: initialize(module, 0.05))


@pytest.mark.parametrize("build", [built, built_on_meta])
@pytest.mark.parametrize("injection", ["none", "scalar", "concat", "concat_random", "concat_norm", "concat_layers"])
def test_starting_values(build: Any, injection: str):
    model = build(injection)
    for name, p in model.named_parameters():
        if name == "injection.logit":
            assert p.item() == pytest.approx(4.6)
        elif name == "injection.norm.weight":
            assert (p == 0.05).all(), "the root mean square of the embeddings"
        elif "injection" in name and name.endswith("proj.weight") and injection != "concat_random":
            assert torch.equal(p, torch.cat((torch.eye(64), torch.zeros(64, 64)), dim=1))
        elif name.endswith("norm.weight") or "layernorm" in name:
            assert (p == 1).all(), name
        elif name.endswith(".bias") or (name.startswith("lora.") and name.endswith(".b")):
            assert not p.any(), name
        else:
            tolerance = 4 / p.numel() ** 0.5
            assert p.std().item() == pytest.approx(0.05, rel=tolerance), name
            assert abs(p.mean().item()) < 0.05 * tolerance, name


def test_no_two_matrices_start_equal():
    """Layers, loops and projections each get their own draw."""
    drawn: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for name, p in built("none").named_parameters():
        if name.endswith("proj.weight"):
            drawn.setdefault(tuple(p.shape), []).append(p)
        elif name.endswith(".a"):
            drawn.setdefault(tuple(p.shape[1:]), []).extend(p)
    for matrices in drawn.values():
        assert len({matrix.detach().flatten()[0].item() for matrix in matrices}) == len(matrices) > 1


def test_standard_deviation_zero_gives_zero_matrices():
    model = built("none")
    model.apply(lambda module: initialize(module, 0.0))
    assert not model.embed_tokens.weight.any() and not model.get_parameter("layers.0.mlp.up_proj.weight").any()
