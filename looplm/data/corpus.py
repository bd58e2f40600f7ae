"""From the data section of a recipe to rows: tokenise what is to be stored, open it, mix it; and the held-out part."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from looplm.data.cache import (
    Say,
    cached_at,
    find_tokens,
    log,
    new_decontamination,
    origin_of,
    record_format,
    records_of,
    tokenize_source,
)
from looplm.data.decontamination import Decontamination
from looplm.data.documents import Document
from looplm.data.encoding import Encoder, is_chat, wanted
from looplm.data.packing import Packing, RingPacking, TokenStream
from looplm.data.recipe import (
    DataRecipe,
    FilesSource,
    Format,
    GeneratorSource,
    HubSource,
    ShardsSource,
    SourceRecipe,
    is_streamed,
    source_label,
)
from looplm.data.rows import RowSource, RowStream, StoredSource
from looplm.data.shards import Manifest, open_shards, read_manifest
from looplm.data.sources import GeneratorRecords, HubRecords, expand_paths
from looplm.data.streaming import StreamedSource
from looplm.data.tokenizer import boundary_token_ids, require_vocabulary, tokenizer_hash
from looplm.data.whole_packing import WholePacking
from looplm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


LEAST_BYTES = 100
"""What a document takes in memory beside its text, about."""


def prepare(
    recipe: DataRecipe,
    tokenizer: "PreTrainedTokenizerBase",
    cache_dir: Path,
    *,
    vocab_size: int | None = None,
    say: Say = log,
) -> list[Manifest]:
    """Tokenise every source that is to be stored and is not yet; call it on rank 0, then let the others open.

    Args:
        recipe: the data section.
        tokenizer: of the model; a fast one.
        cache_dir: tokens are kept there, a directory for each source, and found again by the next run.
        vocab_size: of the model, if the tokenizer is to be checked against it.
        say: is told what is tokenised, and why anew.

    Returns:
        The manifests of the stored sources, in their order; they count tokens, documents and what was dropped.

    Raises:
        UserError: the data cannot be read or the tokens not written.
    """
    if vocab_size is not None:
        require_vocabulary(tokenizer, vocab_size)
    manifests = []
    for source in recipe.sources:
        if is_streamed(source):
            continue
        if isinstance(source, ShardsSource):
            directory = find_tokens(source, tokenizer, recipe.decontaminate, cache_dir)
        else:
            directory = tokenize_source(source, tokenizer, recipe.decontaminate, cache_dir, say)
        manifests.append(read_manifest(directory))
    return manifests


def open_rows(
    recipe: DataRecipe,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    seq_len: int,
    seed: int,
    cache_dir: Path,
    rank: int = 0,
    world_size: int = 1,
    vocab_size: int | None = None,
    say: Say = log,
) -> RowStream:
    """The rows of this rank. A single process tokenises what is missing; several need `prepare` on rank 0 before.

    Args:
        recipe: the data section.
        tokenizer: of the model; a fast one.
        seq_len: S, tokens a row.
        seed: of the order of rows.
        cache_dir: as for `prepare`.
        rank: of this process.
        world_size: number of processes.
        vocab_size: of the model, if the tokenizer is to be checked against it.
        say: as for `prepare`.

    Raises:
        UserError: the data cannot be read, the tokens not written or not found, or an argument is out of range.
    """
    if vocab_size is not None:
        require_vocabulary(tokenizer, vocab_size)
    if world_size == 1:
        prepare(recipe, tokenizer, cache_dir, say=say)
    sources: list[RowSource] = []
    for number, source in enumerate(recipe.sources):
        if is_streamed(source):
            assert isinstance(source, HubSource | GeneratorSource)
            sources.append(_open_stream(source, recipe, tokenizer, seq_len, (seed, number)))
        else:
            manifest, stream = open_shards(find_tokens(source, tokenizer, recipe.decontaminate, cache_dir))
            packing = _pack(stream, recipe, manifest.format, tokenizer, seq_len)
            sources.append(StoredSource(source_label(source), packing, key=(seed, number)))
    weights = [source.weight for source in recipe.sources if source.weight is not None]
    return RowStream(sources, weights or None, seq_len=seq_len, seed=seed, rank=rank, world_size=world_size)


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """What is known of a source without tokenising it."""

    label: str
    weight: float | None
    """Share of the rows as the recipe gives it."""
    num_tokens: int | None
    """If it is tokenised already."""
    num_bytes: int | None
    """Of its text if it is tokenised already, else of its files; None where that is not known."""
    rows_per_epoch: int | None
    """If it is tokenised already."""


def describe(
    recipe: DataRecipe, tokenizer: "PreTrainedTokenizerBase", *, seq_len: int, cache_dir: Path
) -> list[SourceSummary]:
    """What a plan can say of each source: nothing is tokenised, downloaded or written.

    Raises:
        UserError: files are missing, or shards do not fit the tokenizer.
    """
    summaries = []
    for source in recipe.sources:
        manifest = None
        num_bytes = None
        if isinstance(source, ShardsSource):
            directory = find_tokens(source, tokenizer, recipe.decontaminate, cache_dir)
        elif isinstance(source, HubSource) or is_streamed(source):
            directory = None  # to know what a hub data set is made of, it would have to be loaded
        else:
            directory = cached_at(origin_of(source, tokenizer, recipe.decontaminate), cache_dir)
        num_rows = None
        if directory is not None and directory.exists():
            manifest, stream = open_shards(directory)
            num_bytes = manifest.num_text_bytes
            num_rows = _pack(stream, recipe, manifest.format, tokenizer, seq_len).num_rows
        elif isinstance(source, FilesSource):
            num_bytes = sum(path.stat().st_size for path in expand_paths(source.paths))
        summaries.append(
            SourceSummary(
                label=source_label(source),
                weight=source.weight,
                num_tokens=manifest.num_tokens if manifest else None,
                num_bytes=num_bytes,
                rows_per_epoch=num_rows,
            )
        )
    return summaries


def held_out_documents(training: DataRecipe) -> list[Document]:
    """What the training data of this recipe leaves out: the held-out part of its sources with `part: train`.

    Raises:
        UserError: no source leaves anything out, or nothing falls to the held-out part.
    """
    sources = [
        source.model_copy(update={"part": "held_out"})
        for source in training.sources
        if not isinstance(source, ShardsSource) and source.part == "train"
    ]
    if not sources:
        raise UserError(
            "The training data hold nothing out. Give a source `part: train`, which leaves a twentieth of its "
            "documents out by their names, or give evaluation data of their own."
        )
    documents = [document for source in sources for document in _documents(source)]
    if not documents:
        raise UserError(
            "Nothing falls to the held-out part: it takes about one document in twenty, by their names, and there are "
            "too few. Give evaluation data of their own."
        )
    return documents


def evaluation_documents(evaluation: DataRecipe) -> list[Document]:
    """All documents of a recipe that is meant for evaluation, each source's own `part` of them.

    The text of a conversation is its messages one under another.

    Raises:
        UserError: a source has no text (shards, tokens), or there is none at all.
    """
    documents = [document for source in evaluation.sources for document in _documents(source)]
    if not documents:
        raise UserError("There is no text to evaluate on: every document of the evaluation data is empty.")
    return documents


def tokenizer_documents(training: DataRecipe, max_bytes: int) -> list[Document]:
    """The documents of a run's first stage that its tokenizer is trained on: text, which the recipe has made sure of.

    They come from the sources in turn, one document each, until there are `max_bytes` of UTF-8 (a short one counts as
    `LEAST_BYTES`): a source may be endless, and the others must have their share.

    Raises:
        UserError: all of it is empty.
    """
    sources = deque(_documents(source) for source in training.sources)
    documents: list[Document] = []
    num_bytes = 0
    while sources and num_bytes < max_bytes:
        source = sources.popleft()
        document = next(source, None)
        if document is not None:
            documents.append(document)
            num_bytes += max(len(document.text.encode()), LEAST_BYTES)
            sources.append(source)
    if not documents:
        raise UserError(
            "There is no text to train the tokenizer on: every document of the first stage is empty. Give it text, or "
            "load a tokenizer (tokenizer.kind: load)."
        )
    return documents


def _documents(source: SourceRecipe) -> Iterator[Document]:
    if isinstance(source, ShardsSource) or record_format(source).format == "tokens":
        raise UserError(f"{source_label(source)} holds tokens, and evaluation needs text. Give the text.")
    for record in records_of(source):
        for item in wanted(record_format(source), [record]):
            yield Document(item.name, item.text)


def _pack(
    stream: TokenStream, recipe: DataRecipe, format: Format, tokenizer: "PreTrainedTokenizerBase", seq_len: int
) -> Packing:
    packing = recipe.packing or ("ring" if format == "text" else "whole")
    if packing == "ring":
        return RingPacking(stream, seq_len)
    pad_id = tokenizer.pad_token_id
    return WholePacking(stream, seq_len, pad_id if isinstance(pad_id, int) else boundary_token_ids(tokenizer)[1])


def _open_stream(
    source: HubSource | GeneratorSource,
    recipe: DataRecipe,
    tokenizer: "PreTrainedTokenizerBase",
    seq_len: int,
    key: tuple[int, int],
) -> StreamedSource:
    decontamination: Decontamination | None = new_decontamination(recipe.decontaminate)
    identity: dict[str, str | int] = {
        "recipe": source.model_dump_json(exclude={"weight"}),
        "tokenizer": tokenizer_hash(tokenizer, with_chat_template=is_chat(source)),
        "packing": str(recipe.packing),
        "decontaminate": "no" if recipe.decontaminate is None else recipe.decontaminate.model_dump_json(),
        "stream_block_tokens": recipe.stream_block_tokens,
    }
    return StreamedSource(
        source_label(source),
        partial(HubRecords, source) if isinstance(source, HubSource) else partial(GeneratorRecords, source),
        Encoder(source, tokenizer, decontamination),
        partial(_pack, recipe=recipe, format=source.format, tokenizer=tokenizer, seq_len=seq_len),
        key=key,
        block_tokens=recipe.stream_block_tokens,
        identity=identity,
    )
