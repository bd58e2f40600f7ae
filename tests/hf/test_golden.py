"""The shell on released-format checkpoints: loaded, run, generating; within 2e-4 of the released code's numbers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from looplm.model.gate import exit_cdf, exit_pdf
from looplm.objectives import expected_loss

THRESHOLDS = (0.0, 0.3, 0.5, 0.9, 1.0)


def assert_near(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-4)


def exit_loops(gate_logits: Tensor, threshold: float) -> Tensor:
    """Index (B, S) of the first loop whose cdf reaches the threshold; from 1 on, of the last."""
    if threshold >= 1:
        return torch.full(gate_logits.shape[1:], gate_logits.shape[0] - 1)
    return (exit_cdf(gate_logits) >= threshold).int().argmax(0)


@pytest.mark.parametrize("case", ["full", "left", "right"])
@torch.no_grad()
def test_forward(golden, case: str):
    expected = {name.removeprefix(f"{case}."): value for name, value in golden.expected.items()}
    ids, mask = expected["input_ids"], expected.get("attention_mask")
    out = golden.model(ids, attention_mask=mask, position_ids=expected.get("position_ids"))
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    loop_logits = torch.stack([golden.model.lm_head(hidden) for hidden in out.loop_hidden_states])
    assert_near(torch.stack(out.loop_hidden_states)[:, real], expected["hidden_per_step"][:, real])
    assert_near(loop_logits[:, real], expected["logits_per_step"][:, real])
    assert_near(out.logits[real], expected["logits_per_step"][-1, real])
    assert_near(out.gate_logits[:, real], expected["gate_logits"][:, real])
    assert_near(exit_pdf(out.gate_logits).movedim(0, -1)[real], expected["exit_pdf"][real])
    for threshold in THRESHOLDS:
        robust = real & expected[f"exit_step_robust_thr_{threshold}"]
        assert robust.any()
        loops = exit_loops(out.gate_logits, threshold)
        assert torch.equal(loops[robust], expected[f"exit_step_thr_{threshold}"][robust])


@torch.no_grad()
def test_logits_to_keep(golden):
    ids, last = golden.expected["full.input_ids"], golden.expected["full.logits_per_step"][-1]
    assert_near(golden.model(ids, logits_to_keep=2).logits, last[:, -2:])
    assert_near(golden.model(ids, logits_to_keep=torch.tensor([0, 4])).logits, last[:, [0, 4]])


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("prefix", ["gen", "genleft"])
def test_generate(golden, prefix: str, use_cache: bool):
    prompt = golden.expected[f"{prefix}.prompt_ids"]
    mask = golden.expected.get(f"{prefix}.attention_mask", torch.ones_like(prompt))
    out = golden.model.generate(
        prompt, attention_mask=mask, max_new_tokens=16, do_sample=False, use_cache=use_cache, eos_token_id=None
    )
    assert torch.equal(out, golden.expected[f"{prefix}.cache_thr_1.0"])
    assert torch.equal(out, golden.expected[f"{prefix}.nocache_thr_1.0"])


@pytest.mark.parametrize("prefix", ["gen", "genleft"])
@pytest.mark.parametrize(("threshold", "cached"), [*((threshold, True) for threshold in THRESHOLDS), (0.5, False)])
@torch.no_grad()
def test_reading_out_early(golden, prefix: str, threshold: float, cached: bool):
    """All loops run, and every token is read at the loop its gate chooses: what the released code does."""
    tokens = golden.expected[f"{prefix}.prompt_ids"]
    mask = golden.expected.get(f"{prefix}.attention_mask", torch.ones_like(tokens))
    cache, new = (DynamicCache() if cached else None), tokens
    for _ in range(16):
        out = golden.model(new if cached else tokens, attention_mask=mask, past_key_values=cache)
        loops = exit_loops(out.gate_logits, threshold)[:, -1]  # (B,)
        hidden = torch.stack(out.loop_hidden_states)[loops, torch.arange(len(loops)), -1]
        new = golden.model.lm_head(hidden).argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, new), dim=1)
        mask = torch.cat((mask, torch.ones_like(new)), dim=1)
    assert torch.equal(tokens, golden.expected[f"{prefix}.cache_thr_{threshold}"])


@torch.no_grad()
def test_released_code_trains_another_loss(golden):
    """With labels it takes the cross entropy of gate-weighted logits; ours is the gate-weighted cross entropy."""
    ids, labels = golden.expected["full.input_ids"], golden.expected["full.labels"]
    out = golden.model(ids, labels=labels)
    pdf = exit_pdf(out.gate_logits)  # (R, B, S)
    logits = torch.stack([golden.model.lm_head(hidden) for hidden in out.loop_hidden_states])
    mixture = (pdf[..., None] * logits).sum(0)
    assert_near(mixture, golden.expected["full.logits_with_labels"])
    assert_near(
        cross_entropy(mixture[:, :-1].flatten(0, 1), labels[:, 1:].flatten())[None], golden.expected["full.loss"]
    )
    ours, _ = expected_loss(golden.model, out, labels, beta=golden.model.config.beta)
    assert torch.equal(out.loss, ours)
    if len(pdf) > 1:
        without_entropy, _ = expected_loss(golden.model, out, labels, beta=0.0)
        assert (without_entropy - golden.expected["full.loss"]).abs() > 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_rotary_positions_survive_a_narrow_load(golden, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Angles are computed in float32 whatever the weights are, so a narrow model turns by the same tables."""
    from looplm.hf.load import load
    from looplm.model import looped

    tables: list[Tensor] = []
    compute: Callable[..., tuple[Tensor, Tensor]] = looped.rope_cos_sin

    def spy(*args) -> tuple[Tensor, Tensor]:
        cos, sin = compute(*args)
        tables.append(cos)
        return cos, sin

    monkeypatch.setattr(looped, "rope_cos_sin", spy)
    positions = torch.tensor([[100, 201]])
    ids = golden.expected["full.input_ids"][:1, :2]
    golden.model(ids, position_ids=positions)
    load(golden.path, dtype=dtype)(ids, position_ids=positions)
    assert tables[1].dtype == dtype
    assert torch.equal(tables[1], tables[0].to(dtype))
