"""The chunked head: F.cross_entropy of full logits in value and gradient, without the full logits."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from looplm.data.packing import IGNORE_INDEX
from looplm.objectives import cross_entropy as module
from looplm.objectives.cross_entropy import IGNORE, rows_in_chunk, shift_labels, token_weights, weighted_cross_entropy

V, D, R, B, S = 13, 8, 3, 2, 7
NEW = ("empty", "new_empty", "empty_strided", "empty_like", "zeros_like", "new_zeros", "_to_copy", "mul", "exp", "sub")
MAKERS = tuple(getattr(torch.ops.aten, name) for name in NEW)
MATRIX_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_, torch.ops.aten.bmm)


class Recorder(TorchDispatchMode):
    """Counts the matrix products that run inside and keeps the size of the largest tensor; counts new (., V) ones."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.num_products = self.num_large = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_products += func.overloadpacket in MATRIX_PRODUCTS
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
                self.num_large += func.overloadpacket in MAKERS and V in tensor.shape and tensor.ndim == 2
        return result


def inputs(num_ignored: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """Head (V, D), R states (B, S, D), targets (B, S), weights (R, B, S): leaves, all but the targets."""
    head = torch.randn(V, D, dtype=dtype, requires_grad=True)
    hidden = [torch.randn(B, S, D, dtype=dtype, requires_grad=True) for _ in range(R)]
    targets = torch.randint(V, (B, S))
    targets.view(-1)[torch.randperm(B * S)[:num_ignored]] = IGNORE
    return head, hidden, targets, torch.rand(R, B, S, dtype=dtype, requires_grad=True)


def plain(head: Tensor, hidden: list[Tensor], targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The same sum and losses from full logits."""
    logits = torch.stack(hidden) @ head.T  # (R, B, S, V)
    repeated = targets.expand(R, B, S).flatten()
    losses = cross_entropy(logits.flatten(0, 2), repeated, ignore_index=IGNORE, reduction="none").view(R, B, S)
    return (weights * losses).sum(), losses.detach()


def value_and_gradients(function: Any, arguments: tuple[Any, ...]) -> list[Tensor]:
    """Scalar and losses, and the gradients of three times the scalar: the factor is what autograd may bring along."""
    head, hidden, _, weights = arguments
    value, losses = function(*arguments)
    return [value, losses, *torch.autograd.grad(3 * value, [head, *hidden, weights])]


@pytest.mark.parametrize("num_ignored", [0, 5, B * S])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_it_is_the_cross_entropy_of_full_logits_in_value_and_gradient(
    monkeypatch: pytest.MonkeyPatch, chunk: int, num_ignored: int
):
    """In chunks of one token, of four (which divide neither 14 nor 9) and all at once; none, some, all ignored."""
    monkeypatch.setattr(module, "rows_in_chunk", lambda *_: chunk)
    arguments = inputs(num_ignored)
    ours, full = (value_and_gradients(function, arguments) for function in (weighted_cross_entropy, plain))
    for mine, theirs in zip(ours, full, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    assert full[2].any() == (num_ignored < B * S)


@pytest.mark.parametrize("num_ignored", [0, 5, B * S])
@pytest.mark.parametrize("tile", [1, 3, 100])
@pytest.mark.parametrize("chunk", [4, 100])
def test_the_size_of_chunks_and_tiles_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, chunk: int, tile: int, num_ignored: int
):
    """In float64, and in bfloat16, where a tile is a copy, up to its rounding."""
    exact, mixed = inputs(num_ignored), inputs(num_ignored, torch.float32)
    before = [value_and_gradients(weighted_cross_entropy, exact)]
    with torch.autocast("cpu", torch.bfloat16):
        before.append(value_and_gradients(weighted_cross_entropy, mixed))
    monkeypatch.setattr(module, "rows_in_chunk", lambda *_: chunk)
    monkeypatch.setitem(module.TILE_LOGITS, "cpu", tile * V)
    after = [value_and_gradients(weighted_cross_entropy, exact)]
    with torch.autocast("cpu", torch.bfloat16):
        after.append(value_and_gradients(weighted_cross_entropy, mixed))
    for tolerance, mine, theirs in zip((1e-12, 0.02), after, before, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert (one - other).norm() <= tolerance * other.norm()


def test_a_confident_prediction_keeps_the_precision_of_its_gradient():
    """softmax - one-hot is taken in float32 and rounded afterwards: near 1 bfloat16 has steps of 1/256."""
    head = torch.tensor([[8.0], [0.0]], requires_grad=True)
    hidden = [torch.ones(1, 1, 1, requires_grad=True)]
    with torch.autocast("cpu", torch.bfloat16):
        value, losses = weighted_cross_entropy(head, hidden, torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, 1))
    (gradient,) = torch.autograd.grad(value, head)
    assert losses.item() == pytest.approx(math.log1p(math.exp(-8)), rel=1e-3)
    assert gradient[0, 0].item() == pytest.approx(-1 / (1 + math.exp(8)), rel=0.01)


def test_a_chunk_holds_as_many_logits_as_the_head_has_weights_or_enough_to_be_worth_a_product():
    wide, narrow = torch.float32, torch.bfloat16
    assert rows_in_chunk(49_152, 2048, narrow, wide) == 2 * 2048
    assert rows_in_chunk(49_152, 2048, wide, wide) == 2048
    assert rows_in_chunk(1024, 64, wide, wide) == 2**14
    assert rows_in_chunk(2**25, 1, wide, wide) == 1


def test_large_memory_is_taken_once_whatever_the_number_of_chunks(monkeypatch: pytest.MonkeyPatch):
    arguments = inputs(0, torch.float32)
    made = []
    for chunk in (2, 7):
        monkeypatch.setattr(module, "rows_in_chunk", lambda *_, rows=chunk: rows)
        with Recorder() as recorder, torch.autocast("cpu", torch.bfloat16):
            weighted_cross_entropy(*arguments)
        made.append(recorder.num_large)
    assert made[0] == made[1] <= 5  # head and product narrow, its gradient, logits, tile


def test_equal_weights_give_the_mean():
    head, hidden, targets, _ = inputs(5)
    value, _ = weighted_cross_entropy(head, hidden[:1], targets, token_weights(targets, None, head.dtype)[None])
    expected = cross_entropy((hidden[0] @ head.T).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)


def test_float32_is_float64_to_a_millionth():
    wide = inputs(5)
    narrow = (wide[0].float(), [state.float() for state in wide[1]], wide[2], wide[3].float())
    for mine, exact in zip(
        value_and_gradients(weighted_cross_entropy, narrow), value_and_gradients(plain, wide), strict=True
    ):
        assert mine.dtype == torch.float32
        assert (mine - exact).norm() <= 1e-6 * exact.norm()


def test_bfloat16_autocast_is_near_float32():
    """Only the matrix products are narrow: losses and gradients stay float32 and within bfloat16's rounding."""
    arguments = inputs(5, torch.float32)
    exact = value_and_gradients(plain, arguments)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = value_and_gradients(weighted_cross_entropy, arguments)
    for mine, near in zip(mixed, exact, strict=True):
        assert mine.dtype == torch.float32
        assert 0 < (mine - near).norm() < 0.02 * near.norm()


def test_bfloat16_states_give_float32_losses_and_bfloat16_gradients():
    head, hidden, targets, weights = inputs(5, torch.float32)
    narrow = (head.bfloat16(), [state.bfloat16() for state in hidden], targets, weights)
    value, losses, d_head, d_hidden, *_, d_weights = value_and_gradients(weighted_cross_entropy, narrow)
    assert (value.dtype, losses.dtype, d_weights.dtype) == (torch.float32,) * 3
    assert (d_head.dtype, d_hidden.dtype) == (torch.bfloat16,) * 2
    assert (losses - plain(head, hidden, targets, weights)[1]).abs().max() < 0.1


def test_no_tensor_is_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch):
    """Neither forward nor backward: the largest tensor is a chunk's logits, a hundredth of all logits."""
    num_vocab, num_tokens, chunk = 200, 300, 9
    monkeypatch.setattr(module, "rows_in_chunk", lambda *_: chunk)
    head = torch.randn(num_vocab, 2, requires_grad=True)
    hidden = [torch.randn(1, num_tokens, 2, requires_grad=True) for _ in range(R)]
    targets, weights = torch.randint(num_vocab, (1, num_tokens)), torch.rand(R, 1, num_tokens, requires_grad=True)
    with Recorder() as recorder:
        weighted_cross_entropy(head, hidden, targets, weights)[0].backward()
    assert recorder.largest == chunk * num_vocab < num_tokens * num_vocab / 30


def test_the_head_runs_once_a_chunk_and_never_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "rows_in_chunk", lambda *_: 7)
    arguments = inputs(0)
    chunks = R * B * S // 7
    with torch.no_grad(), Recorder() as measuring:
        weighted_cross_entropy(*arguments)
    with Recorder() as forward:
        value, _ = weighted_cross_entropy(*arguments)
    with Recorder() as backward:
        value.backward()
    # Training: logits, and a product each for the gradient of head and state. Measuring: logits alone.
    assert (measuring.num_products, forward.num_products, backward.num_products) == (chunks, 3 * chunks, 0)


