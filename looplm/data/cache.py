"""Tokens of each source, made once and found again: as long as tokenizer, files and options are what they were."""

import hashlib
import json
import logging
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from looplm.data.decontamination import Decontamination, strings_in
from looplm.data.encoding import Encoder, is_chat
from looplm.data.formats import Record
from looplm.data.recipe import (
    DecontaminationRecipe,
    FilesSource,
    GeneratorSource,
    HubSource,
    RecordSource,
    ShardsSource,
    SourceRecipe,
    StdlibSource,
    source_label,
)
from looplm.data.shards import FORMAT_VERSION, Manifest, Origin, check_shards, read_manifest, write_shards
from looplm.data.sources import (
    GeneratorRecords,
    HubRecords,
    expand_paths,
    file_records,
    load_hub_dataset,
    module_file,
    stdlib_records,
)
from looplm.data.text_files import read_jsonl, read_text
from looplm.data.tokenizer import tokenizer_hash
from looplm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Say = Callable[[str], None]
"""Takes one line about what is being done; by default it goes to the log of `looplm.data.cache`."""

StoredRecipe = FilesSource | HubSource | GeneratorSource | StdlibSource

_LOGGER = logging.getLogger(__name__)


def log(line: str) -> None:
    """Say it in the log."""
    _LOGGER.info(line)


def records_of(source: StoredRecipe) -> Iterator[Record]:
    """The records of a source, from its start to its end.

    Raises:
        UserError: they cannot be read.
    """
    match source:
        case FilesSource():
            return file_records(source)
        case HubSource():
            return HubRecords(source)
        case GeneratorSource():
            return GeneratorRecords(source)
        case StdlibSource():
            return stdlib_records(source)


def record_format(source: StoredRecipe) -> RecordSource:
    """How the records of a source are read."""
    return RecordSource(part=source.part) if isinstance(source, StdlibSource) else source


def new_decontamination(recipe: DecontaminationRecipe | None) -> Decontamination | None:
    """Reads the reference texts; None where none are given."""
    if recipe is None:
        return None
    texts = []
    for path in expand_paths(recipe.against):
        if path.suffix == ".jsonl":
            texts += [text for _, record in read_jsonl(path) for text in strings_in(record)]
        else:
            texts.append(read_text(path))
    return Decontamination(texts, recipe.ngram)


def origin_of(
    source: StoredRecipe, tokenizer: "PreTrainedTokenizerBase", decontaminate: DecontaminationRecipe | None
) -> Origin:
    """What the tokens of this source are made of.

    Raises:
        UserError: its files, data set or function cannot be found.
    """
    made_of: dict[str, Any] = {"recipe": source.model_dump(mode="json", exclude={"weight"})}
    match source:
        case FilesSource():
            made_of["files"] = _fingerprints(expand_paths(source.paths))
        case HubSource():
            made_of["fingerprint"] = str(load_hub_dataset(source)._fingerprint)
        case GeneratorSource():
            made_of["files"] = _fingerprints(module_file(source))
        case StdlibSource():
            made_of["python"] = platform.python_version()
    if decontaminate is not None:
        made_of["decontaminate"] = {
            "ngram": decontaminate.ngram,
            "against": _fingerprints(expand_paths(decontaminate.against)),
        }
    return Origin(
        label=source_label(source),
        tokenizer=tokenizer_hash(tokenizer, with_chat_template=is_chat(record_format(source))),
        source=json.loads(json.dumps(made_of)),
    )


