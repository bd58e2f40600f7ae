"""RMSNorm, rotary positions and masks, each against its formula."""

import math

import pytest
import torch
from torch import Tensor

from looplm.model.mask import causal_mask, positions_from_documents, positions_from_mask
from looplm.model.norm import RMSNorm
from looplm.model.rope import apply_rope, rope_cos_sin

# --- RMSNorm ----------------------------------------------------------------------------------------------------


def test_rms_norm_is_its_formula():
    norm = RMSNorm(6, eps=0.1).double()
    torch.nn.init.uniform_(norm.get_parameter("weight"), 0.5, 1.5)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    expected = norm.get_parameter("weight") * x / (x.pow(2).sum(-1, keepdim=True) / 6 + 0.1).sqrt()
    torch.testing.assert_close(norm(x), expected, rtol=1e-14, atol=0)


def test_rms_norm_without_learned_scale_has_no_parameter():
    norm = RMSNorm(6, eps=1e-6, learned_scale=False)
    assert list(norm.state_dict()) == []
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(norm(x).square().mean(-1), torch.ones(4, dtype=torch.float64), rtol=1e-4, atol=0)


def test_rms_norm_casts_back_before_the_weight():
    """The order of the released code; the other order rounds differently in bfloat16."""
    norm = RMSNorm(64, eps=1e-6).bfloat16()
    weight = torch.nn.init.uniform_(norm.get_parameter("weight"), 0.5, 1.5)
    x = torch.randn(8, 64).bfloat16()
    normed = x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(norm(x), weight * normed.bfloat16())
    assert not torch.equal(norm(x), (weight.float() * normed).bfloat16()), "the input must tell the orders apart"


def test_rms_norm_takes_its_statistics_in_float32():
    """300 squared is beyond float16: without the wider statistics the result would be zero."""
    norm = RMSNorm(8, eps=1e-6).half()
    torch.testing.assert_close(norm(torch.full((1, 8), 300.0).half()), torch.ones(1, 8).half())


# --- Rotary positions -------------------------------------------------------------------------------------------


def rotate_as_complex(x: Tensor, position_ids: Tensor, theta: float) -> Tensor:
    """RoPE with entry i and entry i + d/2 as one complex number, turned by position * theta^(-2i/d)."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:])
    frequency = theta ** (-2 * torch.arange(half, dtype=torch.float64) / x.shape[-1])
    turn = torch.exp(1j * position_ids[..., None] * frequency)  # (B, S, d / 2)
    z = z * turn[:, :, None]
    return torch.cat((z.real, z.imag), dim=-1)


def rotate(x: Tensor, position_ids: Tensor, theta: float) -> Tensor:
    return apply_rope(x, *rope_cos_sin(position_ids, x.shape[-1], theta, x.dtype))


def test_rope_is_a_complex_rotation():
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    position_ids = torch.tensor([[0, 1, 2, 3, 4], [7, 7, 0, 100, 40]])
    torch.testing.assert_close(
        rotate(x, position_ids, 1e4), rotate_as_complex(x, position_ids, 1e4), rtol=0, atol=2e-5
    )


def test_rope_leaves_position_zero_alone():
    x = torch.randn(1, 2, 3, 8)
    assert torch.equal(rotate(x, torch.zeros(1, 2, dtype=torch.long), 1e4), x)


def test_rope_scores_depend_on_distance_only():
    query, key = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)

    def score(query_position: int, key_position: int) -> float:
        turned = rotate(query, torch.tensor([[query_position]]), 1e4), rotate(key, torch.tensor([[key_position]]), 1e4)
        return (turned[0] * turned[1]).sum().item()

    assert score(5, 3) == pytest.approx(score(105, 103), abs=1e-4)
    assert score(5, 3) == pytest.approx(score(2, 0), abs=1e-5)
    assert abs(score(5, 3) - score(3, 5)) > 1e-2, "the direction of the distance counts"


def test_rope_tables_for_all_rows_or_for_each():
    x = torch.randn(3, 4, 2, 6)
    positions = torch.arange(4)[None]
    cos, sin = rope_cos_sin(positions, 6, 1e4, torch.float32)
    assert cos.shape == sin.shape == (1, 4, 6)
    assert torch.equal(apply_rope(x, cos, sin), rotate(x, positions.expand(3, 4), 1e4))


def test_rope_angles_are_float32_whatever_the_output():
    """In bfloat16 position 1001 would round to 1000 and the angle with it."""
    positions = torch.tensor([[1000, 1001]])
    cos, sin = rope_cos_sin(positions, 4, 1e4, torch.bfloat16)
    assert cos.dtype == sin.dtype == torch.bfloat16
    for column, position in enumerate((1000, 1001)):
        assert cos[0, column, 0].item() == pytest.approx(math.cos(position), abs=4e-3)
        assert sin[0, column, 0].item() == pytest.approx(math.sin(position), abs=4e-3)


# --- Masks ------------------------------------------------------------------------------------------------------


def visible(mask: Tensor) -> list[list[list[int]]]:
    """Keys each query may read, row by row."""
    return [[query.nonzero().flatten().tolist() for query in row] for row in mask[:, 0]]


def test_mask_is_causal():
    mask = causal_mask(torch.arange(4)[None], 4)
    assert mask.shape == (1, 1, 4, 4) and mask.dtype == torch.bool
    assert visible(mask) == [[[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]]


def test_mask_of_queries_behind_a_cache():
    assert visible(causal_mask(torch.tensor([[2, 3]]), 4)) == [[[0, 1, 2], [0, 1, 2, 3]]]


def test_mask_with_rows_at_different_positions():
    """Rows of an engine's batch stand at different lengths."""
    assert visible(causal_mask(torch.tensor([[3], [1]]), 4)) == [[[0, 1, 2, 3]], [[0, 1]]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
def test_mask_hides_padding_on_either_side(dtype: torch.dtype):
    keys = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0]]).to(dtype)
    mask = causal_mask(torch.arange(4)[None], 4, keys)
    left, right = visible(mask)
    assert left[2:] == [[2], [2, 3]]
    assert right[:2] == [[0], [0, 1]]
    assert mask.any(-1).all(), "a query that reads no key would give NaN"
    assert left[:2] == [[0], [1]], "padding reads itself alone"


def test_mask_separates_documents():
    documents = torch.tensor([[0, 0, 1, 2, 2], [5, 5, 5, 5, 9]])
    mask = causal_mask(torch.arange(5)[None], 5, document_ids=documents)
    assert visible(mask) == [[[0], [0, 1], [2], [3], [3, 4]], [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [4]]]


def test_mask_combines_documents_and_padding():
    documents = torch.tensor([[0, 0, 1, 1, 1]])
    mask = causal_mask(torch.arange(5)[None], 5, torch.tensor([[1, 1, 1, 1, 0]]), documents)
    assert visible(mask) == [[[0], [0, 1], [2], [2, 3], [2, 3, 4]]]


def test_positions_count_real_tokens():
    attention_mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    positions = positions_from_mask(attention_mask)
    real = attention_mask.bool()
    assert [row[keep].tolist() for row, keep in zip(positions, real, strict=True)] == [
        [0, 1, 2],
        [0, 1, 2],
        [0, 1, 2, 3, 4],
    ]
    assert (positions >= 0).all()
    assert torch.equal(positions_from_mask(real), positions)


def test_positions_restart_at_every_document():
    documents = torch.tensor([[0, 0, 0, 1, 2, 2], [4, 3, 3, 3, 3, 0]])
    assert positions_from_documents(documents).tolist() == [[0, 1, 2, 0, 0, 1], [0, 0, 1, 2, 3, 0]]
