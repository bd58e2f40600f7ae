"""The area by analytic cases, the resamples by documents written out, the costs by the formulas they claim."""

import math
from collections.abc import Callable
from itertools import pairwise
from math import inf

import pytest
import torch

from looplm.errors import UserError
from looplm.evaluation.bootstrap import resample_weights
from looplm.evaluation.exit_area import RuleComparison, compare_exit_rules, mean_over_depth
from looplm.evaluation.exit_curve import suffix_max
from looplm.evaluation.exit_rules import (
    ExitRule,
    confidence_exit,
    fixed_exit,
    gate_exit,
    hidden_change_exit,
    oracle_exit,
    stable_argmax_exit,
)
from looplm.evaluation.record import DepthRecord
from looplm.model.config import LoopedConfig
from looplm.model.flops import inference_flops

RecordBuilder = Callable[..., DepthRecord]

CONFIG = LoopedConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
)


@pytest.fixture
def easy_and_hard(random_record: RecordBuilder) -> DepthRecord:
    """Easy tokens lose nothing anywhere, hard ones 3, 2, 1, 0 bits at loops 1 to 4; one byte a token."""
    easy = torch.arange(400) % 2 == 0
    ramp = torch.tensor([3.0, 2.0, 1.0, 0.0])[:, None] * math.log(2)
    return random_record(
        num_documents=10,
        num_tokens=400,
        cross_entropy=torch.where(easy, 0.0, ramp),
        gate_logits=torch.where(easy, 20.0, -20.0).expand(4, 400),
        document_ids=torch.arange(10).repeat_interleave(40),
        document_bytes=torch.full((10,), 40),
    )


def area(comparison: RuleComparison, name: str) -> float:
    return comparison.curve(name).area_bits_per_byte.value


def test_mean_over_depth_by_hand() -> None:
    depth = torch.tensor([[1.0, 2.0, 4.0], [1.0, 1.0, 4.0], [1.0, 1.0, 1.0]]).double()
    quality = torch.tensor([[4.0, 2.0, 1.0], [4.0, 2.0, 1.0], [4.0, 4.0, 4.0]]).double()
    # (3 * 1 + 1.5 * 2) / 3; a step of no width counts nothing: 1.5; no depth at all: 0.
    assert mean_over_depth(depth, quality).tolist() == [2, 1.5, 0]


def test_areas_of_known_rules(easy_and_hard: DepthRecord) -> None:
    rules = [fixed_exit(easy_and_hard), gate_exit(easy_and_hard), oracle_exit(easy_and_hard)]
    found = compare_exit_rules(easy_and_hard, rules, CONFIG)
    # Fixed depths fall straight from 1.5 to 0. The gate that knows gives the hard half all loops and the easy half
    # one: from (1, 1.5) to (2.5, 0), then flat. The oracle can do no better.
    assert area(found, "fixed depth") == pytest.approx(0.75)
    assert area(found, "gate") == pytest.approx(1.5 * 1.5 / 2 / 3)
    assert area(found, "oracle") == pytest.approx(1.5 * 1.5 / 2 / 3)
    assert found.difference("gate", "fixed depth").value == pytest.approx(-0.375)
    reverse = found.difference("fixed depth", "gate")
    assert (reverse.low, reverse.value) == (-found.difference("gate", "fixed depth").high, pytest.approx(0.375))
    with pytest.raises(KeyError):
        found.difference("gate", "intuition")
    # Dealt at random, the same exits lie on the line of the fixed depths, which is straight.
    assert found.curve("gate").shuffled_gain_bits_per_byte.value == pytest.approx(0.375)
    assert found.curve("fixed depth").shuffled_gain_bits_per_byte.value == pytest.approx(0, abs=1e-12)


