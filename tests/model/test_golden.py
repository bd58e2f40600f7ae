"""The released Ouro code's own numbers, reproduced by the bare model: every loop, layer, gate value and cache entry.

The checkpoints are small and random, in the released format; `expected.safetensors` beside each holds what the
released code computed from it in float32. One or two are kept in tests/golden, the others are read from the
folder `shared` beside the repository where there is one. Values at padding are arbitrary and not compared.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax

from looplm.model.cache import GrowingKVCache
from looplm.model.config import LoopedConfig
from looplm.model.gate import exit_cdf, exit_pdf, hazard
from looplm.model.looped import LoopedOutput, LoopedTransformer

KEPT = sorted(path.parent for path in (Path(__file__).resolve().parents[1] / "golden").rglob("expected.safetensors"))
SHARED = ("base", "gqa", "one_step", "deep", "tied_mqa")
CASES = ("full", "left", "leftarange", "right")
THRESHOLDS = (0.0, 0.3, 0.5, 0.9, 1.0)
SAME_NAMES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "tie_word_embeddings rms_norm_eps rope_theta max_position_embeddings"
)


@dataclass(frozen=True)
class Golden:
    """A checkpoint, and what the released code makes of it."""

    model: LoopedTransformer
    head: Tensor
    expected: dict[str, Tensor]

    def run(self, case: str) -> tuple[LoopedOutput, Tensor]:
        """Our output on the inputs of a case, and where its real tokens are, (B, S) bool."""
        ids = self.expected[f"{case}.input_ids"]
        mask, positions = (self.expected.get(f"{case}.{name}") for name in ("attention_mask", "position_ids"))
        with torch.no_grad():
            out = self.model(ids, attention_mask=mask, position_ids=positions)
        return out, (torch.ones_like(ids) if mask is None else mask).bool()


@cache
def load(folder: Path) -> Golden:
    released = json.loads((folder / "config.json").read_text())
    shared: dict[str, Any] = {name: released[name] for name in SAME_NAMES.split()}
    config = LoopedConfig(num_loops=released["total_ut_steps"], **shared)
    weights = load_file(folder / "model.safetensors")
    head = weights.pop("lm_head.weight", weights["model.embed_tokens.weight"])
    model = LoopedTransformer(config)
    model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
    return Golden(model, head, load_file(folder / "expected.safetensors"))


@pytest.fixture(params=[*KEPT, *SHARED], ids=lambda p: p if isinstance(p, str) else f"kept-{p.name}")
def golden(request: pytest.FixtureRequest) -> Golden:
    if isinstance(request.param, Path):
        return load(request.param)
    return load(request.getfixturevalue("shared_dir") / "ouro" / "golden" / request.param)


def assert_near(ours: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-4, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("case", CASES)
def test_states_gates_and_logits_of_every_loop(golden: Golden, case: str):
    out, real = golden.run(case)
    expected = {name.removeprefix(f"{case}."): value for name, value in golden.expected.items()}
    hidden = torch.stack(out.loop_hidden_states)
    assert_near(hidden[:, real], expected["hidden_per_step"][:, real], "hidden state")
    assert_near((hidden @ golden.head.T)[:, real], expected["logits_per_step"][:, real], "logits")
    assert_near(out.gate_logits[:, real], expected["gate_logits"][:, real], "gate logits")
    assert_near(hazard(out.gate_logits)[:, real], expected["gate_lambda"][:, real], "hazard")
    # Stored with the loop last, (B, S, R).
    assert_near(exit_pdf(out.gate_logits).movedim(0, -1)[real], expected["exit_pdf"][real], "exit pdf")
    assert_near(exit_cdf(out.gate_logits).movedim(0, -1)[real], expected["exit_cdf"][real], "exit cdf")


@pytest.mark.parametrize("case", CASES)
def test_output_of_every_layer_in_every_loop(golden: Golden, case: str):
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> None:
        outputs.append(output)

    hooks = [layer.register_forward_hook(keep) for layer in golden.model.layers]
    try:
        _, real = golden.run(case)
    finally:
        for hook in hooks:
            hook.remove()
    expected = golden.expected[f"{case}.layer_outputs"].flatten(0, 1)  # (R * L, B, S, D)
    assert len(outputs) == len(expected)
    for index, (ours, theirs) in enumerate(zip(outputs, expected, strict=True)):
        loop, layer = divmod(index, len(golden.model.layers))
        assert_near(ours[real], theirs[real], f"loop {loop + 1}, layer {layer}")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_exit_loop_at_every_threshold(golden: Golden, case: str, threshold: float):
    """The first loop whose cdf reaches the threshold; 1 means every loop, by rounding or not."""
    out, real = golden.run(case)
    last = out.gate_logits.shape[0] - 1
    reached = exit_cdf(out.gate_logits) >= threshold
    exit_idx = reached.int().argmax(0) if threshold < 1 else torch.full_like(reached[0], last, dtype=torch.long)
    real = real & golden.expected[f"{case}.exit_step_robust_thr_{threshold}"]
    assert real.any()
    assert torch.equal(exit_idx[real], golden.expected[f"{case}.exit_step_thr_{threshold}"][real])
    logits = torch.stack(out.loop_hidden_states)[:, real] @ golden.head.T  # (R, tokens, V)
    chosen = logits[exit_idx[real], torch.arange(logits.shape[1])]
    assert_near(chosen, golden.expected[f"{case}.logits_thr_{threshold}"][real], "logits at the exit")


def test_cache_entries(golden: Golden):
    """After a prompt of 8 tokens and three more, one by one; slot loop_idx * L + layer, keys after RoPE."""
    ids = golden.expected["full.input_ids"]
    kv_cache = GrowingKVCache(golden.model.config)
    logits = []
    with torch.no_grad():
        for start, end in ((0, 8), (8, 9), (9, 10), (10, 11)):
            out = golden.model(ids[:, start:end], cache=kv_cache)
            logits.append(out.loop_hidden_states[-1][:, -1] @ golden.head.T)
    slots = range(len(golden.expected["cached.key_cache"]))
    assert sorted(kv_cache.keys) == list(slots)
    keys, values = (torch.stack([entries[i] for i in slots]) for entries in (kv_cache.keys, kv_cache.values))
    # Stored with the heads before the positions, (R * L, B, K, S, d).
    assert_near(keys.transpose(2, 3), golden.expected["cached.key_cache"], "keys")
    assert_near(values.transpose(2, 3), golden.expected["cached.value_cache"], "values")
    assert_near(torch.stack(logits, dim=1), golden.expected["cached.decode_logits_last_step"], "logits while decoding")


def divergence(truth: Tensor, logits: Tensor) -> float:
    """Mean KL of the predictions from those of the float32 model, nats."""
    pair = log_softmax(logits.float(), -1), log_softmax(truth, -1)
    return kl_div(*pair, log_target=True, reduction="none").sum(-1).mean().item()


def test_bfloat16_is_as_good_as_the_released_code_in_bfloat16(golden: Golden):
    """Random weights amplify rounding, so the yardstick is the released code's own distance from float32."""
    truth = golden.expected["full.logits_per_step"]
    theirs = golden.expected["bf16.full.logits_per_step"]
    model = LoopedTransformer(golden.model.config)
    model.load_state_dict(golden.model.state_dict())
    with torch.no_grad():
        hidden = torch.stack(model.bfloat16()(golden.expected["full.input_ids"]).loop_hidden_states)
        ours = hidden @ golden.head.bfloat16().T
    assert ours.dtype == torch.bfloat16
    assert divergence(truth, ours) < 2 * divergence(truth, theirs)
    agree = [(logits.argmax(-1) == truth.argmax(-1)).float().mean().item() for logits in (ours, theirs)]
    assert agree[0] > agree[1] - 0.15, "there are 22 tokens a loop: three of them, at one loop"
