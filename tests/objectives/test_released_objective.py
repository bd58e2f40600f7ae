"""What the released Ouro code trains when it is given labels, and that it is not the expected loss.

It averages the logits of all loops with the exit probabilities and takes the cross entropy of the average; the
papers' objective, and ours, averages the cross entropies. Cross entropy is convex in the logits, so theirs is the
smaller of the two at every token, and equal only where the loops agree or the gate lies on one of them.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from looplm.hf.load import load
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.model.gate import exit_pdf
from looplm.model.looped import LoopedOutput
from looplm.objectives import expected_loss

KEPT = sorted(path.parent for path in (Path(__file__).resolve().parents[1] / "golden").rglob("expected.safetensors"))
SHARED = ("base", "gqa", "one_step", "deep", "tied_mqa")
CASES = ("full", "right")
"""On the left, a padding position predicts the first token of its row, and what it computes is arbitrary."""


@pytest.fixture(params=[*KEPT, *SHARED], ids=lambda p: p if isinstance(p, str) else f"kept-{p.name}")
def golden(request: pytest.FixtureRequest) -> Path:
    if isinstance(request.param, Path):
        return request.param
    return request.getfixturevalue("shared_dir") / "ouro" / "golden" / request.param


def mixture_logits(model: LoopLMForCausalLM, output: LoopedOutput) -> Tensor:
    """sum_r p_r logits_r, (B, S, V)."""
    logits = torch.stack([model.lm_head(state) for state in output.loop_hidden_states])
    return (exit_pdf(output.gate_logits)[..., None] * logits).sum(0)


def released_loss(model: LoopLMForCausalLM, output: LoopedOutput, labels: Tensor) -> Tensor:
    """The cross entropy of the mixture, shifted, mean over labels that are not ignored."""
    return cross_entropy(mixture_logits(model, output)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def mean_cross_entropy(model: LoopLMForCausalLM, output: LoopedOutput, labels: Tensor) -> Tensor:
    """sum_r p_r L_r, mean over labels that are not ignored."""
    pdf, total = exit_pdf(output.gate_logits), torch.zeros(())
    for share, state in zip(pdf, output.loop_hidden_states, strict=True):
        logits = model.lm_head(state)[:, :-1].transpose(1, 2)
        total = total + share[:, :-1] * cross_entropy(logits, labels[:, 1:], reduction="none")
    return total[labels[:, 1:] != -100].mean()


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_their_number_is_the_mixture_s_and_ours_is_another(golden: Path, case: str):
    expected = load_file(golden / "expected.safetensors")
    model = load(golden, dtype="float32")
    output = model.model(expected[f"{case}.input_ids"], attention_mask=expected.get(f"{case}.attention_mask"))
    labels, theirs = expected[f"{case}.labels"], expected[f"{case}.loss"].squeeze()
    if case == "full":
        stored = expected["full.logits_with_labels"]
        torch.testing.assert_close(mixture_logits(model, output), stored, rtol=0, atol=2e-4)
    torch.testing.assert_close(released_loss(model, output, labels), theirs, rtol=0, atol=2e-4)

    ours, _ = expected_loss(model, output, labels, beta=0.0)
    torch.testing.assert_close(ours, mean_cross_entropy(model, output, labels), rtol=0, atol=1e-4)
    if model.model.config.num_loops == 1:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)
    else:
        assert ours > theirs + 0.01


def test_on_a_random_model_value_and_gradient_differ(make_model, make_batch):
    model = make_model()
    ids, labels = make_batch()
    output = model.model(ids)
    ours, _ = expected_loss(model, output, labels, beta=0.0)
    theirs = released_loss(model, output, labels)
    torch.testing.assert_close(ours, mean_cross_entropy(model, output, labels), rtol=0, atol=1e-12)
    assert ours > theirs + 0.01
    gradients = [
        torch.autograd.grad(value, model.model.early_exit_gate.weight, retain_graph=True)[0]
        for value in (ours, theirs)
    ]
    assert (gradients[0] - gradients[1]).norm() > 0.01 * gradients[1].norm()


def test_where_all_loops_agree_the_two_are_one(make_model, make_output, make_batch):
    model = make_model()
    output = make_output()
    same = LoopedOutput((output.loop_hidden_states[0],) * 3, output.gate_logits)
    _, labels = make_batch()
    ours, _ = expected_loss(model, same, labels, beta=0.0)
    torch.testing.assert_close(ours, released_loss(model, same, labels), rtol=0, atol=1e-12)
