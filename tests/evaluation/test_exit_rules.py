"""Every rule against plain Python, and the oracle against all assignments there are."""

from collections.abc import Callable
from itertools import product
from math import inf, nextafter

import pytest
import torch

from looplm.errors import UserError
from looplm.evaluation.exit_rules import (
    ExitRule,
    confidence_exit,
    fixed_exit,
    gate_exit,
    hidden_change_exit,
    hull_slopes,
    oracle_exit,
    stable_argmax_exit,
)
from looplm.evaluation.record import DepthRecord
from looplm.inference.exit_policy import QuantileExit, exit_loops

RecordBuilder = Callable[..., DepthRecord]


def first_loop(stops: list[bool]) -> int:
    """The first loop, from 1, that stops; the one after the last if none does."""
    return next((loop for loop, stop in enumerate(stops, start=1) if stop), len(stops) + 1)


def changes(num_loops: int = 5, num_tokens: int = 80) -> dict[str, torch.Tensor]:
    return {
        "hidden_change": torch.rand(num_loops - 1, num_tokens) * 10,
        "prediction_kl": torch.rand(num_loops - 1, num_tokens),
    }


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.77, nextafter(1.0, 0.0)])
def test_the_gate_decides_as_the_engine_does(random_record: RecordBuilder, threshold: float) -> None:
    logits = torch.randn(5, 200) * 4
    logits[:, :20] = 60.0  # a cdf of exactly 1 from the first loop on
    record = random_record(num_loops=5, gate_logits=logits, trained_loops=4)
    rule = gate_exit(record)
    assert torch.equal(rule.loops(threshold), exit_loops(QuantileExit(threshold), logits[:4], 4))
    for covering in rule.covering_thresholds()[1:-1]:
        assert torch.equal(rule.loops(covering), exit_loops(QuantileExit(covering), logits[:4], 4))
    assert rule.loops(inf).eq(4).all() and rule.loops(-inf).eq(1).all()


@pytest.mark.parametrize("field", ["hidden_change", "prediction_kl"])
def test_change_rules_stop_at_the_first_small_change(random_record: RecordBuilder, field: str) -> None:
    record = random_record(num_loops=5, **changes())
    rule = hidden_change_exit(record) if field == "hidden_change" else confidence_exit(record)
    assert rule.head_every_loop == (field == "prediction_kl")
    values = {"hidden_change": record.hidden_change, "prediction_kl": record.prediction_kl}[field]
    assert values is not None
    eps = values.median().item()
    # Loop 1 has nothing to compare with; loop 5, the last, is reached by those who never stop.
    wanted = [first_loop([False, *(change <= eps for change in column)]) for column in values[:3].T.tolist()]
    assert rule.loops(-eps).tolist() == wanted
    assert set(wanted) == {2, 3, 4, 5}
    assert rule.loops(-inf).eq(1).all() and rule.loops(inf).eq(5).all()


def test_a_change_that_grows_again_does_not_call_a_token_back(random_record: RecordBuilder) -> None:
    change = torch.tensor([[1.0], [9.0], [0.0]])
    record = random_record(num_documents=1, num_tokens=1, hidden_change=change, document_ids=torch.tensor([0]),
                           cross_entropy=torch.rand(4, 1), gate_logits=torch.rand(4, 1))  # fmt: skip
    assert [hidden_change_exit(record).loops(-eps).item() for eps in (0.5, 1.0, 2.0, 20.0)] == [4, 2, 2, 2]


def test_stable_argmax_is_one_point(random_record: RecordBuilder) -> None:
    record = random_record(num_loops=5)
    rule = stable_argmax_exit(record)
    wanted = [
        first_loop([False, *(column[i] == column[i - 1] for i in (1, 2, 3))])
        for column in record.predictions.T.tolist()
    ]
    assert rule.loops(1.0).tolist() == wanted
    assert rule.covering_thresholds() == (-inf, 1.0, inf)
    assert rule.head_every_loop


def test_fixed_depths(random_record: RecordBuilder) -> None:
    rule = fixed_exit(random_record(num_tokens=4))
    assert rule.covering_thresholds() == (-inf, 1, 2, 3, inf)
    assert [rule.loops(r).unique().tolist() for r in (1, 2, 3, inf)] == [[1], [2], [3], [4]]


def test_the_oracle_is_the_best_of_all_assignments(random_record: RecordBuilder) -> None:
    loss = torch.rand(4, 4, dtype=torch.float64) * torch.tensor([0.2, 1.0, 3.0, 1.0], dtype=torch.float64)
    record = random_record(num_documents=1, num_tokens=4, cross_entropy=loss)
    best: dict[int, float] = {}
    for loops in product(range(4), repeat=4):
        depth = sum(loops) + 4
        total = sum(loss[loop, i].item() for i, loop in enumerate(loops))
        best[depth] = min(total, best.get(depth, inf))
    rule = oracle_exit(record)
    thresholds = rule.covering_thresholds(count=100)
    met = set()
    for threshold in thresholds:
        loops = rule.loops(threshold)
        met.add(int(loops.sum()))
        assert loss.gather(0, loops[None] - 1).sum().item() == pytest.approx(best[int(loops.sum())], abs=1e-12)
    assert {4, 16} < met and len(met) >= 6
    assert loss.gather(0, rule.loops(0.0)[None] - 1)[0].tolist() == loss.amin(0).tolist()


def test_hull_slopes_by_hand() -> None:
    columns = torch.tensor([[4.0, 0.0, 3.0], [2.0, 1.0, 2.0], [1.0, 1.0, 4.0], [1.0, 3.0, 0.0]]).double()
    # Convex: its own slopes. Bump: from 0 over two steps of 0.5, then 2. Concave: one line to the end.
    wanted = torch.tensor([[-2.0, 0.5, -1.0], [-1.0, 0.5, -1.0], [0.0, 2.0, -1.0]]).double()
    assert torch.equal(hull_slopes(columns), wanted)


@pytest.mark.parametrize("make", [gate_exit, hidden_change_exit, confidence_exit, oracle_exit])
def test_thresholds_cover_what_a_rule_can_reach(
    random_record: RecordBuilder, make: Callable[[DepthRecord], ExitRule]
) -> None:
    record = random_record(num_loops=5, num_tokens=4000, **changes(num_tokens=4000))
    rule = make(record)
    depths = torch.tensor([rule.loops(t).double().mean().item() for t in rule.covering_thresholds(count=21)])
    steps = depths.diff()
    assert depths[0] == 1 and depths[-1] == 5 and steps.min() >= 0
    first_reachable = 2.0 if make in (hidden_change_exit, confidence_exit) else 1.0
    assert steps[depths[1:] > first_reachable].max() < 0.3


@pytest.mark.parametrize("num_loops", [1, 2])
def test_shallow_records(random_record: RecordBuilder, num_loops: int) -> None:
    record = random_record(num_loops=num_loops, **changes(num_loops))
    for make in (gate_exit, hidden_change_exit, confidence_exit, stable_argmax_exit, fixed_exit, oracle_exit):
        rule = make(record)
        assert rule.scores.shape == (num_loops - 1, record.num_tokens)
        assert rule.loops(inf).eq(num_loops).all()
        assert rule.loops(-inf).eq(1).all()
        assert rule.covering_thresholds()[0] == -inf


@pytest.mark.parametrize("make", [hidden_change_exit, confidence_exit])
def test_a_record_without_changes_is_refused(
    random_record: RecordBuilder, make: Callable[[DepthRecord], ExitRule]
) -> None:
    with pytest.raises(UserError, match="changes=True"):
        make(random_record())
