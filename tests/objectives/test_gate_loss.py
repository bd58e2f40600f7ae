"""Stage II against the formula written out, and that nothing but the gate learns from it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from looplm.errors import UserError
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.model.looped import LoopedOutput
from looplm.objectives import gate_loss
from looplm.objectives.cross_entropy import IGNORE
from looplm.training.optimizer import freeze_for
from looplm.training.stage_recipe import GateLossRecipe


@pytest.fixture
def make_frozen(make_model: Any) -> Any:
    """A model whose gate alone is trainable."""

    def make(**overrides: Any) -> LoopLMForCausalLM:
        model = make_model(**overrides)
        freeze_for(model, GateLossRecipe())
        return model

    return make


def literal(model: LoopLMForCausalLM, ids: Tensor, labels: Tensor, label_shift: str) -> Tensor:
    """The loss one token and one loop at a time. Loops count from 1."""
    output = model.model(ids)
    num_loops = len(output.loop_hidden_states)
    hazards = dict(enumerate(torch.sigmoid(output.gate_logits), start=1))
    losses = {
        loop: cross_entropy(model.lm_head(state).transpose(1, 2)[..., :-1], labels[:, 1:], reduction="none").detach()
        for loop, state in enumerate(output.loop_hidden_states, start=1)
    }
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, position in (labels[:, 1:] != IGNORE).nonzero().tolist():
        count += 1
        for loop in range(2, num_loops + 1):
            gain = max(0.0, (losses[loop - 1] - losses[loop])[row, position].item())
            label = torch.sigmoid(torch.tensor(50 * (gain - 0.005), dtype=torch.float64))
            go_on = 1 - hazards[loop if label_shift == "paper" else loop - 1][row, position]
            total = total - (label * go_on.log() + (1 - label) * (1 - go_on).log()) / num_loops
    return total / count


@pytest.mark.parametrize("num_loops", [2, 4])
@pytest.mark.parametrize("label_shift", ["paper", "next"])
def test_it_is_the_formula_in_value_and_gradient(make_frozen, make_batch, label_shift: Any, num_loops: int):
    model = make_frozen(num_loops=num_loops)
    gate = list(model.model.early_exit_gate.parameters())
    ids, labels = make_batch(3)
    ours, _ = gate_loss(model, model.model(ids), labels, label_shift=label_shift)
    formula = literal(model, ids, labels, label_shift)
    torch.testing.assert_close(ours, formula, rtol=0, atol=1e-12)
    for mine, theirs in zip(torch.autograd.grad(ours, gate), torch.autograd.grad(formula, gate), strict=True):
        assert theirs.any()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("label_shift", ["paper", "next"])
def test_its_gradient_is_the_slope_of_its_value(make_frozen, make_batch, label_shift: Any):
    """Central differences: the label does not move with the gate, so all of the slope is in the hazard."""
    model = make_frozen()
    ids, labels = make_batch()

    def value() -> Tensor:
        return gate_loss(model, model.model(ids), labels, label_shift=label_shift)[0]

    value().backward()
    for parameter in model.model.early_exit_gate.parameters():
        for index in range(parameter.numel()):
            entry, step = parameter.data.view(-1)[index : index + 1], 1e-5
            start = entry.clone()
            above, below = (entry.copy_(start + sign * step) and value().item() for sign in (1, -1))
            entry.copy_(start)
            assert parameter.grad.view(-1)[index].item() == pytest.approx((above - below) / (2 * step), abs=1e-8)


def test_nothing_but_the_gate_gets_a_gradient(make_frozen, make_batch):
    model = make_frozen()
    ids, labels = make_batch()
    gate_loss(model, model.model(ids), labels)[0].backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == name.startswith("model.early_exit_gate."), name
    assert all(parameter.grad.any() for parameter in model.model.early_exit_gate.parameters())


def test_a_language_model_that_is_not_frozen_is_refused(make_model, make_batch):
    model = make_model()
    ids, labels = make_batch()
    with pytest.raises(UserError, match="freeze the language model first"):
        gate_loss(model, model.model(ids), labels)


def test_a_single_loop_is_refused(make_frozen, make_batch):
    model = make_frozen(num_loops=1)
    ids, labels = make_batch()
    with pytest.raises(UserError, match="num_loops of 2 or more"):
        gate_loss(model, model.model(ids), labels)


@pytest.mark.parametrize(("label_shift", "learning"), [("paper", [1, 2]), ("next", [0, 1])])
def test_which_hazards_learn(make_model, make_output, make_batch, label_shift: Any, learning: list[int]):
    """Loops from 0 here: `paper` teaches loops 2..R and so the last, which inference never asks; `next` 1..R - 1."""
    output = make_output()
    frozen = LoopedOutput(tuple(state.detach() for state in output.loop_hidden_states), output.gate_logits)
    gate_loss(make_model(), frozen, make_batch()[1], label_shift=label_shift)[0].backward()
    assert output.gate_logits.grad.any(-1).any(-1).nonzero().flatten().tolist() == learning


def improving_output(gain: float) -> tuple[LoopedOutput, Tensor, Any]:
    """Two loops and one predicted token, whose loss falls by `gain` nats from the first to the second."""
    # Two words of logits x and 0: the loss of the first is log(1 + exp(-x)).
    losses = torch.tensor([0.3, 0.3 - gain], dtype=torch.float64)
    states = torch.zeros(2, 1, 2, 1, dtype=torch.float64)
    states[:, 0, 0, 0] = -losses.expm1().log()
    head = torch.tensor([[1.0], [0.0]], dtype=torch.float64)

    class Head:
        def apply_head(self, function: Any, *args: Any) -> Any:
            return function(head, *args)

    gate_logits = torch.zeros(2, 1, 2, dtype=torch.float64, requires_grad=True)
    return LoopedOutput(tuple(states), gate_logits), torch.tensor([[1, 0]]), Head()


@pytest.mark.parametrize(
    ("gain", "label"), [(0.0, 0.438), (-0.2, 0.438), (0.005, 0.5), (0.025, 0.731), (0.105, 0.993)]
)
def test_the_label_follows_the_gain_in_nats(gain: float, label: float):
    """No gain and a loss give sigmoid(-0.25) = 0.438, not 0: Ouro's eq. 5 as it stands."""
    output, labels, head = improving_output(gain)
    loss, metrics = gate_loss(head, output, labels)
    assert (metrics["loop_losses"][0] - metrics["loop_losses"][1]).item() == pytest.approx(gain, abs=1e-12)
    assert metrics["continue_label"].item() == pytest.approx(label, abs=5e-4)
    # d BCE / d gate logit = label - (1 - hazard), over R = 2; the hazard is a half here.
    loss.backward()
    slope = (metrics["continue_label"].item() - 0.5) / 2
    assert output.gate_logits.grad.flatten().tolist() == pytest.approx([0, 0, slope, 0], abs=1e-12)


def test_micro_batches_add_up_to_the_whole_batch(make_frozen, make_batch):
    model = make_frozen()
    ids, labels = make_batch(8)
    labels[3] = IGNORE
    num_tokens = int((labels[:, 1:] != IGNORE).sum())
    whole, whole_metrics = gate_loss(model, model.model(ids), labels)
    expected = torch.autograd.grad(whole, list(model.model.early_exit_gate.parameters()))
    parts: dict[str, Tensor] = {}
    for row in range(8):
        rows = slice(row, row + 1)
        loss, metrics = gate_loss(model, model.model(ids[rows]), labels[rows], num_tokens=num_tokens)
        loss.backward()
        parts = {name: parts.get(name, 0) + value for name, value in metrics.items()}
    for parameter, gradient in zip(model.model.early_exit_gate.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)
    assert parts.keys() == whole_metrics.keys() == {
        "loss", "loop_losses", "exit_pdf", "entropy", "expected_loops", "continue_label",
        "exit_pdf_histogram", "expected_loops_histogram",
    }  # fmt: skip
    for name, value in whole_metrics.items():
        torch.testing.assert_close(parts[name], value, rtol=0, atol=1e-12)
