"""What the shipped checkpoint promises: small, depth pays, its gate decides well, and it was trained as logged."""

from pathlib import Path

import pytest
import torch

from looplm.data.documents import split_documents
from looplm.data.evaluation_windows import evaluation_windows
from looplm.data.stdlib_text import load_stdlib_text
from looplm.evaluation.depth_quality import depth_quality_gain
from looplm.evaluation.depth_sweep import depth_sweep
from looplm.evaluation.exit_curve import gate_statistics
from looplm.evaluation.record import DepthRecord, record
from looplm.hf.load import load, load_tokenizer
from looplm.inference import Engine, FixedDepth, QuantileExit, SamplingParams, reference
from looplm.quickstart.plan import SHIPPED, SHIPPED_RECIPE
from looplm.quickstart.shipped import read_training_log, shipped_directory

MAX_BYTES = 4_000_000


@pytest.fixture(scope="module")
def passed() -> DepthRecord:
    """One pass over the first held-out documents of this Python's standard library."""
    torch.set_grad_enabled(True)
    documents = split_documents(load_stdlib_text().documents).held_out
    windows = evaluation_windows(documents, load_tokenizer(SHIPPED), SHIPPED_RECIPE.seq_len)
    return record(load(SHIPPED, dtype="float32"), windows.batches(32), windows.document_bytes)


def test_it_is_small_enough_to_ship() -> None:
    files = [path for path in shipped_directory().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MAX_BYTES
    assert shipped_directory() == Path(__file__).parents[2] / "looplm" / "checkpoints" / SHIPPED


def test_depth_pays_on_held_out_text(passed: DepthRecord) -> None:
    sweep = depth_sweep(passed)
    first, best = sweep.points[0].bits_per_byte, min(point.bits_per_byte for point in sweep.points)
    assert best < 0.96 * first


def test_its_gate_decides(passed: DepthRecord) -> None:
    before, after = read_training_log().stage_one_gate, gate_statistics(passed)
    floor = 0.3 * torch.tensor(float(SHIPPED_RECIPE.num_loops)).log().item()
    assert before.mean_entropy_nats > floor
    assert after.expected_loops_std >= 0.1


def test_leaving_early_beats_mixing_fixed_depths(passed: DepthRecord) -> None:
    gain = depth_quality_gain(passed).mean_gain_bits_per_byte
    assert gain.low > 0


def test_the_log_matches_the_recipe_and_the_weights() -> None:
    log, model = read_training_log(), load(SHIPPED)
    assert log.recipe == SHIPPED_RECIPE
    assert model.config.hidden_size == SHIPPED_RECIPE.hidden_size
    assert model.dtype == torch.bfloat16
    assert log.training[-1].loss_nats[-1] < log.training[0].loss_nats[-1]


def test_it_generates_at_several_depths_and_saves_the_passes_it_claims() -> None:
    model, tokenizer = load(SHIPPED, dtype="float32"), load_tokenizer(SHIPPED)
    engine = Engine(model, tokenizer)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    (result,) = engine.generate(["def read("], params, QuantileExit(0.5))
    assert len(set(result.loops)) > 1
    assert engine.stats.weight_passes == sum(result.loops[1:]) < 4 * 39
    expected = reference.generate(model, tokenizer.encode("def read("), params, QuantileExit(0.5))
    assert (result.token_ids, result.loops) == (expected.token_ids, expected.loops)
    (full,) = engine.generate(["def read("], params, QuantileExit(1.0))
    (fixed,) = engine.generate(["def read("], params, FixedDepth(4))
    assert full.token_ids == fixed.token_ids
