"""Where records come from: files, hub data sets, Python functions. Read one by one, never whole."""

import copy
import glob
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from looplm.data.formats import Record
from looplm.data.recipe import FilesSource, GeneratorSource, HubSource, StdlibSource, source_label
from looplm.data.stdlib_text import load_stdlib_text
from looplm.data.text_files import read_jsonl, read_text
from looplm.errors import UserError

_PARQUET_BATCH = 256


def expand_paths(patterns: Iterable[str]) -> list[Path]:
    """The files that paths and glob patterns name, in order, each once.

    Raises:
        UserError: a pattern matches nothing, or a path is no file.
    """
    paths: dict[Path, None] = {}
    for pattern in patterns:
        if glob.has_magic(pattern) and not Path(pattern).exists():
            found = [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if Path(name).is_file()]
            if not found:
                raise UserError(f"No file matches {pattern} (from the folder {Path.cwd()}). Check the pattern.")
            paths |= dict.fromkeys(found)
        elif Path(pattern).is_dir():
            raise UserError(f"{pattern} is a folder. Name its files with a pattern, such as {pattern}/**/*.jsonl.")
        elif not Path(pattern).exists():
            raise UserError(f"{pattern} cannot be read: no such file (from the folder {Path.cwd()}).")
        else:
            paths[Path(pattern)] = None
    return list(paths)


def file_records(source: FilesSource) -> Iterator[Record]:
    """The records of all files of a source.

    Raises:
        UserError: a file is missing, unreadable, empty, or not of the format.
    """
    for path in expand_paths(source.paths):
        if path.suffix == ".jsonl":
            records = (Record(f"{path.name}:{n}", f"{path}, line {n}", fields) for n, fields in read_jsonl(path))
        elif path.suffix == ".parquet":
            records = _parquet_records(path, source)
        elif source.format == "text":
            text = read_text(path)
            records = iter([Record(path.name, str(path), {source.text_field: text})] if text.strip() else [])
        else:
            raise UserError(f"{path}: format {source.format} is read from .jsonl and .parquet files only.")
        first = next(records, None)
        if first is None:
            raise UserError(f"{path} holds no text. Give a file with something to read in it.")
        yield first
        yield from records


def stdlib_records(source: StdlibSource) -> Iterator[Record]:
    """The documents of the standard library, of both parts."""
    for document in load_stdlib_text(source.max_bytes).documents:
        yield Record(document.name, document.name, {"text": document.text})