def test_a_rule_that_guesses_equals_its_shuffled_self(random_record: RecordBuilder) -> None:
    document_ids = torch.arange(20).repeat_interleave(400)
    record = random_record(
        num_documents=20,
        num_tokens=8000,
        document_ids=document_ids,
        document_bytes=torch.full((20,), 400),
    )
    guess = ExitRule(name="guess", scores=torch.rand(3, 8000))
    gain = compare_exit_rules(record, [guess], CONFIG).curve("guess").shuffled_gain_bits_per_byte
    assert gain.low < 0 < gain.high
    assert abs(gain.value) < 0.02 and gain.high - gain.low < 0.08


def test_no_rule_goes_below_the_oracle(random_record: RecordBuilder) -> None:
    record = random_record(hidden_change=torch.rand(3, 80), prediction_kl=torch.rand(3, 80))
    rules = [gate_exit(record), hidden_change_exit(record), confidence_exit(record), stable_argmax_exit(record)]
    found = compare_exit_rules(record, [oracle_exit(record), *rules, fixed_exit(record)], CONFIG, count=300)
    oracle = found.curves[0]
    depth = torch.tensor([point.mean_loops for point in oracle.points])
    for curve in found.curves[1:]:
        for point in curve.points:
            after = int((depth < point.mean_loops).sum())
            left, right = oracle.points[max(0, after - 1)], oracle.points[after]
            share = (point.mean_loops - left.mean_loops) / max(1e-12, right.mean_loops - left.mean_loops)
            floor = left.bits_per_byte + min(1, share) * (right.bits_per_byte - left.bits_per_byte)
            assert point.bits_per_byte >= floor - 1e-9
        assert found.difference(curve.name, "oracle").low > 0


def test_resamples_are_documents_drawn(random_record: RecordBuilder) -> None:
    """Every resampled area equals that of a record in which the drawn documents are written out."""
    record = random_record(num_documents=4)
    levels = torch.tensor([0.2, 0.4, 0.6])  # few, so that all records share the thresholds
    rule = ExitRule(name="levels", scores=levels[torch.randint(3, (3, 80))])
    found = compare_exit_rules(record, [rule, fixed_exit(record)], CONFIG, num_resamples=25, seed=3)
    areas, shuffled_gains = [], []
    for row in resample_weights(4, 25, seed=3).tolist():
        drawn = [m for m, times in enumerate(row) for _ in range(int(times))]
        tokens = [(record.document_ids == m).nonzero()[:, 0] for m in drawn]
        index = torch.cat(tokens)
        loss, scores = record.cross_entropy[:, index].double(), rule.scores[:, index]
        size = record.document_bytes[drawn].sum().item()
        points, shuffled = [], []
        for threshold in (-inf, 0.2, 0.4, 0.6, inf):
            loops = torch.tensor([
                next((r for r in range(3) if column[r] >= threshold), 3) for column in scores.T.tolist()
            ])  # fmt: skip
            depth = loops.double().mean().item() + 1
            points.append((depth, loss.gather(0, loops[None]).sum().item()))
            shuffled.append((depth, loss[loops].mean(1).sum().item()))  # every loop that occurs, for all tokens
        scale = 3 * math.log(2) * size
        areas.append(plain_area(points) / scale)
        shuffled_gains.append((plain_area(shuffled) - plain_area(points)) / scale)
    curve = found.curve("levels")
    for interval, resampled in (
        (curve.area_bits_per_byte, areas),
        (curve.shuffled_gain_bits_per_byte, shuffled_gains),
    ):
        ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
        low, high = torch.tensor(resampled, dtype=torch.float64).quantile(ends).tolist()
        assert (interval.low, interval.high) == (pytest.approx(low), pytest.approx(high))


def plain_area(points: list[tuple[float, float]]) -> float:
    """Trapezoids between (depth, quality) points."""
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points))


