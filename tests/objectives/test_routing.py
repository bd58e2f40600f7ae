"""Think-at-Hard's online mask against the definition written out with full logits."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from looplm.model.gate import exit_pdf
from looplm.model.looped import LoopedOutput
from looplm.objectives import cross_entropy as chunked
from looplm.objectives import routing_loss
from looplm.objectives.routing import first_correct, read_loops

IGNORE = -100


class Head:
    """A head without a model."""

    def __init__(self) -> None:
        self.weight = torch.randn(13, 8, dtype=torch.float64, requires_grad=True)

    def apply_head(self, function: Any, *args: Any) -> Any:
        return function(self.weight, *args)


def likely_labels(head: Head, output: LoopedOutput) -> Tensor:
    """Labels of which about two thirds are what some loop predicts, so that tokens are routed everywhere."""
    guesses = (torch.stack(output.loop_hidden_states) @ head.weight.T).argmax(-1)  # (R, B, S)
    loop = torch.randint(len(guesses) + 1, guesses.shape[1:])
    random = torch.randint(13, guesses.shape[1:])
    labels = torch.cat((guesses, random[None])).gather(0, loop[None])[0].roll(1, dims=1)
    labels[0, 2] = labels[1, 5] = IGNORE
    return labels


def depth_of(logits: Tensor, target: int, active: int) -> int:
    """d*, 1-based: the first active loop whose argmax is the target, else the last active one."""
    return next((r for r in range(1, active + 1) if int(logits[r - 1].argmax()) == target), active)


def literal(
    head: Head, output: LoopedOutput, labels: Tensor, active: int, gate_weight: float
) -> tuple[Tensor, list[int]]:
    """The loss token by token, and each token's d*."""
    logits = torch.stack(output.loop_hidden_states) @ head.weight.T  # (R, B, S, V)
    pdf = exit_pdf(output.gate_logits[:active])
    terms, depths = [], []
    for b in range(labels.shape[0]):
        for s in range(labels.shape[1] - 1):
            target = int(labels[b, s + 1])
            if target == IGNORE:
                continue
            depth = depth_of(logits[:, b, s], target, active)
            depths.append(depth)
            loss = cross_entropy(logits[depth - 1, b, s][None], torch.tensor([target]))
            terms.append(loss - gate_weight * pdf[depth - 1, b, s].log())
    return torch.stack(terms).mean(), depths


@pytest.mark.parametrize("gate_weight", [0.0, 0.3])
@pytest.mark.parametrize("active", [1, 2, 3, None])
def test_it_is_the_definition_in_value_and_in_every_gradient(make_output, active: int | None, gate_weight: float):
    head, output = Head(), make_output(shape=(3, 20))
    labels = likely_labels(head, output)
    ours, metrics = routing_loss(head, output, labels, active_loops=active, gate_weight=gate_weight)
    formula, depths = literal(head, output, labels, active or 3, gate_weight)
    if active != 1:
        assert len(set(depths)) == (active or 3), "every loop must get tokens"
    torch.testing.assert_close(ours, formula, rtol=0, atol=1e-12)
    leaves = [head.weight, *output.loop_hidden_states, output.gate_logits]
    mine = torch.autograd.grad(ours, leaves, allow_unused=True)
    theirs = torch.autograd.grad(formula, leaves, allow_unused=True)
    for leaf, found, expected in zip(leaves, mine, theirs, strict=True):
        zero = torch.zeros_like(leaf)  # of what no token reads
        torch.testing.assert_close(
            zero if found is None else found, zero if expected is None else expected, rtol=0, atol=1e-12
        )
    shares = [depths.count(r) / len(depths) for r in range(1, (active or 3) + 1)]
    assert metrics["routed_share"].tolist() == pytest.approx(shares)


def test_a_token_s_language_model_gradient_is_at_its_loop_alone(make_output):
    head, output = Head(), make_output(shape=(3, 20))
    labels = likely_labels(head, output)
    loss, _ = routing_loss(head, output, labels, gate_weight=0.0)
    loss.backward()
    moved = torch.stack([state.grad.any(-1) for state in output.loop_hidden_states])  # (R, B, S)
    predicted = torch.nn.functional.pad(labels[:, 1:] != IGNORE, (0, 1))
    assert torch.equal(moved.sum(0), predicted.long())


def test_the_last_loop_takes_what_no_loop_gets_right():
    T, F = True, False
    correct = torch.tensor([[T, F, F, F, F], [T, T, F, F, T], [F, T, T, F, T]])[:, None]
    assert first_correct(correct).tolist() == [[0, 1, 2, 2, 1]]
    assert first_correct(correct[:1]).tolist() == [[0, 0, 0, 0, 0]]


