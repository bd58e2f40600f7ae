"""The engine writes what the released Ouro code writes: greedy tokens and exit loops of the golden checkpoints."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from looplm.hf.load import load
from looplm.inference import Engine, QuantileExit, SamplingParams
from looplm.inference.exit_policy import exit_loops

KEPT = Path(__file__).resolve().parents[1] / "golden"
THRESHOLDS = [0.0, 0.3, 0.5, 0.9, 1.0]


@pytest.fixture(params=["one_step", "tied_mqa", "base", "gqa", "deep"])
def golden(request):
    """Model and expected tensors; two of the checkpoints are kept here, the others lie in `shared`."""
    directory = KEPT / request.param
    if not directory.is_dir():
        directory = request.getfixturevalue("shared_dir") / "ouro" / "golden" / request.param
    return load(directory), load_file(directory / "expected.safetensors")


@pytest.mark.usefixtures("unchecked_shapes")
def test_greedy_tokens(golden):
    """All thresholds and prompts in one batch; padding in the released code is no padding here."""
    model, expected = golden
    cases = []
    for case in ("gen", "genleft"):
        prompts = expected[f"{case}.prompt_ids"]
        masks = expected["genleft.attention_mask"] if case == "genleft" else torch.ones_like(prompts)
        for threshold in THRESHOLDS:
            tokens = expected[f"{case}.cache_thr_{threshold}"][:, prompts.shape[1] :]
            rows = zip(prompts, masks, tokens, strict=True)
            cases += [(prompt[mask == 1].tolist(), threshold, row.tolist()) for prompt, mask, row in rows]
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    results = Engine(model).generate([case[0] for case in cases], sampling, [QuantileExit(case[1]) for case in cases])
    for (_, _, tokens), result in zip(cases, results, strict=True):
        assert result.token_ids == tokens


def test_exit_loops(golden):
    model, expected = golden
    num_loops = model.model.config.num_loops
    with torch.inference_mode():
        gate_logits = model.model(expected["full.input_ids"]).gate_logits
    for threshold in THRESHOLDS:
        robust = expected[f"full.exit_step_robust_thr_{threshold}"]
        loops = exit_loops(QuantileExit(threshold), gate_logits, num_loops)
        assert torch.equal(loops[robust], expected[f"full.exit_step_thr_{threshold}"][robust] + 1)


def test_what_a_loaded_checkpoint_brings(golden):
    """Released configs name end tokens; the engine takes them, and their threshold."""
    model, _ = golden
    engine = Engine(model)
    named = model.config.eos_token_id
    assert engine.end_token_ids == ({named} if isinstance(named, int) else set(named or ()))
    threshold = model.config.exit_threshold
    assert threshold is None or threshold >= 1 or engine.default_exit == QuantileExit(threshold)
