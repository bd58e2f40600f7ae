"""Tokenised once: a directory of memory-mapped arrays with a manifest that says what they were made of.

    manifest.json             what is here: `Manifest`
    tokens-00000.bin, ...     token ids end to end, uint16 or uint32, little-endian
    predicted-00000.bin, ...  one byte a token, 1 where it is to be predicted; only where not everything is
    document_starts.bin       int64, where in the whole stream each document begins

A directory appears under its name in one rename, when it is whole: a kill leaves a `.partial` directory, which the
next attempt on the same machine removes.
"""

import glob
import hashlib
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from pydantic import Field, JsonValue, ValidationError

from looplm.data.decontamination import Decontamination
from looplm.data.encoding import EncodedDocument, predicted_or_all
from looplm.data.mapped import MappedArray
from looplm.data.packing import ContentDigest, TokenStream
from looplm.data.recipe import Format
from looplm.errors import UserError
from looplm.strict import Strict

FORMAT_VERSION = 1
SHARD_TOKENS = 2**27
"""Tokens a file, more or less: a quarter of a gigabyte in uint16. Documents are not cut at its end."""

VERIFIED_BYTES = 10**9
"""Shards up to this size are compared with their checksums whenever a run opens them: a second or two of reading."""

_MANIFEST = "manifest.json"
_STARTS = "document_starts.bin"


class Shard(Strict):
    """One pair of files."""

    num_tokens: int = Field(gt=0)
    num_documents: int = Field(gt=0)
    num_text_bytes: int = Field(ge=0)
    sha256: str
    """Of the file of tokens."""


class Origin(Strict):
    """What a directory was made of; one made of the same can stand in for it."""

    label: str
    """The source, as messages call it."""
    tokenizer: str
    """`tokenizer_hash` of the tokenizer."""
    source: dict[str, JsonValue]
    """What the documents depend on: recipe fields, and names, sizes and times of files."""


