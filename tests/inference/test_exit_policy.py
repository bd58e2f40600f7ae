"""When tokens leave: thresholds and their edges, in every dtype, scalar and vectorised."""

import math
import subprocess
import sys

import pytest
import torch

from looplm.errors import UserError
from looplm.inference.exit_policy import FixedDepth, QuantileExit, exit_loops
from looplm.model.gate import exit_cdf


def test_quantile_exit_is_the_first_loop_whose_cdf_reaches_it():
    gate_logits = torch.randn(5, 200, dtype=torch.float64)
    cdf = exit_cdf(gate_logits)
    seen = set()
    for threshold in (0.0, 0.2, 0.5, 0.8, 0.99):
        loops = exit_loops(QuantileExit(threshold), gate_logits, trained_loops=5)
        for token, loop in enumerate(loops.tolist()):
            assert loop == next(r for r in range(1, 6) if cdf[r - 1, token] >= threshold)
        seen |= set(loops.tolist())
    assert seen == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("threshold", [1, 1.0, 1.5, 1e300])
def test_a_threshold_of_one_never_leaves_early(dtype, threshold):
    gate_logits = torch.full((4, 3), 20.0, dtype=dtype)
    assert float(exit_cdf(gate_logits)[0, 0]) > 1 - 1e-8  # rounds to 1 in all but float64
    assert exit_loops(QuantileExit(threshold), gate_logits, trained_loops=4).tolist() == [4, 4, 4]


def test_a_threshold_of_zero_always_leaves_at_once():
    gate_logits = torch.full((4, 3), -200.0)
    assert exit_loops(QuantileExit(0), gate_logits, trained_loops=4).tolist() == [1, 1, 1]


def test_a_higher_threshold_never_leaves_earlier():
    gate_logits = torch.randn(6, 500)
    depths = [exit_loops(QuantileExit(q / 20), gate_logits, trained_loops=6) for q in range(21)]
    assert all((low <= high).all() for low, high in zip(depths, depths[1:], strict=False))


def test_loops_beyond_the_choice_are_not_read():
    gate_logits = torch.randn(4, 50)
    loops = exit_loops(QuantileExit(0.5), gate_logits, trained_loops=4)
    spoiled = torch.where(torch.arange(1, 5)[:, None] > loops, torch.nan, gate_logits)
    assert torch.equal(exit_loops(QuantileExit(0.5), spoiled, trained_loops=4), loops)
    assert exit_loops(QuantileExit(1), torch.randn(6, 3), trained_loops=4).tolist() == [4, 4, 4]


def test_a_broken_gate_leaves_at_the_last_loop():
    assert exit_loops(QuantileExit(0.5), torch.full((4, 2), torch.nan), trained_loops=4).tolist() == [4, 4]


@pytest.mark.parametrize("num_loops", [1, 3, 4, 7])
def test_fixed_depth_may_exceed_the_trained_depth(num_loops):
    policy = FixedDepth(num_loops)
    assert policy.max_loops(4) == num_loops
    assert exit_loops(policy, torch.randn(num_loops, 5), trained_loops=4).tolist() == [num_loops] * 5


@pytest.mark.parametrize("threshold", [-1, -1e-9, math.nan, -math.inf, math.inf, True])
def test_impossible_thresholds_are_refused(threshold):
    with pytest.raises(UserError, match="exit threshold"):
        QuantileExit(threshold)


@pytest.mark.parametrize("num_loops", [0, -1, True])
def test_impossible_depths_are_refused(num_loops):
    with pytest.raises(UserError, match="num_loops"):
        FixedDepth(num_loops)


def test_values_of_the_wrong_type_are_refused():
    """In a process of its own: here the shape checker would refuse them first."""
    code = """
from looplm.errors import UserError
from looplm.inference.exit_policy import FixedDepth, QuantileExit
from looplm.inference.sampling import SamplingParams
makers = [lambda v=v: QuantileExit(v) for v in ("abc", "0.5", None)]
makers += [lambda v=v: FixedDepth(v) for v in (1.5, "2", None)]
makers += [lambda: SamplingParams(max_tokens=1.5), lambda: SamplingParams(temperature="hot")]
for maker in makers:
    try:
        print("accepted", maker())
    except UserError as error:
        print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["refused"] * 8, done.stdout + done.stderr