def test_differences_are_paired(random_record: RecordBuilder) -> None:
    # Documents differ wildly, two rules by a little on each of them: only the areas' own intervals see the documents.
    document_ids = torch.arange(8).repeat_interleave(50)
    fall = torch.tensor([1.0, 0.5, 0.2, 0.0])[:, None] * torch.where(torch.arange(400) % 2 == 0, 0.0, 1.0)
    record = random_record(
        num_documents=8,
        num_tokens=400,
        document_ids=document_ids,
        document_bytes=torch.full((8,), 100),
        cross_entropy=fall + document_ids * 3.0,
        gate_logits=torch.where(torch.arange(400) % 2 == 0, 20.0, -20.0).expand(4, 400),
    )
    found = compare_exit_rules(record, [fixed_exit(record), gate_exit(record)], CONFIG)
    gap, own = found.difference("gate", "fixed depth"), found.curve("gate").area_bits_per_byte
    assert gap.high < 0
    assert own.high - own.low > 50 * (gap.high - gap.low)


def test_points_and_their_costs(random_record: RecordBuilder) -> None:
    record = random_record(hidden_change=torch.rand(3, 80), prediction_kl=torch.rand(3, 80))
    rules = [hidden_change_exit(record), confidence_exit(record)]
    found = compare_exit_rules(record, rules, CONFIG, count=7)
    assert (found.num_loops, found.num_tokens, found.num_documents) == (4, 80, 5)
    for rule, curve in zip(rules, found.curves, strict=True):
        assert [point.threshold for point in curve.points] == list(rule.covering_thresholds(7))
        for point in curve.points:
            loops = rule.loops(point.threshold)
            mean_loops = loops.double().mean().item()
            computed = suffix_max(loops, record.sequence_ids).double().mean().item()
            heads = mean_loops if rule.head_every_loop else 1
            loss = record.cross_entropy.gather(0, loops[None] - 1).double()
            assert point.mean_loops == pytest.approx(mean_loops)
            assert point.loss_nats == pytest.approx(loss.mean().item())
            assert point.bits_per_byte == pytest.approx(
                loss.sum().item() / math.log(2) / record.document_bytes.sum().item()
            )
            shares = [(loops == r).double().mean().item() for r in (1, 2, 3, 4)]
            assert point.exit_shares == pytest.approx(shares)
            by_loop = record.cross_entropy.double().sum(1) / math.log(2) / record.document_bytes.sum()
            assert point.shuffled_bits_per_byte == pytest.approx((torch.tensor(shares) * by_loop).sum().item())
            assert point.flops_per_token == pytest.approx(inference_flops(CONFIG, mean_loops, heads))
            assert point.flops_per_token_exact_cache == pytest.approx(inference_flops(CONFIG, computed, heads))
    deepest = [curve.points[-1].flops_per_token for curve in found.curves]
    assert deepest[1] - deepest[0] == 3 * 2 * CONFIG.vocab_size * CONFIG.hidden_size


def test_scores_may_come_from_another_gate(random_record: RecordBuilder) -> None:
    record, other = random_record(), random_record()
    stages = [gate_exit(record, name="first"), gate_exit(other, name="second")]
    found = compare_exit_rules(record, stages, CONFIG)
    assert found.difference("second", "first").value == pytest.approx(area(found, "second") - area(found, "first"))


def test_one_loop_has_no_area(random_record: RecordBuilder) -> None:
    record = random_record(num_loops=1)
    found = compare_exit_rules(record, [gate_exit(record), fixed_exit(record)], CONFIG)
    assert area(found, "gate") == 0


def test_bad_input_is_refused(random_record: RecordBuilder) -> None:
    record = random_record()
    with pytest.raises(UserError, match="same name"):
        compare_exit_rules(record, [gate_exit(record), gate_exit(record)], CONFIG)
    with pytest.raises(UserError, match=r"\(2, 80\).*\(3, 80\)"):
        compare_exit_rules(record, [gate_exit(record, 3)], CONFIG)
    single = random_record(num_documents=1)
    with pytest.raises(UserError, match="two documents|at least two"):
        compare_exit_rules(single, [gate_exit(single)], CONFIG)