class Manifest(Strict):
    """What a directory of shards holds."""

    format_version: Literal[1] = FORMAT_VERSION
    origin: Origin
    format: Format
    """Decides how its documents are packed by default."""
    with_chat_template: bool
    """Whether they were rendered with the tokenizer's chat template, which is in its hash then."""
    vocab_size: int = Field(gt=0)
    dtype: Literal["uint16", "uint32"]
    shards: list[Shard] = Field(min_length=1)
    masked: bool
    """Whether there are `predicted` files."""
    content: str
    """`TokenStream.content`, by which a resumed run knows its data again, wherever they lie."""
    num_dropped: int = Field(default=0, ge=0)
    """Documents left out by decontamination."""
    dropped: list[str] = []
    """Where the first of them were."""

    @property
    def num_tokens(self) -> int:
        """Tokens in all."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        """Documents in all."""
        return sum(shard.num_documents for shard in self.shards)

    @property
    def num_text_bytes(self) -> int:
        """UTF-8 bytes of all texts."""
        return sum(shard.num_text_bytes for shard in self.shards)


class ShardWriter:
    """Appends documents to the files of a directory, one document in memory at a time."""

    def __init__(self, directory: Path, dtype: np.dtype, *, masked: bool, shard_tokens: int = SHARD_TOKENS) -> None:
        self.directory = directory
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.masked = masked
        self.shard_tokens = shard_tokens
        self.shards: list[Shard] = []
        self.digest = ContentDigest()
        self._num_tokens = 0
        self._num_in_shard = [0, 0, 0]  # tokens, documents, bytes of text
        self._shard_digest = hashlib.sha256()
        self._files: list[BinaryIO] = []
        self._starts = (directory / _STARTS).open("wb")

    def add(self, document: EncodedDocument) -> None:
        """Append one document."""
        if not self._files:
            number = len(self.shards)
            self._files = [(self.directory / f"tokens-{number:05d}.bin").open("wb")]
            if self.masked:
                self._files.append((self.directory / f"predicted-{number:05d}.bin").open("wb"))
        start = np.array([self._num_tokens], dtype="<i8").tobytes()
        ids = document.ids.astype(self.dtype).tobytes()
        self._starts.write(start)
        self._files[0].write(ids)
        self.digest.document_starts.update(start)
        self.digest.ids.update(ids)
        self._shard_digest.update(ids)
        if self.masked:
            predicted = predicted_or_all(document).tobytes()
            self._files[1].write(predicted)
            self.digest.predicted.update(predicted)
        self._num_tokens += len(document.ids)
        for place, count in enumerate((len(document.ids), 1, document.num_bytes)):
            self._num_in_shard[place] += count
        if self._num_in_shard[0] >= self.shard_tokens:
            self._end_shard()

    def finish(self) -> None:
        """Complete the last shard; everything is on the disk afterwards."""
        if self._files:
            self._end_shard()
        _flush(self._starts)

    def abandon(self) -> None:
        """Close the files, whatever state they are in."""
        for file in [*self._files, self._starts]:
            try:
                file.close()
            except OSError:  # what could not be written is being thrown away
                continue

    def _end_shard(self) -> None:
        for file in self._files:
            _flush(file)
            file.close()
        num_tokens, num_documents, num_text_bytes = self._num_in_shard
        self.shards.append(
            Shard(
                num_tokens=num_tokens,
                num_documents=num_documents,
                num_text_bytes=num_text_bytes,
                sha256=self._shard_digest.hexdigest(),
            )
        )
        self._files, self._num_in_shard, self._shard_digest = [], [0, 0, 0], hashlib.sha256()


def write_shards(
    documents: Iterable[EncodedDocument],
    directory: Path,
    *,
    origin: Origin,
    format: Format,
    with_chat_template: bool,
    vocab_size: int,
    masked: bool,
    decontamination: Decontamination | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> Manifest:
    """Write a directory of shards, whole or not at all.

    Args:
        documents: in their order; read once.
        directory: where it will be; if something is there when the writing is done, that stays and is not replaced.
        origin: what the documents were made of.
        format: of the source.
        with_chat_template: whether its documents were rendered with the tokenizer's.
        vocab_size: of the tokenizer.
        masked: whether documents have a `predicted` of their own.
        decontamination: what left documents out on the way; its count, once all are read, goes into the manifest.
        shard_tokens: tokens a file, at least; its last document goes in whole.

    Raises:
        UserError: there are no documents, or the directory cannot be written (no rights, disk full).
    """
    partial = _new_partial(directory)
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    try:
        writer = ShardWriter(partial, dtype, masked=masked, shard_tokens=shard_tokens)
        try:
            for document in documents:
                writer.add(document)
            writer.finish()
        finally:
            writer.abandon()
        if not writer.shards:
            raise UserError(f"{origin.label}: there is no text to train on: every document is empty or left out.")
        manifest = Manifest(
            origin=origin,
            format=format,
            with_chat_template=with_chat_template,
            vocab_size=vocab_size,
            dtype="uint16" if vocab_size <= 2**16 else "uint32",
            shards=writer.shards,
            masked=masked,
            content=writer.digest.hexdigest(),
            num_dropped=decontamination.num_dropped if decontamination else 0,
            dropped=list(decontamination.dropped) if decontamination else [],
        )
        with (partial / _MANIFEST).open("wb") as file:
            file.write(manifest.model_dump_json(indent=2).encode())
            _flush(file)
        _publish(partial, directory)
    except OSError as error:
        raise UserError(
            f"The tokens of {origin.label} could not be written to {directory}: {error.strerror}. Nothing of them was "
            "kept. Free some space, or choose another place."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a directory, its files checked to be there in full.

    Raises:
        UserError: there is no such directory, or it is damaged, or of another version of this package.
    """
    path = directory / _MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Give a directory of tokenised shards.") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(
            f"{path} is damaged: {where}: {first['msg']}. Delete {directory} and tokenise again."
        ) from error
    itemsize = np.dtype(manifest.dtype).itemsize
    sizes = {_STARTS: 8 * manifest.num_documents}
    for number, shard in enumerate(manifest.shards):
        sizes[f"tokens-{number:05d}.bin"] = itemsize * shard.num_tokens
        if manifest.masked:
            sizes[f"predicted-{number:05d}.bin"] = shard.num_tokens
    for name, size in sizes.items():
        try:
            found = (directory / name).stat().st_size
        except OSError as error:
            raise UserError(
                f"{directory / name} cannot be read: {error.strerror}. Delete {directory} and tokenise again."
            ) from error
        if found != size:
            raise UserError(
                f"{directory / name} is damaged: {found} bytes where the manifest says {size}. "
                f"Delete {directory} and tokenise again."
            )
    return manifest


