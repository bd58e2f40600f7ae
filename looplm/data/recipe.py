"""The `data` section of a recipe: which texts, in what shares, how they are packed, and what is left out."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from looplm.strict import Strict

Format = Literal["text", "chat", "instruction", "tokens"]
Packing = Literal["ring", "whole"]

_FORMAT_OF_FIELD = {
    "text_field": "text",
    "messages_field": "chat",
    "prompt_field": "instruction",
    "response_field": "instruction",
    "as_chat": "instruction",
}


class _Weighted(Strict):
    weight: float | None = Field(default=None, gt=0)
    """Share of the rows, relative to the other sources. Left out everywhere: each source's own number of rows, so
    that an epoch of the mixture is an epoch of every source."""


class RecordSource(_Weighted):
    """How the records of a source are read as documents; the part that files, hub data sets and generators share."""

    format: Format = "text"
    """text: a string. chat: a list of messages with role and content, rendered with the tokenizer's chat template.
    instruction: a prompt and a response. tokens: `input_ids` with `labels` (the ids again, or -100)."""
    text_field: str = "text"
    """Where a record of format text has its string."""
    messages_field: str = "messages"
    """Where a record of format chat has its messages."""
    prompt_field: str = "prompt"
    """Where a record of format instruction has its prompt."""
    response_field: str = "response"
    """Where a record of format instruction has its response."""
    as_chat: bool = True
    """Instructions become a turn of user and assistant. False: bos, prompt, response, eos, nothing between."""
    responses_only: bool = True
    """chat and instruction: only the responses are predicted, each with its end-of-turn token. False: everything."""
    part: Literal["all", "train", "held_out"] = "all"
    """Which documents: all, or one side of the split by the hash of their names (a twentieth is held out)."""

    @model_validator(mode="after")
    def _check_fields_belong_to_format(self) -> "RecordSource":
        for field, owner in _FORMAT_OF_FIELD.items():
            if field in self.model_fields_set and self.format != owner:
                raise ValueError(f"{field} is read with format: {owner} only, and the format is {self.format}")
        if "responses_only" in self.model_fields_set and self.format not in ("chat", "instruction"):
            raise ValueError(f"responses_only needs format: chat or instruction, and the format is {self.format}")
        if self.part != "all" and self.format == "tokens":
            raise ValueError("part needs documents with text; documents of format tokens cannot be split by name")
        return self


class FilesSource(RecordSource):
    """Files on this machine. `.jsonl`: one record a line; `.parquet`: one a row; any other: one text a file."""

    kind: Literal["files"]
    paths: list[str] = Field(min_length=1)
    """Paths and glob patterns (`**` goes through folders), read in this order, the files of a pattern by name."""


class HubSource(RecordSource):
    """A data set read by `datasets.load_dataset`: from the Hugging Face hub, or from a local folder."""

    kind: Literal["hub"]
    name: str
    """As for `load_dataset`: a repository, a local folder, or a format such as `json` together with `data_files`."""
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    """Commit, tag or branch; give the commit where a run must be repeatable."""
    data_files: str | list[str] | None = None
    streaming: bool = False
    """True: read and tokenised while training, nothing is stored. False: downloaded and tokenised once."""


class GeneratorSource(RecordSource):
    """Your own Python function; what it returns is iterated over, and started again at its end.

    It yields strings (text), lists of messages (chat), or dicts with the fields that the format names. To resume, an
    iterator with `state_dict` and `load_state_dict` is asked to; any other is started again and its first items are
    skipped, so it must yield the same items every time.
    """

    kind: Literal["generator"]
    function: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`package.module:function`, importable where the run starts."""
    arguments: dict[str, JsonValue] = {}
    streaming: bool = True
    """True: tokenised while training; it may be endless. False: tokenised once; it must end."""


class StdlibSource(_Weighted):
    """The offline default corpus: text that every Python installation carries, about 10 MB."""

    kind: Literal["stdlib"]
    part: Literal["all", "train", "held_out"] = "train"
    max_bytes: int | None = Field(default=None, gt=0)
    """Keep a sample of about this size; None keeps all."""


class ShardsSource(_Weighted):
    """A directory that was tokenised before, by this package, with the same tokenizer."""

    kind: Literal["shards"]
    path: str


SourceRecipe = Annotated[
    FilesSource | HubSource | GeneratorSource | StdlibSource | ShardsSource, Field(discriminator="kind")
]
Tokenised = FilesSource | HubSource | GeneratorSource | StdlibSource


class DecontaminationRecipe(Strict):
    """Documents that share a run of words with the given files are dropped, and counted."""

    against: list[str] = Field(min_length=1)
    """Files (as in a files source) whose text must not be trained on; in `.jsonl`, every string of a record."""
    ngram: int = Field(default=13, gt=1)
    """Words in a row, lower case and without punctuation, that count as a match (13 as in Brown et al. 2020,
    appendix C). A shorter reference text must occur whole."""


class DataRecipe(Strict):
    """What a run reads."""

    sources: list[SourceRecipe] = Field(min_length=1)
    packing: Packing | None = None
    """ring: windows cut from the documents laid end to end; every token is predicted once an epoch. whole: documents
    are fitted into windows uncut where they are short enough, and the rest of a window is padding that is not
    predicted. None: ring for text, whole for all else."""
    decontaminate: DecontaminationRecipe | None = None
    stream_block_tokens: int = Field(default=2**20, gt=0)
    """Streaming sources are tokenised this many tokens at a time, and shuffled within. Resuming repeats one block."""

    @model_validator(mode="after")
    def _check_sources_together(self) -> "DataRecipe":
        given = [source.weight is not None for source in self.sources]
        if any(given) and not all(given):
            raise ValueError("give a weight for every source or for none")
        if not any(given) and len(self.sources) > 1 and any(is_streamed(source) for source in self.sources):
            raise ValueError("a streaming source has no known size: give every source a weight")
        if self.decontaminate is not None:
            for source in self.sources:
                if isinstance(source, RecordSource) and source.format == "tokens":
                    raise ValueError("decontaminate needs text, and a source has format: tokens")
        return self


def is_streamed(source: SourceRecipe) -> bool:
    """Whether a source is tokenised while training instead of once before."""
    return isinstance(source, HubSource | GeneratorSource) and source.streaming


def source_label(source: SourceRecipe) -> str:
    """What to call a source in messages: its kind and where it is."""
    match source:
        case FilesSource():
            return f"files {', '.join(source.paths)}"
        case HubSource():
            return " ".join(["hub", source.name, *([source.config] if source.config else []), source.split])
        case GeneratorSource():
            return f"generator {source.function}"
        case ShardsSource():
            return f"shards {source.path}"
        case StdlibSource():
            return "stdlib"
