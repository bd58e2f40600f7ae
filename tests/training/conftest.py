"""The tiny models, stages and rows of `runs` as fixtures, and a whole run of `whole_runs`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from looplm.data.evaluation_windows import EvaluationWindows
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.training.rows import LoadedRows
from looplm.training.run import run
from looplm.training.stage_recipe import StageRecipe

from .runs import tiny_model, tiny_rows, tiny_stage
from .whole_runs import recipe_of, tiny


@pytest.fixture
def make_model() -> Callable[..., LoopLMForCausalLM]:
    """See `runs.tiny_model`."""
    return tiny_model


@pytest.fixture
def make_stage() -> Callable[..., StageRecipe]:
    """See `runs.tiny_stage`."""
    return tiny_stage


@pytest.fixture
def make_rows() -> Callable[..., LoadedRows]:
    """See `runs.tiny_rows`."""
    return tiny_rows


@pytest.fixture
def windows() -> EvaluationWindows:
    """Seven windows of three documents, of falling length."""
    lengths = torch.tensor([12, 12, 9, 7, 7, 4, 2])
    ids = torch.randint(17, (7, 12))
    return EvaluationWindows(ids, lengths, torch.tensor([0, 1, 0, 1, 2, 2, 0]), torch.tensor([50, 60, 33]))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty small documents, a few of which are held out by their names."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(60):
        words = [f"word{(i * j) % 17} and then {(i + j) % 7}" for j in range(20)]
        (folder / f"document{i}.txt").write_text("\n".join(words))
    return folder


@pytest.fixture(scope="module")
def straight(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one piece."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    run(recipe_of(tiny(texts)), run_dir)
    return run_dir
