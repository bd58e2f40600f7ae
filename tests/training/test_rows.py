"""Rows as the trainer takes them: the stream's own, with a worker or without, resumable in any split among ranks."""

import json
import os

import pytest
import torch
from torch import Tensor

from looplm.errors import UserError

from .runs import tiny_rows


def taken(rows, *counts: int) -> Tensor:
    return torch.cat([rows.take(count)["input_ids"] for count in counts])


def test_a_take_is_the_stream_s_next_rows() -> None:
    rows, stream = tiny_rows(), iter(tiny_rows().stream)
    for count in (3, 1, 4):
        batch = rows.take(count)
        expected = [next(stream) for _ in range(count)]
        assert batch.keys() == {"input_ids", "labels", "document_ids"}
        for name, value in batch.items():
            assert value.shape == (count, 12) and value.dtype == torch.int64
            assert torch.equal(value, torch.stack([row[name] for row in expected]))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_it_resumes_where_it_was_taken_to_not_where_it_was_read_to(num_workers: int) -> None:
    """A worker reads ahead. The state passes through JSON, as in a checkpoint."""
    straight = taken(tiny_rows(), 5, 6)
    rows = tiny_rows(num_workers=num_workers)
    first = taken(rows, 5)
    state = json.loads(json.dumps(rows.state_dict()))
    assert state["position"] == 5
    rest = tiny_rows(num_workers=num_workers)
    rest.load_state_dict(state)
    assert rest.state_dict() == state
    assert torch.equal(torch.cat([first, taken(rest, 6)]), straight)
    assert rest.state_dict()["position"] == 11
    rest.load_state_dict(state)
    assert torch.equal(taken(rest, 6), straight[5:]), "taken back while a worker was reading"


def test_ranks_share_the_rows_of_one_and_either_continues_the_other() -> None:
    straight = taken(tiny_rows(), 12)
    ranks = [tiny_rows(rank=rank, world_size=2) for rank in range(2)]
    shares = [taken(rows, 3) for rows in ranks]
    assert torch.equal(torch.stack(shares, 1).flatten(0, 1), straight[:6])
    assert ranks[0].state_dict() == ranks[1].state_dict()
    alone = tiny_rows()
    alone.load_state_dict(ranks[1].state_dict())
    assert torch.equal(taken(alone, 2), straight[6:8])
    for rank, rows in enumerate(ranks):
        rows.load_state_dict(alone.state_dict())
        assert torch.equal(taken(rows, 2), straight[8 + rank :: 2])


def test_other_data_is_refused() -> None:
    with pytest.raises(UserError, match="seq_len was 12 and is 8"):
        tiny_rows(seq_len=8).load_state_dict(tiny_rows().state_dict())


def test_a_worker_is_out_of_reach_of_the_terminal() -> None:
    rows = tiny_rows(num_workers=1)
    rows.take(1)
    assert rows._rows is not None
    (worker,) = rows._rows._workers
    assert os.getsid(worker.pid) == worker.pid
