"""Records of every kind of source: complete, named, lazy, and errors that say where."""

import itertools
import json
import re

import pyarrow as pa
import pytest
from pyarrow import parquet

from looplm.data.formats import reader_of
from looplm.data.recipe import FilesSource, GeneratorSource, HubSource, RecordSource
from looplm.data.sources import GeneratorRecords, HubRecords, expand_paths, file_records, import_function, module_file
from looplm.data.text_files import read_jsonl
from looplm.errors import UserError

MODULE = """
import itertools
def texts(n=3, prefix="text"):
    for i in range(n): yield f"{prefix} {i}"
def endless():
    return map("number {}".format, itertools.count())
def chats():
    yield [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
def nonsense():
    yield "fine"; yield 7
def failing():
    yield "fine"; raise OSError("no such device")
def not_iterable(): return 3
CONSTANT = 3
class Stateful:
    def __init__(self): self.n = 0
    def __iter__(self): return self
    def __next__(self):
        if self.n == 5: raise StopIteration
        self.n += 1
        return f"item {self.n}"
    def state_dict(self): return {"n": self.n}
    def load_state_dict(self, state): self.n = state["n"]
CALLS = []
def shrinking():
    CALLS.append(1)
    return iter(["text"] * (4 - len(CALLS)))
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """An importable module of the user's, new for every test."""
    name = f"my_texts_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def files(*paths, **options) -> FilesSource:
    return FilesSource(kind="files", paths=[str(path) for path in paths], **options)


def generator(function: str, **options) -> GeneratorSource:
    return GeneratorSource(kind="generator", function=function, **options)


def write_parquet(path, columns: dict) -> None:
    parquet.write_table(pa.table(columns), path)


def test_files_of_every_kind_in_their_order(tmp_path, write_jsonl):
    write_jsonl("b.jsonl", [{"text": "one"}, {"text": "two"}])
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfplain\r\ntext")
    write_parquet(tmp_path / "c.parquet", {"text": ["three", "four"], "id": [1, 2]})
    records = list(file_records(files(tmp_path / "b.jsonl", tmp_path / "*.txt", tmp_path / "c.parquet")))
    assert [record.fields["text"] for record in records] == ["one", "two", "plain\ntext", "three", "four"]
    assert [record.name for record in records] == ["b.jsonl:1", "b.jsonl:2", "a.txt", "c.parquet:1", "c.parquet:2"]
    assert records[1].where == f"{tmp_path / 'b.jsonl'}, line 2" and records[4].where.endswith("c.parquet, row 2")