@pytest.mark.parametrize("chunk_logits", [1, 13 * 3, 2**24])
def test_reading_the_loops_in_chunks_gives_what_full_logits_give(
    make_output, monkeypatch: pytest.MonkeyPatch, chunk_logits: int
):
    from looplm.objectives import routing

    monkeypatch.setattr(routing, "CHUNK_LOGITS", chunk_logits)
    head, output = Head(), make_output()
    targets = likely_labels(head, output)
    losses, correct = read_loops(head.weight, output.loop_hidden_states, targets)
    logits = torch.stack(output.loop_hidden_states) @ head.weight.T
    wanted = targets.expand(3, 2, 7)
    full = cross_entropy(logits.flatten(0, 2), wanted.flatten(), reduction="none").view(3, 2, 7)
    torch.testing.assert_close(losses, full.detach(), rtol=0, atol=1e-12)
    assert torch.equal(correct, logits.argmax(-1) == wanted)
    assert not losses.requires_grad


def test_no_tensor_of_all_loops_tokens_and_words_exists(make_output, monkeypatch: pytest.MonkeyPatch):
    """The largest thing made is a chunk of logits: with small chunks, no tensor reaches tokens times vocabulary."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from looplm.objectives import routing

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                self.seen = max(self.seen, out.numel())
            return out

    monkeypatch.setattr(routing, "CHUNK_LOGITS", 13 * 8)
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", 13 * 8)
    head, output = Head(), make_output(shape=(4, 64))
    labels = torch.randint(13, (4, 64))
    with Largest() as largest:
        loss, _ = routing_loss(head, output, labels)
        loss.backward()
    assert largest.seen <= 3 * 4 * 64 * 8 < 3 * 4 * 64 * 13


def test_micro_batches_add_up_to_the_whole_batch(make_output):
    head, output = Head(), make_output(shape=(4, 9))
    labels = likely_labels(head, output)
    num_tokens = int((labels[:, 1:] != IGNORE).sum())
    whole, whole_metrics = routing_loss(head, output, labels, gate_weight=0.2)
    total, parts = torch.zeros(()), {}
    for row in range(4):
        rows = slice(row, row + 1)
        part = LoopedOutput(tuple(h[rows] for h in output.loop_hidden_states), output.gate_logits[:, rows])
        loss, metrics = routing_loss(head, part, labels[rows], gate_weight=0.2, num_tokens=num_tokens)
        total = total + loss
        parts = {name: parts.get(name, 0) + value for name, value in metrics.items()}
    torch.testing.assert_close(total, whole, rtol=0, atol=1e-12)
    for name, value in whole_metrics.items():
        torch.testing.assert_close(parts[name], value, rtol=0, atol=1e-12, msg=name)


def test_the_gate_learns_to_leave_at_the_first_right_loop(make_output):
    """Gate logits alone, for a while: the exit distribution of each token lies on its d*."""
    head, output = Head(), make_output(shape=(2, 12))
    labels = likely_labels(head, output)
    gate = torch.zeros(3, 2, 12, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([gate], lr=0.5)
    for _ in range(100):
        loss, _ = routing_loss(head, LoopedOutput(output.loop_hidden_states, gate), labels, gate_weight=1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    targets = chunked.shift_labels(labels)
    _, correct = read_loops(head.weight, output.loop_hidden_states, targets)
    chosen = first_correct(correct)
    likely = exit_pdf(gate).gather(0, chosen[None])[0][targets != IGNORE]
    assert likely.min() > 0.95


def test_it_trains_a_model_at_every_phase(make_model, make_batch):
    """Also in the first, where the gate has nothing to decide: its gradient is zero then, not missing."""
    model = make_model()
    ids, labels = make_batch(4)
    for loops in (1, 2, 3):
        model.zero_grad()
        loss, metrics = routing_loss(model, model.model(ids, num_loops=loops), labels)
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert metrics["loop_losses"].shape == metrics["exit_pdf"].shape == metrics["routed_share"].shape == (loops,)
        assert metrics["routed_share"].sum().item() == pytest.approx(1)
        assert not any(value.requires_grad for value in metrics.values())


def test_under_autocast_the_head_runs_in_bfloat16(make_model, make_batch):
    model = make_model().float()
    ids, labels = make_batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss, metrics = routing_loss(model, model.model(ids), labels)
    loss.backward()
    assert loss.dtype == metrics["loop_losses"].dtype == torch.float32


def test_nothing_to_predict_is_a_loss_of_zero(make_output):
    output = make_output()
    loss, metrics = routing_loss(Head(), output, torch.full((2, 7), IGNORE))
    loss.backward()
    assert loss == 0
    assert not any(value.any() for value in metrics.values())