def test_a_frozen_head_gets_no_gradient_and_changes_no_other():
    head, hidden, targets, weights = inputs(3)
    expected = value_and_gradients(plain, (head, hidden, targets, weights))
    value, _ = weighted_cross_entropy(head.detach(), hidden, targets, weights)
    for mine, theirs in zip(torch.autograd.grad(3 * value, [*hidden, weights]), expected[3:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_where_only_the_weights_learn_the_head_is_run_forward_alone():
    head, hidden, targets, weights = inputs(3)
    expected = value_and_gradients(plain, (head, hidden, targets, weights))
    with Recorder() as measuring, torch.no_grad():
        weighted_cross_entropy(head, hidden, targets, weights)
    with Recorder() as recorder:
        value, _ = weighted_cross_entropy(head.detach(), [state.detach() for state in hidden], targets, weights)
        (gradient,) = torch.autograd.grad(3 * value, [weights])
    torch.testing.assert_close(gradient, expected[-1], rtol=0, atol=1e-12)
    assert recorder.num_products == measuring.num_products > 0


def test_tied_embeddings_get_the_gradient_of_both_uses(make_model, make_batch):
    model = make_model(tie_word_embeddings=True)
    ids, labels = make_batch()
    targets = shift_labels(labels)
    weights = torch.rand(R, B, S, dtype=torch.float64)
    gradients = []
    for function in (weighted_cross_entropy, plain):
        value, _ = model.apply_head(function, list(model.model(ids).loop_hidden_states), targets, weights)
        gradients.append(torch.autograd.grad(value, list(model.parameters()), allow_unused=True))
    for (name, _), mine, theirs in zip(model.named_parameters(), *gradients, strict=True):
        if "early_exit_gate" in name:
            assert mine is None and theirs is None
        else:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_differentiating_twice_is_refused_and_not_wrong():
    arguments = inputs(0)
    value, _ = weighted_cross_entropy(*arguments)
    (gradient,) = torch.autograd.grad(value.square(), arguments[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("label", [V, -1])
def test_a_label_outside_the_vocabulary_is_an_error(label: int):
    head, hidden, targets, weights = inputs(0)
    targets[1, 2] = label
    with pytest.raises(RuntimeError, match="out of bounds"):
        weighted_cross_entropy(head, hidden, targets, weights)


def test_targets_are_labels_one_to_the_left():
    labels = torch.tensor([[5, 6, IGNORE, 8], [1, 2, 3, 4]])
    assert shift_labels(labels).tolist() == [[6, IGNORE, 8, IGNORE], [2, 3, 4, IGNORE]]
    assert shift_labels(labels[:, :1]).tolist() == [[IGNORE], [IGNORE]]


def test_data_and_objectives_mean_the_same_by_ignored():
    assert IGNORE == IGNORE_INDEX


def test_token_weights_are_shares_of_the_predicted_tokens():
    targets = torch.tensor([[3, IGNORE, 4], [IGNORE, IGNORE, 5]])
    third = 1 / 3
    assert token_weights(targets, None, torch.float64).tolist() == [[third, 0, third], [0, 0, third]]
    for count in (8, torch.tensor(8)):
        assert token_weights(targets, count, torch.float32).tolist() == [[0.125, 0, 0.125], [0, 0, 0.125]]
    empty = torch.full_like(targets, IGNORE)
    for count in (None, 0, torch.tensor(0)):
        assert not token_weights(empty, count, torch.float32).any()
