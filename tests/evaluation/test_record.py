"""The recorded pass against full logits, one document at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

import looplm.evaluation.record as record_module
from looplm.data.packing import IGNORE_INDEX
from looplm.errors import UserError
from looplm.evaluation.record import record
from looplm.model.config import LoopedConfig
from looplm.model.looped import LoopedTransformer

VOCAB = 23


@dataclass
class TinyLM:
    model: LoopedTransformer
    lm_head: nn.Linear


@pytest.fixture
def tiny() -> TinyLM:
    config = LoopedConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_loops=3,
        initializer_range=0.5,
    )
    return TinyLM(LoopedTransformer(config).double(), nn.Linear(16, VOCAB, bias=False).double())


DOCUMENTS = [torch.arange(9) * 5 % VOCAB, torch.arange(4) * 3 % VOCAB, torch.arange(6) * 7 % VOCAB]


def padded_batches(batch_size: int, side: str = "right") -> Iterator[dict[str, Tensor]]:
    """Every document as one window; its first token is context only."""
    for first in range(0, len(DOCUMENTS), batch_size):
        documents = DOCUMENTS[first : first + batch_size]
        labels = [torch.cat((torch.tensor([IGNORE_INDEX]), ids[1:])) for ids in documents]
        input_ids = nn.utils.rnn.pad_sequence(documents, True, 0, side)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in documents], True, 0, side)
        index = torch.arange(first, first + len(documents))
        yield {
            "input_ids": input_ids,
            "labels": nn.utils.rnn.pad_sequence(labels, True, IGNORE_INDEX, side),
            "attention_mask": mask,
            "document_index": index,
        }


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("num_loops", [None, 1, 5])
@pytest.mark.parametrize("logits_per_chunk", [1, 3 * VOCAB, 2**24])
def test_record_equals_cross_entropy_on_full_logits(
    tiny: TinyLM, batch_size: int, num_loops: int | None, logits_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_module, "_LOGITS_PER_CHUNK", logits_per_chunk)
    sizes = torch.tensor([20, 9, 12])
    got = record(tiny, padded_batches(batch_size), sizes, num_loops)
    start = 0
    for index, ids in enumerate(DOCUMENTS):
        output = tiny.model(ids[None], num_loops=num_loops)
        here = slice(start, start + len(ids) - 1)
        for loop, hidden in enumerate(output.loop_hidden_states):
            logits = tiny.lm_head(hidden[0, :-1])
            wanted = cross_entropy(logits, ids[1:], reduction="none")
            torch.testing.assert_close(got.cross_entropy[loop, here], wanted, rtol=1e-10, atol=1e-10)
            assert torch.equal(got.predictions[loop, here], logits.argmax(-1))
        torch.testing.assert_close(got.gate_logits[:, here], output.gate_logits[:, 0, :-1], rtol=1e-10, atol=1e-10)
        assert torch.equal(got.targets[here], ids[1:])
        assert got.document_ids[here].eq(index).all()
        assert got.sequence_ids[here].eq(index).all()
        start += len(ids) - 1
    assert got.num_tokens == start
    assert got.num_loops == (num_loops or 3)
    assert got.trained_loops == 3
    assert got.document_bytes is not None and torch.equal(got.document_bytes, sizes)


def test_the_side_of_the_padding_does_not_matter(tiny: TinyLM) -> None:
    sizes = torch.tensor([20, 9, 12])
    right, left = (record(tiny, padded_batches(3, side), sizes) for side in ("right", "left"))
    torch.testing.assert_close(left.cross_entropy, right.cross_entropy, rtol=1e-10, atol=1e-10)
    assert torch.equal(left.targets, right.targets)


def test_record_is_float32_under_autocast(tiny: TinyLM) -> None:
    tiny.model.float(), tiny.lm_head.float()
    exact = record(tiny, padded_batches(3), torch.ones(3, dtype=torch.long))
    with torch.autocast("cpu", torch.bfloat16):
        got = record(tiny, padded_batches(3), torch.ones(3, dtype=torch.long), changes=True)
    assert got.hidden_change is not None and got.prediction_kl is not None
    assert got.cross_entropy.dtype == got.gate_logits.dtype == torch.float32
    assert got.hidden_change.dtype == got.prediction_kl.dtype == torch.float32
    assert not torch.equal(got.cross_entropy, exact.cross_entropy)
    torch.testing.assert_close(got.cross_entropy, exact.cross_entropy, rtol=0.1, atol=0.1)


def test_no_gradient_is_kept_and_the_mode_of_the_model_stays(tiny: TinyLM) -> None:
    tiny.model.train()
    got = record(tiny, padded_batches(3), torch.ones(3, dtype=torch.long))
    assert not got.cross_entropy.requires_grad
    assert tiny.model.training


@pytest.mark.parametrize("batches", [[], [{**next(padded_batches(3)), "labels": torch.full((3, 9), IGNORE_INDEX)}]])
def test_nothing_to_predict_is_refused(tiny: TinyLM, batches: list[dict[str, Tensor]]) -> None:
    with pytest.raises(UserError, match="no token to predict"):
        record(tiny, batches, torch.ones(3, dtype=torch.long))


@pytest.mark.parametrize("logits_per_chunk", [1, 3 * VOCAB, 2**24])
@pytest.mark.parametrize("num_loops", [1, 2, 5])
def test_changes_equal_those_of_full_logits(
    tiny: TinyLM, num_loops: int, logits_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_module, "_LOGITS_PER_CHUNK", logits_per_chunk)
    sizes = torch.tensor([20, 9, 12])
    got = record(tiny, padded_batches(2), sizes, num_loops, changes=True)
    plain = record(tiny, padded_batches(2), sizes, num_loops)
    assert plain.hidden_change is plain.prediction_kl is None
    assert torch.equal(got.cross_entropy, plain.cross_entropy) and torch.equal(got.predictions, plain.predictions)
    assert got.hidden_change is not None and got.prediction_kl is not None
    assert got.hidden_change.shape == got.prediction_kl.shape == (num_loops - 1, got.num_tokens)
    start = 0
    for ids in DOCUMENTS:
        states = [hidden[0, :-1] for hidden in tiny.model(ids[None], num_loops=num_loops).loop_hidden_states]
        here = slice(start, start + len(ids) - 1)
        for i, (before, now) in enumerate(pairwise(states)):
            wanted = (now - before).square().sum(-1).sqrt()
            torch.testing.assert_close(got.hidden_change[i, here], wanted, rtol=1e-10, atol=1e-10)
            log_p, log_q = (tiny.lm_head(state).log_softmax(-1) for state in (before, now))
            # KL(p || q), p of the loop before.
            wanted = kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
            torch.testing.assert_close(got.prediction_kl[i, here], wanted, rtol=1e-10, atol=1e-10)
        start += len(ids) - 1