def test_patterns_go_through_folders_and_name_each_file_once(tmp_path):
    for name in ("x/b.txt", "x/y/a.txt", "c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = expand_paths([str(tmp_path / "**/*.txt"), str(tmp_path / "c.txt")])
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["c.txt", "x/b.txt", "x/y/a.txt"]
    (tmp_path / "odd[1].txt").write_text("a name that looks like a pattern")
    assert expand_paths([str(tmp_path / "odd[1].txt")]) == [tmp_path / "odd[1].txt"]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("missing.jsonl", "missing.jsonl cannot be read: no such file"),
        ("*.nothing", "No file matches"),
        ("", "is a folder"),
    ],
)
def test_files_that_are_not_there(tmp_path, pattern, said):
    with pytest.raises(UserError, match=said):
        expand_paths([f"{tmp_path}/{pattern}"])


def test_jsonl_is_read_one_line_at_a_time(tmp_path):
    """A bad line far on does not keep the lines before it from being used."""
    path = tmp_path / "long.jsonl"
    path.write_text('{"text": "x"}\n' * 20_000 + "{bad\n")
    assert len(list(itertools.islice(read_jsonl(path), 20_000))) == 20_000
    with pytest.raises(UserError, match="long.jsonl, line 20001: not valid JSON"):
        list(read_jsonl(path))


def test_lines_are_counted_as_universal_newlines_cut_them(tmp_path):
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\r\n\r\n{"n": 3}\r{"n": 4}\n\r{"n": 6}\r\r\n{"n": 8}')
    assert [(number, record["n"]) for number, record in read_jsonl(path)] == [(n, n) for n in (1, 3, 4, 6, 8)]


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl", "blank.txt"])
def test_empty_files_are_errors(tmp_path, name):
    (tmp_path / name).write_text("\n \n" if name == "blank.txt" else "")
    with pytest.raises(UserError, match=f"{name} holds no text"):
        list(file_records(files(tmp_path / name)))


def test_a_parquet_file_without_rows_or_column_or_that_is_none(tmp_path):
    write_parquet(tmp_path / "empty.parquet", {"text": pa.array([], pa.string())})
    with pytest.raises(UserError, match="empty.parquet holds no text"):
        list(file_records(files(tmp_path / "empty.parquet")))
    write_parquet(tmp_path / "other.parquet", {"content": ["x"], "id": [1]})
    with pytest.raises(UserError, match=r"other.parquet: no column 'text'; its columns are: 'content', 'id'"):
        list(file_records(files(tmp_path / "other.parquet")))
    (tmp_path / "text.parquet").write_text("not parquet")
    with pytest.raises(UserError, match="text.parquet cannot be read as parquet"):
        list(file_records(files(tmp_path / "text.parquet")))


def test_parquet_conversations_and_nulls(tmp_path):
    messages = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
    write_parquet(tmp_path / "chat.parquet", {"messages": messages})
    [record] = file_records(files(tmp_path / "chat.parquet", format="chat"))
    assert reader_of(RecordSource(format="chat"))(record).content == messages[0]
    write_parquet(tmp_path / "null.parquet", {"text": ["x", None]})
    records = list(file_records(files(tmp_path / "null.parquet")))
    with pytest.raises(
        UserError, match=r'null.parquet, row 2: expected an object with a string under "text", found null'
    ):
        reader_of(RecordSource())(records[1])


def test_only_text_is_read_from_plain_files(tmp_path):
    (tmp_path / "chat.txt").write_text("hello")
    with pytest.raises(UserError, match="format chat is read from .jsonl and .parquet"):
        list(file_records(files(tmp_path / "chat.txt", format="chat")))


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_data_sets_from_local_files(tmp_path, write_jsonl, streaming):
    write_jsonl("a.jsonl", [{"text": f"document {n}"} for n in range(5)])
    source = HubSource(kind="hub", name="json", data_files=str(tmp_path / "a.jsonl"), streaming=streaming)
    records = list(HubRecords(source))
    assert [record.fields["text"] for record in records] == [f"document {n}" for n in range(5)]
    assert records[3].where == "hub json train, record 4"


@pytest.mark.parametrize("num_read", [0, 1, 4, 250, 600])
def test_hub_streams_resume_at_the_record(tmp_path, num_read):
    for part in range(3):
        write_parquet(tmp_path / f"{part}.parquet", {"text": [f"{part} {n}" for n in range(200)]})
    source = HubSource(kind="hub", name="parquet", data_files=str(tmp_path / "*.parquet"), streaming=True)
    records = HubRecords(source)
    list(itertools.islice(records, num_read))
    state = json.loads(json.dumps(records.state_dict()))  # plain numbers
    other = HubRecords(source)
    other.load_state_dict(state)
    assert other.state_dict() == state
    rest = list(records)
    assert len(rest) == 600 - num_read
    assert list(other) == rest


def test_a_hub_data_set_that_is_not_there_says_that_the_run_is_offline():
    source = HubSource(kind="hub", name="someone/there-is-no-such-data-set")
    with pytest.raises(UserError, match=r"hub someone/there-is-no-such-data-set train cannot be loaded: .* offline"):
        HubRecords(source)


def test_generators_yield_texts_conversations_and_dicts(module):
    records = list(GeneratorRecords(generator(f"{module}:texts", arguments={"n": 2, "prefix": "x"})))
    assert [record.fields for record in records] == [{"text": "x 0"}, {"text": "x 1"}]
    assert records[1].where == f"{module}:texts, item 2"
    [record] = GeneratorRecords(generator(f"{module}:chats", format="chat"))
    assert reader_of(RecordSource(format="chat"))(record).text == "a\nb"
    assert module_file(generator(f"{module}:texts"))[0].name == f"{module}.py"
    assert module_file(generator("itertools:count")) == []


@pytest.mark.parametrize("function", ["texts", "Stateful", "endless"])
@pytest.mark.parametrize("num_read", [0, 2, 3])
def test_generators_resume_at_the_item(module, function, num_read):
    source = generator(f"{module}:{function}", arguments={"n": 6} if function == "texts" else {})
    records = GeneratorRecords(source)
    list(itertools.islice(records, num_read))
    state = records.state_dict()
    assert (state["own"] is not None) == (function == "Stateful")
    other = GeneratorRecords(source)
    next(other)
    other.load_state_dict(state)
    assert list(itertools.islice(other, 5)) == list(itertools.islice(records, 5))


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        ("no.such_module:f", {}, "no.such_module:f: the module cannot be imported (ModuleNotFoundError"),
        ("{}:missing", {}, "has no missing"),
        ("{}:CONSTANT", {}, "is not a function"),
        ("{}:texts", {"wrong": 1}, "unexpected keyword argument 'wrong'"),
        ("{}:not_iterable", {}, "'int' object is not iterable"),
        ("{}:nonsense", {}, "nonsense, item 2: expected a string, a list of messages or a dict, found int"),
        ("{}:failing", {}, "failing, item 2: the function failed with OSError: no such device"),
    ],
)
def test_generators_that_cannot_be_used(module, function, arguments, said):
    with pytest.raises(UserError, match=re.escape(said)):
        list(GeneratorRecords(generator(function.format(module), arguments=arguments)))


def test_a_generator_that_ends_sooner_cannot_be_resumed(module):
    records = GeneratorRecords(generator(f"{module}:shrinking"))
    list(records)
    with pytest.raises(UserError, match="ended after 1 items, where 3 had been read"):
        state = records.state_dict()
        GeneratorRecords(generator(f"{module}:shrinking")).load_state_dict(state)


def test_a_function_is_found_by_name():
    assert import_function(generator("itertools:count")) is itertools.count