def open_shards(directory: Path) -> tuple[Manifest, TokenStream]:
    """The manifest, and the tokens mapped into memory.

    Raises:
        UserError: as `read_manifest` does.
    """
    manifest = read_manifest(directory)
    numbers = range(len(manifest.shards))
    tokens = [directory / f"tokens-{number:05d}.bin" for number in numbers]
    predicted = [directory / f"predicted-{number:05d}.bin" for number in numbers]
    stream = TokenStream(
        ids=MappedArray(tokens, np.dtype(manifest.dtype), limit=manifest.vocab_size),
        document_starts=np.memmap(directory / _STARTS, dtype="<i8", mode="r"),
        num_text_bytes=manifest.num_text_bytes,
        predicted=MappedArray(predicted, np.dtype(np.uint8), limit=2) if manifest.masked else None,
        stored_content=manifest.content,
    )
    return manifest, stream


def verify_shards(directory: Path) -> Manifest:
    """Read everything and compare with the checksums: for shards that were copied from elsewhere.

    Raises:
        UserError: a file differs from what was written, or as `read_manifest`.
    """
    manifest = read_manifest(directory)
    digest = ContentDigest()
    for number, shard in enumerate(manifest.shards):
        path = directory / f"tokens-{number:05d}.bin"
        own = hashlib.sha256()
        for piece in _pieces(path):
            own.update(piece)
            digest.ids.update(piece)
        if own.hexdigest() != shard.sha256:
            raise UserError(f"{path} is damaged: its checksum is not the manifest's. {_remedy(directory)}")
        if manifest.masked:
            for piece in _pieces(directory / f"predicted-{number:05d}.bin"):
                digest.predicted.update(piece)
    for piece in _pieces(directory / _STARTS):
        digest.document_starts.update(piece)
    if digest.hexdigest() != manifest.content:
        raise UserError(
            f"{directory} is damaged: its document starts or what is to be predicted do not have the manifest's "
            "checksum. "
            f"{_remedy(directory)}"
        )
    return manifest


def check_shards(directory: Path) -> Manifest:
    """`verify_shards` where that is quick (up to `VERIFIED_BYTES`), `read_manifest` else.

    Raises:
        UserError: as they do.
    """
    manifest = read_manifest(directory)
    if np.dtype(manifest.dtype).itemsize * manifest.num_tokens > VERIFIED_BYTES:
        return manifest
    return verify_shards(directory)


def _remedy(directory: Path) -> str:
    return (
        f"Delete {directory}; its text is tokenised anew when the run is started or resumed. If the shards were made "
        "elsewhere, copy them again."
    )


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(2**20):
            yield piece


def _new_partial(directory: Path) -> Path:
    """A directory of this process to write into, after removing those of processes that were killed."""
    prefix = f".{directory.name}.{socket.gethostname()}."
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        for leftover in directory.parent.glob(f"{glob.escape(prefix)}*.partial"):
            pid = leftover.name.removeprefix(prefix).removesuffix(".partial")
            if pid == str(os.getpid()) or (pid.isdigit() and not _is_alive(int(pid))):
                shutil.rmtree(leftover, ignore_errors=True)
        partial = directory.parent / f"{prefix}{os.getpid()}.partial"
        partial.mkdir()
    except OSError as error:
        raise UserError(
            f"{directory.parent} cannot be written: {error.strerror}. Tokens are kept there; choose another place."
        ) from error
    return partial


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, as another user
        return True
    return True


def _publish(partial: Path, directory: Path) -> None:
    """Rename, unless another process was faster: what it wrote was made of the same."""
    try:
        partial.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
