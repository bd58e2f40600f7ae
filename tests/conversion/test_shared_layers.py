"""Dense layers tied into shared ones: at full rank the loops are the dense layers, below it the best approximation."""

import pytest
import torch

from looplm.conversion.dense_to_looped import dense_to_looped
from looplm.conversion.shared_layers import low_rank

IDS = torch.tensor([[5, 9, 2, 7, 31, 30, 4, 4, 11, 20, 1, 36]])
FOLDED = {"injection": "none", "lora_from": "svd", "num_loops": 3}


@pytest.mark.parametrize("name", ["llama", "llama_tied", "llama3_rope"])
@torch.no_grad()
def test_full_rank_reproduces_every_dense_layer(make_dense, name):
    """Layer by layer, norm vectors and all: they are carried in the columns of the projections."""
    dense = make_dense(name)
    looped = dense_to_looped(dense, lora_rank=24, **FOLDED)
    assert looped.model.config.num_hidden_layers == 2
    outputs: list[torch.Tensor] = []
    for layer in looped.model.layers:
        layer.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    logits = looped(IDS).logits
    states = dense(IDS, output_hidden_states=True)
    assert len(outputs) == 6
    # The last of transformers' states has been through the final norm.
    for found, expected in zip(outputs[:-1], states.hidden_states[1:-1], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(logits, states.logits, rtol=0, atol=1e-9)


@torch.no_grad()
def test_behind_a_prelude_and_before_a_coda(make_dense):
    dense = make_dense("llama")
    looped = dense_to_looped(dense, core=(1, 5), lora_rank=24, **(FOLDED | {"num_loops": 2}))
    torch.testing.assert_close(looped(IDS).logits, dense(IDS).logits, rtol=0, atol=1e-9)


@torch.no_grad()
def test_more_rank_is_nearer(make_dense):
    dense = make_dense("llama")
    expected = dense(IDS).logits
    errors = [
        (dense_to_looped(dense, lora_rank=rank, **FOLDED)(IDS).logits - expected).square().mean().item()
        for rank in (1, 8, 15, 16)
    ]
    assert errors[0] > errors[2] > 1e3 * errors[3]
    assert errors[1] > errors[2]


@torch.no_grad()
def test_what_a_bank_cannot_carry_is_averaged(make_dense):
    dense = make_dense("qwen3")
    looped = dense_to_looped(dense, lora_rank=32, **FOLDED)
    expected = torch.stack([dense.model.layers[i].self_attn.q_norm.weight for i in (0, 2, 4)]).mean(0)
    assert torch.allclose(looped.model.layers[0].self_attn.q_norm.weight, expected)


@pytest.mark.parametrize("rank", [1, 3, 5, 7])
def test_low_rank_is_the_best_there_is(rank):
    """Eckart and Young: the squared error is that of the singular values left out."""
    matrix = torch.randn(5, 6, dtype=torch.float64)
    b, a = low_rank(matrix, rank)
    assert (b.shape, a.shape) == ((5, rank), (rank, 6))
    left_out = torch.linalg.svdvals(matrix)[rank:].square().sum()
    assert torch.allclose((matrix - b @ a).square().sum(), left_out, atol=1e-20)
    assert a.abs().sum(1).min() > 0  # a row of zeros, against a column of zeros, could never learn
