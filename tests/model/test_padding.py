"""Padding on either side and packed documents leave every real token as it is alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from looplm.errors import UserError
from looplm.model.cache import GrowingKVCache
from looplm.model.looped import LoopedOutput, LoopedTransformer

MakeModel = Callable[..., LoopedTransformer]

WIRINGS = [
    pytest.param({}, id="ouro"),
    pytest.param(
        {
            "num_prelude_layers": 1,
            "num_coda_layers": 1,
            "injection": "scalar",
            "lora_rank": 2,
            "norm_placement": "pre",
            "loop_state": "raw",
        },
        id="everything",
    ),
]
LENGTHS = (4, 7, 1)


def rows(model: LoopedTransformer) -> list[Tensor]:
    return [torch.randint(model.config.vocab_size, (1, length)) for length in LENGTHS]


def padded(rows: list[Tensor], width: int, left: bool) -> tuple[Tensor, Tensor]:
    """ids and attention_mask; the padding holds an arbitrary token, not a quiet one."""
    ids = torch.randint(1, 31, (len(rows), width))
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(width - row.shape[1], width) if left else slice(0, row.shape[1])
        ids[i, place], mask[i, place] = row[0], 1
    return ids, mask


def assert_row_equals(out: LoopedOutput, row: int, columns: Tensor, alone: LoopedOutput) -> None:
    for ours, theirs in zip(out.loop_hidden_states, alone.loop_hidden_states, strict=True):
        torch.testing.assert_close(ours[row, columns], theirs[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(out.gate_logits[:, row, columns], alone.gate_logits[:, 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", WIRINGS)
@pytest.mark.parametrize("width", [7, 10])
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_padded_rows_equal_the_rows_alone(make_model: MakeModel, options: dict[str, Any], width: int, left: bool):
    model = make_model(**options)
    texts = rows(model)
    alone = [model(row) for row in texts]
    ids, mask = padded(texts, width, left)
    out = model(ids, attention_mask=mask)
    for i, single in enumerate(alone):
        assert_row_equals(out, i, mask[i].nonzero().flatten(), single)
    assert all(torch.isfinite(hidden).all() for hidden in out.loop_hidden_states), "padding must not turn into NaN"
    assert torch.isfinite(out.gate_logits).all()


def test_a_mask_of_ones_changes_nothing_and_may_be_bool(make_model: MakeModel):
    model = make_model()
    ids = torch.randint(31, (2, 5))
    plain = model(ids)
    for mask in (torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.bool)):
        masked = model(ids, attention_mask=mask)
        for a, b in zip(plain.loop_hidden_states, masked.loop_hidden_states, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_no_gradient_flows_into_padding(make_model: MakeModel):
    model = make_model()
    ids = torch.tensor([[5, 5, 1, 2, 3]])  # token 5 stands in the padding only
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    out = model(ids, attention_mask=mask)
    torch.stack(out.loop_hidden_states)[:, mask.bool()].square().sum().backward()
    gradient = model.embed_tokens.weight.grad
    assert gradient is not None and not gradient[5].any() and gradient[1].any()


@pytest.mark.parametrize("options", WIRINGS)
def test_packed_documents_equal_the_documents_alone(make_model: MakeModel, options: dict[str, Any]):
    model = make_model(**options)
    texts = rows(model)
    ids = torch.stack((torch.cat([texts[i][0] for i in (0, 1, 2)]), torch.cat([texts[i][0] for i in (1, 2, 0)])))
    documents = torch.tensor([[0] * 4 + [1] * 7 + [2], [3] * 7 + [8] + [5] * 4])
    out = model(ids, document_ids=documents)
    for row, order in enumerate(((0, 1, 2), (1, 2, 0))):
        start = 0
        for i in order:
            columns = torch.arange(start, start + LENGTHS[i])
            assert_row_equals(out, row, columns, model(texts[i]))
            start += LENGTHS[i]


def test_packed_documents_with_padding_behind_them(make_model: MakeModel):
    model = make_model()
    texts = rows(model)
    ids = torch.cat((texts[0], texts[1], torch.randint(31, (1, 3))), dim=1)
    documents = torch.tensor([[0] * 4 + [1] * 10])  # the padding carries the last document's id
    mask = torch.tensor([[1] * 11 + [0] * 3])
    out = model(ids, attention_mask=mask, document_ids=documents)
    assert_row_equals(out, 0, torch.arange(4), model(texts[0]))
    assert_row_equals(out, 0, torch.arange(4, 11), model(texts[1]))
    assert torch.isfinite(out.gate_logits).all()


def test_one_document_is_a_plain_row(make_model: MakeModel):
    model = make_model()
    ids = torch.randint(31, (2, 6))
    out, plain = model(ids, document_ids=torch.full((2, 6), 4)), model(ids)
    torch.testing.assert_close(out.gate_logits, plain.gate_logits, rtol=0, atol=1e-12)


# --- Explicit positions -----------------------------------------------------------------------------------------


def test_explicit_positions(make_model: MakeModel):
    model = make_model()
    ids = torch.randint(31, (2, 5))
    plain = model(ids).gate_logits
    counted = torch.arange(5)[None]
    assert torch.equal(model(ids, position_ids=counted).gate_logits, plain)
    assert torch.equal(model(ids, position_ids=counted.expand(2, 5)).gate_logits, plain)
    shifted = model(ids, position_ids=counted + 40).gate_logits
    torch.testing.assert_close(shifted, plain, rtol=0, atol=1e-4)  # tables are float32
    assert (model(ids, position_ids=3 * counted).gate_logits - plain).abs().max() > 1e-2
    by_row = model(ids, position_ids=torch.cat((counted, 3 * counted))).gate_logits
    torch.testing.assert_close(by_row[:, 0], plain[:, 0], rtol=0, atol=1e-12)
    assert (by_row[:, 1] - plain[:, 1]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("keywords", "natural"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]])}, [[0, 0, 1, 2, 3, 4]]),
        ({"document_ids": torch.tensor([[0, 0, 0, 1, 1, 1]])}, [[0, 1, 2, 0, 1, 2]]),
    ],
    ids=["mask", "documents"],
)
def test_explicit_positions_go_before_the_default_ones(
    make_model: MakeModel, keywords: dict[str, Tensor], natural: list[list[int]]
):
    model = make_model()
    ids = torch.randint(31, (1, 6))
    default = model(ids, **keywords).gate_logits
    positions = torch.tensor(natural)
    assert torch.equal(model(ids, position_ids=positions, **keywords).gate_logits, default)
    assert (model(ids, position_ids=3 * positions, **keywords).gate_logits - default).abs().max() > 1e-2


# --- Refusals ---------------------------------------------------------------------------------------------------


def test_documents_with_a_filled_cache_are_refused(make_model: MakeModel):
    model = make_model()
    cache = GrowingKVCache(model.config)
    ids, documents = torch.randint(31, (1, 3)), torch.zeros(1, 3, dtype=torch.long)
    model(ids, document_ids=documents, cache=cache)  # an empty one will do
    with pytest.raises(UserError, match="document_ids mark packed training rows"):
        model(ids, document_ids=documents, cache=cache)


@pytest.mark.parametrize("mask_length", [1, 2, 4])
def test_a_mask_that_does_not_reach_over_the_cache_is_refused(make_model: MakeModel, mask_length: int):
    """Broadcasting would make a mask of one column mean: no padding anywhere."""
    model = make_model()
    cache = GrowingKVCache(model.config)
    model(torch.randint(31, (2, 2)), cache=cache)
    with pytest.raises(UserError, match=f"attention_mask covers {mask_length} positions.* 2 cached .* 1 new"):
        model(torch.randint(31, (2, 1)), attention_mask=torch.ones(2, mask_length, dtype=torch.long), cache=cache)
