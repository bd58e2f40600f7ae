"""Probes on states in which something is planted."""

import numpy as np
import pytest
import torch

from looplm.analysis.probes import Target, answer_targets, fold_aucs, probe_auc, probe_trace
from looplm.analysis.trace import Trace
from looplm.errors import UserError

N = 200


def planted_trace(feature: torch.Tensor, loops: int = 3, layers: int = 2, width: int = 12) -> Trace:
    """Random states, with `feature` (N,) added along one direction from layer 2 of loop 2 on."""
    states = torch.randn(loops, layers, N, width)
    direction = torch.randn(width)
    for loop, layer in ((1, 1), (2, 0), (2, 1)):
        states[loop, layer] += 2 * feature[:, None] * direction / direction.norm()
    return Trace(
        layer_states=states, states=states[:, -1], hidden=states[:, -1], gate_logits=torch.zeros(loops, N),
        prompt_ids=torch.arange(N), positions=torch.zeros(N, dtype=torch.long), trained_loops=loops,
    )  # fmt: skip


def test_a_planted_feature_is_found_where_it_is_and_the_control_is_at_one_half():
    wanted = torch.randint(2, (N,))
    other = torch.randint(2, (N,))
    trace = planted_trace(wanted.double() * 2 - 1)
    probes = probe_trace(trace, [Target("planted", tuple(wanted.tolist())), Target("not", tuple(other.tolist()))])
    planted, absent = probes.grids
    for loop in range(3):
        for layer in range(2):
            there = (loop, layer) in ((1, 1), (2, 0), (2, 1))
            auc = planted.auc[loop][layer]
            assert auc is not None
            assert auc > 0.95 if there else 0.35 < auc < 0.65
            assert absent.auc[loop][layer] == pytest.approx(0.5, abs=0.15)
            assert planted.control[loop][layer] == pytest.approx(0.5, abs=0.15)
    assert probes.control_mean == pytest.approx(0.5, abs=0.06)
    assert probes.layers == "core layer"


def test_answers_of_several_classes_and_without_layers():
    wanted = torch.arange(N) % 3
    trace = planted_trace((wanted == 1).double() * 2 - 1)
    without = Trace(**(vars(trace) | {"layer_states": None}))
    answers = torch.stack([torch.zeros(N, dtype=torch.long), wanted, wanted])
    probes = probe_trace(without, answer_targets(answers, right=wanted))
    constant, second, third, right = probes.grids
    assert [grid.target for grid in (third, right)] == ["answer of loop 3", "right answer"]
    assert probes.layers == "loop state"
    assert constant.note and constant.auc == ((None,), (None,), (None,))
    assert not second.note
    assert second.auc[1][0] > 0.7 > second.auc[0][0]
    assert second.class_shares == pytest.approx((1 / 3, 1 / 3, 1 / 3), abs=0.01)


def test_the_last_token_alone():
    wanted = torch.randint(2, (N,))
    trace = planted_trace(torch.zeros(N))
    targets = [Target("told", tuple(wanted.tolist())), Target("not", tuple(torch.randint(2, (N,)).tolist()))]
    told, absent = probe_trace(trace, targets, tokens=[[7, 11][one] for one in wanted.tolist()]).grids
    assert told.token_auc == 1.0
    assert absent.token_auc == pytest.approx(0.5, abs=0.12)
    assert probe_trace(trace, targets).grids[0].token_auc is None


def test_the_error_over_folds():
    wanted = torch.randint(2, (N,))
    trace = Trace(**(vars(planted_trace(wanted.double())) | {"layer_states": None}))
    (grid,) = probe_trace(trace, [Target("planted", tuple(wanted.tolist()))]).grids
    folds = fold_aucs(trace.hidden[1].numpy(), wanted.numpy())
    assert len(folds) == 5 and len(set(folds)) > 1
    assert grid.auc[1][0] == pytest.approx(np.mean(folds))
    assert grid.stderr[1][0] == pytest.approx(np.std(folds, ddof=1) / 5**0.5)


def test_classes_too_rare_for_the_folds_are_left_out():
    values = np.array([0, 1] * 20 + [2] * 3)
    states = np.stack([values == 0, values == 1], axis=1).astype(float)
    assert probe_auc(states, values) == 1.0
    assert probe_auc(states, np.zeros(43, dtype=int)) is None


def test_a_target_of_another_length_is_refused():
    with pytest.raises(UserError, match="2 values for 200 prompts"):
        probe_trace(planted_trace(torch.zeros(N)), [Target("short", (0, 1))])