def cached_at(origin: Origin, cache_dir: Path) -> Path:
    """The directory for tokens of this origin."""
    content = json.dumps([FORMAT_VERSION, origin.model_dump(mode="json")], sort_keys=True)
    name = re.sub(r"[^\w.-]+", "-", origin.label)[:60].strip("-.")
    return cache_dir / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def tokenize_source(
    source: StoredRecipe,
    tokenizer: "PreTrainedTokenizerBase",
    decontaminate: DecontaminationRecipe | None,
    cache_dir: Path,
    say: Say = log,
) -> Path:
    """The directory of the source's tokens; they are made if they are not there.

    Raises:
        UserError: a record cannot be used, nothing is left to train on, or the tokens cannot be written.
    """
    origin = origin_of(source, tokenizer, decontaminate)
    directory = cached_at(origin, cache_dir)
    if directory.exists():
        check_shards(directory)  # a damaged one is named now
        return directory
    say(f"{origin.label}: tokenising{_reason(origin, cache_dir)}")
    decontamination = new_decontamination(decontaminate)
    encoder = Encoder(record_format(source), tokenizer, decontamination)
    manifest = write_shards(
        encoder.encode(records_of(source)),
        directory,
        origin=origin,
        format=encoder.source.format,
        with_chat_template=is_chat(encoder.source),
        vocab_size=len(tokenizer),
        masked=encoder.masked,
        decontamination=decontamination,
    )
    say(f"{origin.label}: {manifest.num_tokens:,} tokens of {manifest.num_documents:,} documents{_dropped(manifest)}")
    return directory


def find_tokens(
    source: SourceRecipe,
    tokenizer: "PreTrainedTokenizerBase",
    decontaminate: DecontaminationRecipe | None,
    cache_dir: Path,
) -> Path:
    """The directory of a source's tokens, which must be there already.

    Raises:
        UserError: they are not; or shards that are given were made with another tokenizer or decontamination.
    """
    if isinstance(source, ShardsSource):
        directory = Path(source.path)
        _check_given(check_shards(directory), directory, tokenizer, decontaminate)
        return directory
    directory = cached_at(origin_of(source, tokenizer, decontaminate), cache_dir)
    if not directory.exists():
        raise UserError(
            f"{source_label(source)} is not tokenised in {cache_dir}. Rank 0 does that before the others open the "
            "data, and all ranks must see the same folder."
        )
    return directory


def _check_given(
    manifest: Manifest,
    directory: Path,
    tokenizer: "PreTrainedTokenizerBase",
    decontaminate: DecontaminationRecipe | None,
) -> None:
    chat = manifest.with_chat_template
    here = tokenizer_hash(tokenizer, with_chat_template=chat)
    if manifest.origin.tokenizer != here:
        raise UserError(
            f"The shards in {directory} were made with another tokenizer{' or chat template' if chat else ''}: its "
            f"hash is {manifest.origin.tokenizer}, and this run's is {here}. Tokenise the text anew, or use the "
            "tokenizer they were made with."
        )
    if decontaminate is not None:
        wanted = {"ngram": decontaminate.ngram, "against": _fingerprints(expand_paths(decontaminate.against))}
        if manifest.origin.source.get("decontaminate") != json.loads(json.dumps(wanted)):
            raise UserError(
                f"The shards in {directory} are tokens already, and were not decontaminated against these files. Give "
                "their text as a source, or leave decontaminate out."
            )


def _fingerprints(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Path, size and time of change of each file: enough to notice a change without reading a terabyte."""
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def _reason(origin: Origin, cache_dir: Path) -> str:
    """Why tokens of the same label that are there already will not do."""
    for path in sorted(cache_dir.glob("*/manifest.json")):
        try:
            there = read_manifest(path.parent).origin
        except UserError:  # a damaged neighbour is no reason to stop here
            continue
        if there.label == origin.label:
            if there.tokenizer != origin.tokenizer:
                return f" anew: the tokenizer changed ({there.tokenizer} before, {origin.tokenizer} now)"
            return f" anew: {_difference(there.source, origin.source)} changed"
    return ""


def _difference(before: Any, now: Any) -> str:
    return ", ".join(key for key in now if before.get(key) != now[key]) or "something"


def _dropped(manifest: Manifest) -> str:
    if not manifest.num_dropped:
        return ""
    named = ", ".join([*manifest.dropped[:3], *(["..."] if manifest.num_dropped > 3 else [])])
    return f"; {manifest.num_dropped:,} dropped by decontamination ({named})"
