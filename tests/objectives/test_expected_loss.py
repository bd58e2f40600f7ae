"""Stage I against the formula written out: value, gradients through p, priors, smoothing, micro-batches, metrics."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from looplm.hf.modeling import LoopLMForCausalLM
from looplm.model.looped import LoopedOutput
from looplm.objectives import expected_loss
from looplm.objectives.cross_entropy import IGNORE

GEOMETRIC = torch.tensor([4 / 7, 2 / 7, 1 / 7], dtype=torch.float64)
"""eta^(r - 1) (1 - eta) at eta = 0.5, renormalised over three loops."""


class Head:
    """A head without a model; keeps the weights of the last call, (R, B, S)."""

    def __init__(self) -> None:
        self.weight = torch.randn(13, 8, dtype=torch.float64, requires_grad=True)
        self.used = torch.empty(0)

    def apply_head(self, function: Any, states: Any, targets: Tensor, weights: Tensor) -> Any:
        self.used = weights.detach()
        return function(self.weight, states, targets, weights)


def token_losses(head: Tensor, output: LoopedOutput, labels: Tensor) -> Tensor:
    """Cross entropy of every loop at every predicted position, (R, B, S - 1); 0 where ignored."""
    logits = torch.stack(output.loop_hidden_states)[:, :, :-1] @ head.T
    targets = labels[:, 1:].expand(logits.shape[:-1])
    return cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none").view(targets.shape)


def exit_probabilities(gate_logits: Tensor) -> Tensor:
    """p_r as a product of hazards, outside log space, (R, ...)."""
    remaining, shares = torch.ones_like(gate_logits[0]), []
    for hazard in torch.sigmoid(gate_logits[:-1]):
        shares.append(hazard * remaining)
        remaining = remaining * (1 - hazard)
    return torch.stack([*shares, remaining])


def literal(
    head: Tensor,
    output: LoopedOutput,
    labels: Tensor,
    beta: float,
    smoothing: float = 0.0,
    prior: Tensor | None = None,
) -> Tensor:
    """The mean over predicted tokens of sum_r p_r L_r and the regulariser, from full logits."""
    p = exit_probabilities(output.gate_logits)[:, :, :-1]
    weights = (1 - smoothing) * p + smoothing / len(p)
    penalty = (p * p.log()).sum(0) if prior is None else (p * (p / prior[:, None, None]).log()).sum(0)
    per_token = (weights * token_losses(head, output, labels)).sum(0) + beta * penalty
    return per_token[labels[:, 1:] != IGNORE].mean()


def gradients(value: Tensor, model: LoopLMForCausalLM) -> dict[str, Tensor]:
    """Of every parameter; none may be missing."""
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(value, list(model.parameters())), strict=True))


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, expected in theirs.items():
        torch.testing.assert_close(mine[name], expected, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.0},
        {"beta": 0.3},
        {"beta": 0.3, "smoothing": 0.05},
        {"beta": 0.3, "prior": torch.full((3,), 1 / 3, dtype=torch.float64)},
        {"beta": 0.3, "smoothing": 0.2, "prior": GEOMETRIC},
    ],
    ids=lambda options: "-".join(options),
)
def test_it_is_the_formula_in_value_and_in_every_gradient(make_model, make_batch, options: dict[str, Any], tied: bool):
    model = make_model(tie_word_embeddings=tied)
    ids, labels = make_batch(3)
    ours, _ = expected_loss(model, model.model(ids), labels, **options)
    formula = literal(model.lm_head.weight, model.model(ids), labels, **options)
    torch.testing.assert_close(ours, formula, rtol=0, atol=1e-12)
    assert_same(gradients(ours, model), gradients(formula, model))


@pytest.mark.parametrize("loop", [0, 1, 2])
def test_without_entropy_a_gate_set_on_one_loop_gives_that_loop_s_cross_entropy(make_output, make_batch, loop: int):
    logits = torch.full((3, 2, 7), -60.0, dtype=torch.float64)
    logits[loop:] = 60.0
    output, head = make_output(logits), Head()
    _, labels = make_batch()
    ours, metrics = expected_loss(head, output, labels, beta=0.0)
    state = output.loop_hidden_states[loop]
    plain = cross_entropy((state[:, :-1] @ head.weight.T).flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)
    torch.testing.assert_close(metrics["loop_losses"][loop], plain.detach(), rtol=0, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(ours, [head.weight, state]), torch.autograd.grad(plain, [head.weight, state]), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.05])
def test_a_single_loop_trains_and_its_gate_gets_a_gradient_of_zero(make_model, make_batch, smoothing: float):
    """Of zero, not None: a distributed run stops at a parameter without a gradient."""
    model = make_model(num_loops=1)
    ids, labels = make_batch()
    output = model.model(ids)
    ours, metrics = expected_loss(model, output, labels, beta=0.1, smoothing=smoothing)
    logits = model.lm_head(output.loop_hidden_states[0])
    plain = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)
    ours.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()) == ("early_exit_gate" not in name), name
    assert metrics["exit_pdf"].item() == pytest.approx(1)
    assert metrics["entropy"].item() == 0


def test_smoothing_leaves_no_loop_without_weight(make_output, make_batch):
    """At eps 0.05 and three loops the weights of a gate set on one loop are 0.016667 and 0.96667."""
    _, labels = make_batch()
    head = Head()
    expected_loss(head, make_output(torch.full((3, 2, 7), 60.0)), labels, beta=0.0, smoothing=0.05, num_tokens=1)
    predicted = head.used[:, :, :-1][:, labels[:, 1:] != IGNORE]
    assert predicted[0].tolist() == pytest.approx([0.95 + 0.05 / 3] * predicted.shape[1])
    assert predicted[1:].flatten().tolist() == pytest.approx([0.05 / 3] * 2 * predicted.shape[1])
    assert (round(0.05 / 3, 6), round(0.95 + 0.05 / 3, 5)) == (0.016667, 0.96667)


def test_regulariser_and_metrics_keep_the_unsmoothed_distribution(make_output, make_batch):
    _, labels = make_batch()
    output, head = make_output(), Head()
    plain, smooth = (
        {beta: expected_loss(head, output, labels, beta=beta, smoothing=eps) for beta in (0.0, 0.3)}
        for eps in (0.0, 0.2)
    )
    assert smooth[0.0][0] != plain[0.0][0]
    torch.testing.assert_close(smooth[0.3][0] - smooth[0.0][0], plain[0.3][0] - plain[0.0][0], rtol=0, atol=1e-12)
    for name in ("loop_losses", "exit_pdf", "entropy", "expected_loops"):
        assert torch.equal(smooth[0.3][1][name], plain[0.3][1][name]), name


def test_the_uniform_prior_differs_from_the_default_by_beta_ln_r(make_output, make_batch):
    _, labels = make_batch()
    output, head = make_output(), Head()
    default, _ = expected_loss(head, output, labels, beta=0.3)
    uniform, _ = expected_loss(head, output, labels, beta=0.3, prior=torch.full((3,), 1 / 3))
    assert (uniform - default).item() == pytest.approx(0.3 * math.log(3), abs=1e-7)


def test_micro_batches_add_up_to_the_whole_batch(make_model, make_batch):
    """Eight rows at once and one by one, each with another number of predicted tokens, one with none."""
    model = make_model()
    ids, labels = make_batch(8)
    labels[5] = IGNORE
    num_tokens = int((labels[:, 1:] != IGNORE).sum())
    whole, whole_metrics = expected_loss(model, model.model(ids), labels, beta=0.1, smoothing=0.05)
    whole_gradients = gradients(whole, model)
    parts: dict[str, Tensor] = {}
    for row in range(8):
        output = model.model(ids[row : row + 1])
        loss, metrics = expected_loss(
            model, output, labels[row : row + 1], beta=0.1, smoothing=0.05, num_tokens=num_tokens
        )
        loss.backward()
        parts = {name: parts.get(name, 0) + value for name, value in metrics.items()}
    assert_same({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, whole_gradients)
    assert_same(parts, whole_metrics)


def test_metrics_are_means_over_predicted_tokens(make_output, make_batch):
    _, labels = make_batch()
    output, head = make_output(), Head()
    loss, metrics = expected_loss(head, output, labels, beta=0.3)
    predicted = labels[:, 1:] != IGNORE
    pdf = exit_probabilities(output.gate_logits)[:, :, :-1][:, predicted].detach()  # (R, tokens)
    expected = {
        "loss": loss,
        "loop_losses": token_losses(head.weight, output, labels)[:, predicted].mean(1),
        "exit_pdf": pdf.mean(1),
        "entropy": -(pdf * pdf.log()).sum(0).mean(),
        "expected_loops": (torch.tensor([1.0, 2.0, 3.0])[:, None] * pdf).sum(0).mean(),
    }
    assert metrics.keys() == expected.keys() | {"exit_pdf_histogram", "expected_loops_histogram"}
    assert not any(value.requires_grad for value in metrics.values())
    assert_same(metrics, expected)


def test_a_state_predicts_the_label_after_it(make_output):
    """With only the label of position 4 counted, only the states at position 3 get a gradient."""
    labels = torch.full((2, 7), IGNORE)
    labels[1, 4] = 2
    output = make_output()
    loss, _ = expected_loss(Head(), output, labels, beta=0.3)
    loss.backward()
    for leaf in (*output.loop_hidden_states, *output.gate_logits.grad[:-1]):  # the last gate value is not used
        moved = leaf.grad.any(-1) if leaf.ndim == 3 else leaf != 0
        assert moved.nonzero().tolist() == [[1, 3]]


@pytest.mark.parametrize("num_tokens", [None, 0])
def test_nothing_to_predict_is_a_loss_of_zero(make_output, num_tokens: int | None):
    output = make_output()
    loss, metrics = expected_loss(
        Head(), output, torch.full((2, 7), IGNORE), beta=0.3, smoothing=0.05, num_tokens=num_tokens
    )
    loss.backward()
    assert loss == 0
    assert not any(value.any() for value in metrics.values())
    assert not any(leaf.grad.any() for leaf in (*output.loop_hidden_states, output.gate_logits))
