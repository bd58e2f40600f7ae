"""The global order of rows: independent of ranks and workers, continued exactly wherever it was left."""

import copy
import itertools
import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from looplm.data import rows
from looplm.data.corpus import open_rows, prepare
from looplm.data.packing import IGNORE_INDEX, RingPacking, TokenStream
from looplm.data.recipe import DataRecipe
from looplm.data.rows import RowStream, StoredSource
from looplm.errors import UserError

# torchdata 0.11 calls a function that torch 2.13 deprecates; Python 3.12 warns of every fork beside a thread.
LOADER_WARNINGS = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated:UserWarning",
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning",
)

GENERATORS = """
def numbers(step):
    n = 0
    while True:
        n += step
        yield f"count {n} and on " * (n % 11 + 1)
def verses():
    for n in range(23): yield f"verse {n} " * (n % 5 + 1)
"""


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def take(rows, n: int) -> list[dict[str, torch.Tensor]]:
    return [{key: value.clone() for key, value in row.items()} for row in itertools.islice(rows, n)]


def numbered_stream(num_tokens: int, first: int = 0) -> TokenStream:
    ids = np.arange(first, first + num_tokens, dtype=np.uint16)
    return TokenStream(ids, np.array([0, num_tokens // 3]), num_text_bytes=1)


@pytest.fixture
def open_mixture(tmp_path, write_jsonl, small_tokenizer, monkeypatch):
    """Opens a mixture of everything: stored text and conversations, hub and generator streams in small blocks."""
    write_jsonl("text.jsonl", [{"text": f"document number {n} says this. " * (n % 7 + 1)} for n in range(40)])
    chats = [
        [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a " * (n % 9)}] for n in range(30)
    ]
    write_jsonl("chat.jsonl", [{"messages": chat} for chat in chats])
    write_jsonl("hub.jsonl", [{"text": f"from the hub, record {n}. " * (n % 5 + 1)} for n in range(90)])
    name = f"my_rows_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(GENERATORS)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = DataRecipe.model_validate(
        {
            "sources": [
                {"kind": "files", "paths": [str(tmp_path / "text.jsonl")], "weight": 5},
                {"kind": "files", "paths": [str(tmp_path / "chat.jsonl")], "format": "chat", "weight": 2},
                {
                    "kind": "hub",
                    "name": "json",
                    "data_files": str(tmp_path / "hub.jsonl"),
                    "streaming": True,
                    "weight": 3,
                },
                {"kind": "generator", "function": f"{name}:numbers", "arguments": {"step": 3}, "weight": 1},
                {"kind": "generator", "function": f"{name}:verses", "weight": 1},
            ],
            "stream_block_tokens": 700,
        }
    )

    def open_it(rank: int = 0, world_size: int = 1, seq_len: int = 48, **changes) -> RowStream:
        changed = recipe.model_copy(update=changes)
        prepare(changed, small_tokenizer, tmp_path / "cache")
        return open_rows(
            changed,
            small_tokenizer,
            seq_len=seq_len,
            seed=7,
            cache_dir=tmp_path / "cache",
            rank=rank,
            world_size=world_size,
        )

    return open_it


def test_resumed_is_uninterrupted_at_every_kind_of_place(open_mixture):
    """At random rows of several epochs of every source: inside blocks, at their ends, between epochs."""
    expected = take(open_mixture(), 420)
    assert {row["input_ids"].shape for row in expected} == {(48,)}
    stops = sorted(random.Random(0).sample(range(1, 400), 12))
    stream = open_mixture()
    done = 0
    for stop in [0, *stops]:
        for row in expected[done:stop]:
            assert same(next(stream), row)
        done = stop
        state = pickle.loads(pickle.dumps(stream.state_dict()))
        assert len(pickle.dumps(state)) < 4000
        stream = open_mixture()
        take(stream, stop % 5)  # whatever was drawn before loading is forgotten
        stream.load_state_dict(state)
        assert stream.state_dict() == state and stream.position == stop
    assert all(map(same, take(stream, 15), expected[done:]))


def test_a_state_does_not_move_on_with_the_stream(open_mixture):
    stream = open_mixture()
    take(stream, 5)
    state = stream.state_dict()
    kept = copy.deepcopy(state)
    take(stream, 90)
    assert state == kept


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_are_one_process(open_mixture, world_size):
    expected = take(open_mixture(), 120)
    per_rank = [take(open_mixture(rank, world_size), 120 // world_size) for rank in range(world_size)]
    assert all(same(per_rank[n % world_size][n // world_size], row) for n, row in enumerate(expected))


def test_two_ranks_then_one_then_two(open_mixture):
    expected = take(open_mixture(), 110)
    two = [open_mixture(rank, 2) for rank in range(2)]
    drawn = [take(stream, 17) for stream in two]
    states = [stream.state_dict() for stream in two]
    assert states[0] == states[1] and states[0]["position"] == 34
    one = open_mixture()
    one.load_state_dict(states[0])
    middle = take(one, 26)
    two = [open_mixture(rank, 2) for rank in range(2)]
    for stream in two:
        stream.load_state_dict(one.state_dict())
    last = [take(stream, 25) for stream in two]
    together = [row for pair in zip(*drawn, strict=True) for row in pair] + middle
    together += [row for pair in zip(*last, strict=True) for row in pair]
    assert len(together) == 110 and all(map(same, together, expected))


def test_sources_keep_their_shares_at_every_prefix(open_mixture):
    stream = open_mixture()
    weights = dict(zip(stream.rows_per_source(), [5, 2, 3, 1, 1], strict=True))
    for n in range(1, 150):
        next(stream)
        assert all(abs(count - weights[label] / 12 * n) < 1 for label, count in stream.rows_per_source().items())


@LOADER_WARNINGS
@pytest.mark.parametrize("num_workers", [0, 1])
def test_inside_a_stateful_data_loader(open_mixture, num_workers):
    """The loader's state is that of the rows it handed out, however far its worker has read ahead."""
    expected = take(open_mixture(), 130)
    loader = StatefulDataLoader(open_mixture(), batch_size=None, num_workers=num_workers)
    drawn = iter(loader)
    for n in range(57):
        assert same(next(drawn), expected[n])
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    del drawn
    loader = StatefulDataLoader(open_mixture(), batch_size=None, num_workers=num_workers)
    loader.load_state_dict(state)
    drawn = iter(loader)
    for n in range(57, 130):
        assert same(next(drawn), expected[n])


@pytest.mark.slow
@LOADER_WARNINGS
def test_a_spawned_worker_opens_the_files_itself(open_mixture):
    expected = take(open_mixture(), 6)
    loader = StatefulDataLoader(open_mixture(), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert all(map(same, take(loader, 6), expected))


def test_two_workers_are_refused(monkeypatch):
    """Called as in a worker: a loader whose workers fail at their start takes ten seconds to give up."""
    stream = RowStream.of_tokens(numbered_stream(50), seq_len=8, seed=0)
    for num_workers in (1, 2):
        monkeypatch.setattr(rows, "get_worker_info", lambda n=num_workers: SimpleNamespace(num_workers=n))
        if num_workers == 1:
            assert iter(stream) is stream
    with pytest.raises(UserError, match="num_workers 0 or 1"):
        iter(stream)


def test_a_pickled_stream_goes_on(open_mixture):
    stream = open_mixture()
    take(stream, 33)
    other = pickle.loads(pickle.dumps(stream))
    assert all(map(same, take(other, 60), take(stream, 60)))


def test_an_epoch_predicts_every_token_once_but_the_starts():
    stream = RowStream.of_tokens(numbered_stream(100), seq_len=9, seed=3)
    assert stream.rows_per_epoch == 13 and stream.tokens_per_epoch == 13 * 9
    for _ in range(3):
        labels = torch.cat([row["labels"] for row in take(stream, 13)])
        assert sorted(labels[labels != IGNORE_INDEX].tolist()) == sorted(set(range(100)) - {0, 33})


def two_sources(weights, sizes=(100, 40)) -> RowStream:
    packings = [RingPacking(numbered_stream(size, first), 9) for size, first in zip(sizes, (0, 1000), strict=True)]
    sources = [StoredSource(f"s{n}", packing, key=(0, n)) for n, packing in enumerate(packings)]
    return RowStream(sources, weights, seq_len=9, seed=0)


def test_without_weights_an_epoch_is_one_of_every_source():
    stream = two_sources(None)
    assert stream.rows_per_epoch == 13 + 5
    for _ in range(4):
        labels = torch.cat([row["labels"] for row in take(stream, 18)])
        expected = {*range(100), *range(1000, 1040)} - {0, 33, 1000, 1013}
        assert sorted(labels[labels != IGNORE_INDEX].tolist()) == sorted(expected)


@pytest.mark.parametrize(("weights", "rows"), [((0.5, 0.5), 26), ((13, 5), 18), ((1, 9), 130), ((99, 1), 500)])
def test_with_weights_an_epoch_ends_when_every_source_was_read(weights, rows):
    stream = two_sources(weights)
    assert stream.rows_per_epoch == rows
    seen = torch.cat([row["labels"] for row in take(stream, rows + 1)])
    assert {*range(100), *range(1000, 1040)} - {0, 33, 1000, 1013} <= set(seen.tolist())


def test_a_stream_has_no_epoch(open_mixture):
    assert open_mixture().rows_per_epoch is None and open_mixture().tokens_per_epoch is None


def test_other_data_say_what_differs(open_mixture):
    state = open_mixture().state_dict()
    with pytest.raises(UserError, match="seq_len was 48 and is 32"):
        open_mixture(seq_len=32).load_state_dict(state)
    with pytest.raises(UserError, match="source 2: stream_block_tokens was 700 and is 800"):
        open_mixture(stream_block_tokens=800).load_state_dict(state)
    with pytest.raises(UserError, match="source 0: packing was RingPacking and is WholePacking"):
        open_mixture(packing="whole").load_state_dict(state)
    state = two_sources((1, 1)).state_dict()
    with pytest.raises(UserError, match=r"source 0: weight was 0.5 and is 0.75, source 1: weight was 0.5 and is 0.25"):
        two_sources((3, 1)).load_state_dict(state)
    with pytest.raises(
        UserError, match=r"source 1: num_tokens was 40 and is 41, source 1: content was \w+ and is \w+\."
    ):
        two_sources((1, 1), sizes=(100, 41)).load_state_dict(state)
    with pytest.raises(UserError, match="source 1: num_tokens was 40 and is absent"):
        RowStream.of_tokens(numbered_stream(100), seq_len=9, seed=0).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"seed": -1}, "seed = -1"),
        ({"rank": 2, "world_size": 2}, "rank = 2"),
        ({"rank": -1}, "rank = -1"),
        ({"seq_len": 1}, "seq_len = 1"),
    ],
)
def test_impossible_arguments(arguments, said):
    with pytest.raises(UserError, match=said):
        RowStream.of_tokens(numbered_stream(50), **{"seq_len": 8, "seed": 0, **arguments})
