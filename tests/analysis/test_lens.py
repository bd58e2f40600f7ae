"""The lens against the model's own output."""

import pytest
import torch

from looplm.analysis.lens import lens, readings_by_level
from looplm.errors import UserError

IDS = [3, 9, 14, 2]


@pytest.mark.parametrize(
    "changes", [{}, {"num_prelude_layers": 1, "num_coda_layers": 1, "coda_input": "raw"}, {"norm_placement": "magic"}]
)
def test_the_last_layer_reads_what_the_model_says(make_model, changes):
    model = make_model(**changes)
    found = lens(model, IDS, num_loops=4, top=3)
    assert [(reading.loop, reading.layer) for reading in found.readings] == [
        (r, k) for r in range(1, 5) for k in (1, 2)
    ]
    hidden = model.model(torch.tensor([IDS]), num_loops=4).loop_hidden_states
    for loop in range(1, 5):
        log_p = model.lm_head(hidden[loop - 1])[0].log_softmax(-1)
        reading = next(one for one in found.readings if (one.loop, one.layer) == (loop, 2))
        best = log_p.exp().topk(3)
        assert torch.equal(torch.tensor(reading.top_ids), best.indices)
        torch.testing.assert_close(torch.tensor(reading.top_probabilities, dtype=torch.float64), best.values)
        entropy = torch.distributions.Categorical(logits=log_p).entropy()
        torch.testing.assert_close(torch.tensor(reading.entropy, dtype=torch.float64), entropy)
        nats = torch.nn.functional.cross_entropy(log_p[:-1], torch.tensor(IDS[1:]), reduction="none")
        torch.testing.assert_close(torch.tensor(reading.next_nats, dtype=torch.float64), nats)
    assert found.readings[-1].kl_from_last == pytest.approx((0.0,) * 4, abs=1e-12)
    assert max(found.readings[0].kl_from_last) > 0.01


def test_the_circuit_s_answer_appears_at_loop_two(circuit):
    found = lens(circuit, [4, 2, 4, 5], num_loops=3, top=1)
    assert [reading.top_ids[-1][0] for reading in found.readings][1:] == [2, 2]
    assert found.readings[0].top_probabilities[-1][0] == pytest.approx(1 / 6)
    assert found.settled_at(3) == 2


def test_the_circuit_s_answers_appear_at_loop_two_by_level(circuit):
    prompts = [[4, token, 4, 5] for token in range(4)]
    found = readings_by_level(circuit, prompts, [0, 1, 2, 0], [1, 2, None, 2], num_loops=2)
    assert [(one.level, one.loop, one.num_prompts) for one in found] == [
        (None, 1, 1), (None, 2, 1), (1, 1, 1), (1, 2, 1), (2, 1, 2), (2, 2, 2)
    ]  # fmt: skip
    unnamed, easy, hard = found[1], found[3], found[5]
    assert (unnamed.right, easy.right, easy.right_stderr, easy.final) == (1.0, 1.0, 0.0, 1.0)
    # Of these two it says 3 where 0 is wanted.
    assert (hard.right, hard.right_stderr, hard.final) == (0.5, 0.5, 1.0)
    assert hard.nats == pytest.approx(hard.nats_stderr, rel=0.01) and hard.nats > 5  # half and half: m, and 2 m / 2
    assert found[0].nats == pytest.approx(torch.tensor(6.0).log().item())  # one loop knows nothing
    # Nothing but the prompt is read: the same nats as the model's own at the prompt's last token.
    model_logits = circuit.lm_head(circuit.model(torch.tensor([prompts[2]])).loop_hidden_states[1])[0, -1]
    assert unnamed.nats == pytest.approx(-model_logits.log_softmax(-1)[2].item())


def test_an_empty_prompt_is_refused(make_model):
    with pytest.raises(UserError, match="empty"):
        lens(make_model(), [])
