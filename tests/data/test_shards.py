"""Shards: the same rows as in memory, whole or not there at all, and damage is named."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from looplm.data import shards
from looplm.data.encoding import EncodedDocument, in_memory
from looplm.data.mapped import MappedArray
from looplm.data.packing import RingPacking, TokenStream
from looplm.data.shards import Origin, check_shards, open_shards, read_manifest, verify_shards, write_shards
from looplm.data.whole_packing import WholePacking
from looplm.errors import UserError

ORIGIN = Origin(label="files a.jsonl", tokenizer="abc", source={"files": [["a.jsonl", 3, 7]]})


def documents(masked: bool, dtype=np.uint16) -> list[EncodedDocument]:
    generator = np.random.default_rng(0)
    made = []
    for length in generator.integers(2, 60, size=50):
        predicted = generator.random(length) < 0.5 if masked else None
        if predicted is not None:
            predicted[-1] = True
        made.append(EncodedDocument(generator.integers(0, 500, size=length).astype(dtype), predicted, int(length)))
    return made


def write(directory: Path, masked: bool = False, vocab_size: int = 500, shard_tokens: int = 200):
    return write_shards(
        iter(documents(masked)),
        directory,
        origin=ORIGIN,
        format="text",
        with_chat_template=False,
        vocab_size=vocab_size,
        masked=masked,
        shard_tokens=shard_tokens,
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("vocab_size", [500, 2**16, 2**16 + 1])
@pytest.mark.parametrize(
    "pack", [lambda s: RingPacking(s, 37), lambda s: WholePacking(s, 37, 0)], ids=["ring", "whole"]
)
def test_mapped_rows_are_the_rows_in_memory(tmp_path, masked, vocab_size, pack):
    manifest = write(tmp_path / "tokens", masked, vocab_size)
    assert len(manifest.shards) > 5
    manifest, mapped = open_shards(tmp_path / "tokens")
    memory = in_memory(documents(masked), np.uint16 if vocab_size <= 2**16 else np.uint32)
    assert mapped.ids.dtype == (np.uint16 if vocab_size <= 2**16 else np.uint32)
    assert (mapped.num_tokens, mapped.num_text_bytes) == (memory.num_tokens, memory.num_text_bytes)
    assert np.array_equal(mapped.document_starts, memory.document_starts)
    one, other = pack(mapped), pack(memory)
    assert one.num_rows == other.num_rows
    for key in [(0, 0), (3, 1)]:
        row, expected = one.epoch(key), other.epoch(key)
        for position in range(one.num_rows):
            assert all(torch.equal(row(position)[name], expected(position)[name]) for name in expected(position))


@pytest.mark.parametrize("masked", [False, True])
def test_the_digest_is_of_the_content_wherever_it_lies(tmp_path, masked):
    contents = {write(tmp_path / f"{n}", masked, shard_tokens=n).content for n in (1, 200, 10**9)}
    stream = in_memory(documents(masked), np.uint16)
    assert contents == {stream.content}
    changed = TokenStream(stream.ids.copy(), stream.document_starts, 1, stream.predicted)
    changed.ids[-1] ^= 1  # type: ignore[index]
    assert changed.content != stream.content


def test_the_digest_sees_the_mask_and_the_documents():
    ids, starts = np.arange(10, dtype=np.uint16), np.array([0, 4])
    mask = np.ones(10, dtype=np.uint8)
    streams = [TokenStream(ids, starts, 1), TokenStream(ids, np.array([0, 5]), 1), TokenStream(ids, starts, 1, mask)]
    assert len({stream.content for stream in streams}) == 3


def test_a_mapped_array_indexes_across_files_and_pickles_by_name(tmp_path):
    whole = np.random.default_rng(0).integers(0, 2**32, size=100, dtype=np.uint32)
    paths = [tmp_path / f"{n}" for n in range(3)]
    for path, part in zip(paths, np.split(whole, [30, 31]), strict=True):
        part.tofile(path)
    mapped = MappedArray(paths, np.dtype(np.uint32))
    index = np.random.default_rng(1).integers(0, 100, size=(7, 40))
    assert len(mapped) == 100
    assert np.array_equal(mapped[index], whole[index]) and np.array_equal(mapped[np.array([30])], whole[30:31])
    data = pickle.dumps(mapped)
    assert len(data) < 1000
    assert np.array_equal(np.asarray(pickle.loads(data)), whole)


def test_the_manifest_counts(tmp_path):
    write(tmp_path / "tokens")
    manifest = read_manifest(tmp_path / "tokens")
    assert manifest.num_documents == 50 and manifest.num_tokens == sum(len(d.ids) for d in documents(False))
    assert manifest.origin == ORIGIN and manifest.format == "text" and not manifest.masked
    assert verify_shards(tmp_path / "tokens") == manifest


def test_no_documents_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="no text to train on"):
        write_shards(
            [], tmp_path / "tokens", origin=ORIGIN, format="text", with_chat_template=False, vocab_size=9, masked=False
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("full_at", [1, 3, 8])
def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, monkeypatch, full_at):
    calls = 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == full_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shards.os, "fsync", fsync)
    with pytest.raises(UserError, match="could not be written to .*tokens: No space left on device"):
        write(tmp_path / "tokens")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write(tmp_path / "file" / "tokens")


def test_an_error_in_the_documents_leaves_nothing(tmp_path):
    def broken():
        yield from documents(False)
        raise UserError("line 51")

    with pytest.raises(UserError, match="line 51"):
        write_shards(
            broken(),
            tmp_path / "tokens",
            origin=ORIGIN,
            format="text",
            with_chat_template=False,
            vocab_size=500,
            masked=False,
        )
    assert list(tmp_path.iterdir()) == []


def test_a_kill_while_writing_leaves_nothing_that_counts(tmp_path):
    program = (
        "import os, signal, sys, numpy as np\n"
        "from pathlib import Path\n"
        "from looplm.data.encoding import EncodedDocument\n"
        "from looplm.data.shards import Origin, write_shards\n"
        "def documents():\n"
        "    for n in range(100):\n"
        "        if n == 60: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        yield EncodedDocument(np.arange(50, dtype=np.uint16), None, 50)\n"
        "write_shards(documents(), Path(sys.argv[1]), origin=Origin(label='x', tokenizer='y', source={}),\n"
        "             format='text', with_chat_template=False, vocab_size=500, masked=False, shard_tokens=500)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "tokens")], check=False)
    assert done.returncode == -signal.SIGKILL
    [leftover] = tmp_path.iterdir()
    assert leftover.name.endswith(".partial") and len(list(leftover.iterdir())) > 3
    write(tmp_path / "tokens")
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


def test_what_another_process_wrote_meanwhile_stays(tmp_path):
    def slow():
        yield from documents(False)
        write(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").rename(tmp_path / "tokens")

    write_shards(
        slow(),
        tmp_path / "tokens",
        origin=ORIGIN,
        format="text",
        with_chat_template=False,
        vocab_size=500,
        masked=False,
    )
    assert len(read_manifest(tmp_path / "tokens").shards) > 5  # not the one shard of the slow one
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: (d / "manifest.json").unlink(), "manifest.json cannot be read: No such file"),
        (lambda d: (d / "manifest.json").write_text("{"), "manifest.json is damaged: the file: Invalid JSON"),
        (lambda d: (d / "manifest.json").write_bytes(b"\xff"), "manifest.json is damaged"),
        (lambda d: edit(d, "format_version", 2), "manifest.json is damaged: format_version: Input should be 1"),
        (lambda d: edit(d, "shards", []), "manifest.json is damaged: shards"),
        (lambda d: (d / "tokens-00001.bin").unlink(), "tokens-00001.bin cannot be read"),
        (lambda d: (d / "tokens-00001.bin").write_bytes(b"12"), "tokens-00001.bin is damaged: 2 bytes where"),
        (lambda d: (d / "predicted-00000.bin").write_bytes(b""), "predicted-00000.bin is damaged"),
        (lambda d: (d / "document_starts.bin").write_bytes(b"1234"), "document_starts.bin is damaged"),
    ],
)
def test_damage_is_named(tmp_path, damage, said):
    write(tmp_path / "tokens", masked=True)
    damage(tmp_path / "tokens")
    with pytest.raises(UserError) as caught:
        open_shards(tmp_path / "tokens")
    assert said in str(caught.value)


def edit(directory: Path, key: str, value: object) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps({**manifest, key: value}))


def test_a_flipped_bit_is_found_by_verifying(tmp_path):
    write(tmp_path / "tokens")
    path = tmp_path / "tokens" / "tokens-00002.bin"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="tokens-00002.bin is damaged: its checksum"):
        verify_shards(tmp_path / "tokens")


def flip(path: Path, at: int, bits: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bits
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["tokens-00001.bin", "predicted-00000.bin", "document_starts.bin"])
def test_small_shards_are_verified_whole_and_large_ones_are_not_read(tmp_path, monkeypatch, name):
    write(tmp_path / "tokens", masked=True)
    check_shards(tmp_path / "tokens")
    flip(tmp_path / "tokens" / name, 8, 1)
    with pytest.raises(UserError, match=f"is damaged: .*checksum.* Delete {tmp_path / 'tokens'}; its text is"):
        check_shards(tmp_path / "tokens")
    monkeypatch.setattr(shards, "VERIFIED_BYTES", 10)
    check_shards(tmp_path / "tokens")


def test_a_token_beyond_the_vocabulary_names_the_directory(tmp_path):
    write(tmp_path / "tokens")
    flip(tmp_path / "tokens" / "tokens-00000.bin", 1, 0xF0)  # the high byte of the first
    for stream in (opened := open_shards(tmp_path / "tokens")[1], pickle.loads(pickle.dumps(opened))):
        assert len(stream.ids[np.arange(1, 5)]) == 4
        with pytest.raises(UserError, match=f"The tokens in {tmp_path / 'tokens'} are damaged: .* Delete "):
            stream.ids[np.arange(5)]
