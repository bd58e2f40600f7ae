"""The default corpus: clean, the same on every call, and split by names alone."""

import sysconfig

import pytest

from looplm.data.documents import Document, hash_fraction, is_held_out, split_documents
from looplm.data.stdlib_text import StdlibText, _drop_copies, load_stdlib_text
from looplm.errors import UserError

# Files whose text has moved from one name to another in some Python since 3.11: before and after, on one side.
MOVED_MODULES = [
    "datetime.py",
    "_pydatetime.py",
    "pathlib.py",
    "pathlib/__init__.py",
    "pathlib/_abc.py",
    "pathlib/_local.py",
    "pathlib/types.py",
    "pathlib/_os.py",
    "zipfile.py",
    "zipfile/__init__.py",
    "sysconfig.py",
    "sysconfig/__init__.py",
    "string.py",
    "string/__init__.py",
    "warnings.py",
    "_py_warnings.py",
    "ast.py",
    "_ast_unparse.py",
    "_compression.py",
    "compression/_common/_streams.py",
    "typing.py",
    "inspect.py",
    "annotationlib.py",
    "profile.py",
    "cProfile.py",
    "profiling/tracing/__init__.py",
    "profiling/tracing/_utils.py",
]


@pytest.fixture(scope="module")
def corpus() -> StdlibText:
    return load_stdlib_text()


def test_the_corpus_is_megabytes_of_source_and_prose(corpus):
    names = [document.name for document in corpus.documents]
    assert corpus.num_bytes > 6e6
    assert names == sorted(set(names))
    assert "argparse.py" in names and "pydoc_data/topics/specialnames" in names
    assert corpus.num_undecodable == 0


def test_tests_tables_and_machine_specific_files_stay_out(corpus):
    for document in corpus.documents:
        folders = document.name.split("/")[:-1]
        assert not {"test", "tests", "idle_test", "encodings", "site-packages"} & set(folders)
        assert not document.name.startswith("_sysconfigdata")
        assert sysconfig.get_path("stdlib") not in document.text
        assert "\r" not in document.text


def test_every_call_returns_the_same(corpus):
    assert load_stdlib_text().documents == corpus.documents


def test_copies_are_dropped_in_favour_of_the_longer_text():
    lines = [f"a line that is long enough, number {number}" for number in range(10)]
    whole, part = Document("whole", "\n".join(lines)), Document("part", "\n".join(lines[:5]))
    other = Document("other", "\n".join([*lines[:3], *(line.upper() for line in lines[:6])]))
    assert _drop_copies([part, other, whole]) == [whole, other]


def test_no_held_out_document_stands_in_the_training_text(corpus):
    split = split_documents(corpus.documents)
    train_lines = {line.strip() for document in split.train for line in document.text.splitlines()}
    for document in split.held_out:
        lines = [line.strip() for line in document.text.splitlines() if len(line.strip()) >= 20]
        assert sum(len(line) for line in lines if line in train_lines) <= 0.5 * sum(map(len, lines)), document.name


def test_the_split_is_a_twentieth_in_count_and_in_bytes(corpus):
    split = split_documents(corpus.documents)
    held_out_bytes = sum(document.num_bytes for document in split.held_out)
    assert len(split.held_out) >= 25
    assert 0.03 <= len(split.held_out) / len(corpus.documents) <= 0.08
    assert 0.03 <= held_out_bytes / corpus.num_bytes <= 0.08
    assert sorted(split.train + split.held_out, key=lambda document: document.name) == corpus.documents


def test_the_split_never_changes():
    """A shipped checkpoint was trained on one side of it."""
    names = ["argparse.py", "functools.py", "http/client.py", "json/encoder.py", "pydoc_data/topics/comparisons"]
    assert [is_held_out(name) for name in names] == [False, True, True, False, True]
    assert hash_fraction("argparse.py", salt="salt") == 0.7884479831334232


def test_modules_that_moved_between_python_versions_are_all_in_train():
    assert not any(is_held_out(name) for name in MOVED_MODULES)


@pytest.mark.parametrize("max_bytes", [300_000, 1_000_000])
def test_a_cap_keeps_a_sample_with_its_held_out_share(corpus, max_bytes):
    sample = load_stdlib_text(max_bytes)
    assert 0.9 * max_bytes <= sample.num_bytes <= max_bytes
    assert set(sample.documents) < set(corpus.documents)
    held_out = split_documents(sample.documents).held_out
    assert 0.03 <= sum(document.num_bytes for document in held_out) / sample.num_bytes <= 0.06


def test_a_cap_below_every_document_is_an_error():
    with pytest.raises(UserError, match="max_bytes = 100 is too small"):
        load_stdlib_text(100)


def test_a_python_without_source_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match="carries no source"):
        load_stdlib_text()


def test_too_few_documents_to_split_is_an_error():
    with pytest.raises(UserError, match="1 documents are too few"):
        split_documents([Document("argparse.py", "text")])