@runtime_checkable
class Resumable(Protocol):
    """An iterator that can say where it stands and go on from there."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        ...


class HubRecords:
    """Iterator over the records of one pass through a data set that `datasets.load_dataset` gives; resumable.

    Args:
        source: names the data set.

    Raises:
        UserError: it cannot be loaded, or lacks the field that the format reads.
    """

    def __init__(self, source: HubSource) -> None:
        self._label = source_label(source)
        self._dataset = load_hub_dataset(source)
        self._count = 0
        self._items: Iterator[Mapping[str, Any]] | None = None
        self._loaded: dict[str, Any] | None = None

    def __iter__(self) -> "HubRecords":
        return self

    def __next__(self) -> Record:
        if self._items is None:
            self._items = iter(self._dataset)
        fields = next(self._items)
        self._count += 1
        return Record(f"{self._label}:{self._count}", f"{self._label}, record {self._count}", fields)

    def state_dict(self) -> dict[str, Any]:
        """Records read so far, and the data set's own position."""
        # Between loading a state and the first record, a data set still gives the state it had before.
        if self._items is None and self._loaded is not None:
            return self._loaded
        return {"count": self._count, "dataset": copy.deepcopy(self._dataset.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the records that the state counts."""
        self._count = state_dict["count"]
        self._dataset.load_state_dict(state_dict["dataset"])
        self._items = None
        self._loaded = copy.deepcopy(state_dict)


def load_hub_dataset(source: HubSource) -> Any:
    """The data set, as `datasets` gives it: a `Dataset`, or an `IterableDataset` for a streaming source.

    Raises:
        UserError: it cannot be loaded; the message says what `datasets` said, and whether the run is offline.
    """
    import datasets
    from datasets import config

    try:
        return datasets.load_dataset(
            source.name,
            source.config,
            split=source.split,
            revision=source.revision,
            data_files=source.data_files,
            streaming=source.streaming,
        )
    except Exception as error:  # whatever the network, the hub, a builder or a parser raises: it cannot be loaded
        offline = config.HF_HUB_OFFLINE or config.HF_DATASETS_OFFLINE
        hint = (
            "This run is offline (HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set): download the data set first, or unset"
            if offline
            else "Check its name, config, split and revision, and the connection"
        )
        label = source_label(source)
        raise UserError(f"{label} cannot be loaded: {type(error).__name__}: {error}. {hint}.") from error


class GeneratorRecords:
    """Iterator over what a user's function yields, once from its start to its end; resumable.

    Raises:
        UserError: the function cannot be imported or called, returns nothing to iterate over, fails on the way, or
            yields something that is neither a string, a list of messages nor a dict.
    """

    def __init__(self, source: GeneratorSource) -> None:
        self._source = source
        self._items = _call(source)
        self._count = 0

    def __iter__(self) -> "GeneratorRecords":
        return self

    def __next__(self) -> Record:
        where = f"{self._source.function}, item {self._count + 1}"
        item = self._draw(where)
        self._count += 1
        match item:
            case str():
                fields: Mapping[str, Any] = {self._source.text_field: item}
            case list():
                fields = {self._source.messages_field: item}
            case Mapping():
                fields = item
            case _:
                found = type(item).__name__
                raise UserError(f"{where}: expected a string, a list of messages or a dict, found {found}.")
        return Record(f"{self._source.function}:{self._count}", where, fields)

    def state_dict(self) -> dict[str, Any]:
        """Items drawn so far, and the iterator's own state if it has one."""
        own = self._items.state_dict() if isinstance(self._items, Resumable) else None
        return {"count": self._count, "own": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the items that the state counts, by the iterator's own means or by drawing them again."""
        self._items = _call(self._source)
        self._count = 0
        if isinstance(self._items, Resumable):
            self._items.load_state_dict(state_dict["own"])
            self._count = state_dict["count"]
            return
        while self._count < state_dict["count"]:
            try:
                self._draw(f"{self._source.function}, item {self._count + 1}")
            except StopIteration:
                raise UserError(
                    f"{self._source.function} ended after {self._count} items, where {state_dict['count']} had been "
                    "read: it must yield the same items every time it is called, or have state_dict."
                ) from None
            self._count += 1

    def _draw(self, where: str) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            raise
        except Exception as error:  # the user's own code
            raise UserError(f"{where}: the function failed with {type(error).__name__}: {error}.") from error


def import_function(source: GeneratorSource) -> Callable[..., Any]:
    """The function that a generator source names.

    Raises:
        UserError: there is no such module, or no such function in it.
    """
    module_name, _, function_name = source.function.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module does when imported
        raise UserError(
            f"{source.function}: the module cannot be imported ({type(error).__name__}: {error}). "
            "Install it, or put its folder on PYTHONPATH."
        ) from error
    if function_name not in vars(module):
        raise UserError(f"{source.function}: the module {module_name} has no {function_name}.")
    function = vars(module)[function_name]
    if not callable(function):
        raise UserError(f"{source.function} is not a function.")
    return function


def module_file(source: GeneratorSource) -> list[Path]:
    """The file of the function's module, if it has one, by which a changed function is noticed.

    Raises:
        UserError: the function cannot be imported.
    """
    import_function(source)
    spec = importlib.util.find_spec(source.function.partition(":")[0])
    return [Path(spec.origin)] if spec is not None and spec.has_location and spec.origin else []


def _call(source: GeneratorSource) -> Iterator[Any]:
    function = import_function(source)
    try:
        return iter(function(**source.arguments))
    except TypeError as error:  # wrong arguments, or a result that cannot be iterated over
        raise UserError(f"{source.function} with arguments {source.arguments}: {error}.") from error


def _parquet_records(path: Path, source: FilesSource) -> Iterator[Record]:
    import pyarrow
    from pyarrow import parquet

    fields = {
        "text": [source.text_field],
        "chat": [source.messages_field],
        "instruction": [source.prompt_field, source.response_field],
        "tokens": ["input_ids", "labels"],
    }[source.format]
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            missing = [field for field in fields if field not in columns]
            if missing:
                raise UserError(
                    f"{path}: no column {' and no column '.join(map(repr, missing))}; "
                    f"its columns are: {', '.join(map(repr, columns))}."
                )
            number = 0
            for batch in file.iter_batches(_PARQUET_BATCH, columns=fields):
                for record in batch.to_pylist():
                    number += 1
                    yield Record(f"{path.name}:{number}", f"{path}, row {number}", record)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read as parquet: {str(error).rstrip('.')}.") from error
