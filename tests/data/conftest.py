"""A tokenizer and a way to write files, for all tests of the data."""

import argparse
import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from looplm.data.tokenizer import train_tokenizer

WriteJsonl = Callable[[str, Iterable[object]], Path]


@pytest.fixture(autouse=True)
def hub_cache_of_the_test(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data sets of the hub's library go to a temporary folder."""
    folder = tmp_path_factory.mktemp("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder))  # for processes the test starts


@pytest.fixture(scope="session")
def small_tokenizer() -> PreTrainedTokenizerFast:
    """400 tokens, trained on English and code; its chat template is ChatML."""
    return train_tokenizer([inspect.getsource(argparse)], vocab_size=400)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> WriteJsonl:
    """Writes records, one a line, and returns the path."""

    def write(name: str, records: Iterable[object]) -> Path:
        path = tmp_path / name
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
        return path

    return write
