"""Exit rules on kept continuations decide as the engine's policies do on states and logits."""

import pytest
import torch

from looplm.errors import UserError
from looplm.evaluation.continuation import Continuation, joined, spread_exits
from looplm.inference import ConfidenceExit, Deadline, FixedDepth, HiddenDiffExit, QuantileExit
from looplm.inference.exit_policy import compare_logits, exit_loops, hidden_changes

LOOPS, TOKENS, VOCAB = 5, 400, 6
POLICIES = [
    FixedDepth(1), FixedDepth(4), FixedDepth(5), QuantileExit(0.0), QuantileExit(0.6), QuantileExit(1.0),
    HiddenDiffExit(0.0), HiddenDiffExit(3.0), HiddenDiffExit(9.0),
    ConfidenceExit(kl=0.2), ConfidenceExit(kl=0.5), ConfidenceExit(stable_loops=1), ConfidenceExit(stable_loops=2),
]  # fmt: skip


@pytest.fixture
def states():
    """Hidden states, logits and gate logits of every loop, random, and what is kept of them."""
    hidden = torch.randn(LOOPS, TOKENS, 4, dtype=torch.float64)
    logits = torch.randn(LOOPS, TOKENS, VOCAB, dtype=torch.float64).cumsum(0)  # later loops change less
    gate_logits = torch.randn(LOOPS, TOKENS, dtype=torch.float64)
    targets = torch.randint(VOCAB, (TOKENS,))
    log_p = logits.log_softmax(-1)
    kept = Continuation(
        logprobs=log_p.gather(2, targets.expand(LOOPS, -1)[..., None])[..., 0],
        predictions=logits.argmax(-1),
        targets=targets,
        gate_logits=gate_logits,
        hidden_change=hidden_changes(hidden),
        prediction_kl=torch.stack([compare_logits(logits[i], logits[i + 1])[0] for i in range(LOOPS - 1)]),
    )
    return hidden, logits, gate_logits, kept


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_each_rule_decides_as_on_the_states(states, policy):
    hidden, logits, gate_logits, kept = states
    depth = policy.max_loops(LOOPS)
    expected = exit_loops(policy, gate_logits[:depth], LOOPS, hidden=hidden[:depth], logits=logits[:depth])
    found = kept.exit_loops(policy, LOOPS)
    assert found.tolist() == expected.tolist()
    total, greedy, loops = kept.at(policy, LOOPS)
    by_hand = sum(kept.logprobs[loop - 1, i].item() for i, loop in enumerate(expected.tolist()))
    assert total == pytest.approx(by_hand)
    assert loops.tolist() == found.tolist()
    assert not greedy


def test_greedy_means_every_token_at_its_own_loop(states):
    _, _, _, kept = states
    loops = kept.exit_loops(QuantileExit(0.6), LOOPS)
    right = kept.predictions.gather(0, loops[None] - 1)[0]
    same = Continuation(kept.logprobs, kept.predictions, right, kept.gate_logits, None, None)
    assert same.at(QuantileExit(0.6), LOOPS)[1]
    assert not same.at(FixedDepth(1), LOOPS)[1]


def test_what_was_not_kept_is_not_made_up(states):
    _, _, gate_logits, kept = states
    plain = Continuation(kept.logprobs, kept.predictions, kept.targets, gate_logits, None, None)
    with pytest.raises(ValueError, match="was not recorded"):
        plain.exit_loops(HiddenDiffExit(1.0), LOOPS)
    with pytest.raises(UserError, match="not available for log-likelihoods"):
        kept.exit_loops(Deadline(5.0), LOOPS)
    with pytest.raises(UserError, match="Nothing was scored"):
        joined([], LOOPS)


@pytest.mark.parametrize("rule", ["gate", "hidden-diff", "kl"])
def test_chosen_levels_spread_the_mean_depth(states, rule):
    kept = states[3]
    exits = spread_exits(joined([kept, kept], LOOPS), rule, 4)
    depths = [kept.exit_loops(one, LOOPS).double().mean().item() for one in exits]
    first = 1 if rule == "gate" else 2  # rules that compare loops leave after loop 2 at the earliest
    assert len(exits) == 4
    for depth, aim in zip(sorted(depths), torch.linspace(first, LOOPS, 6)[1:-1].tolist(), strict=True):
        assert depth == pytest.approx(aim, abs=0.45)
