"""The tiny models, stages and rows of `runs` as fixtures."""

from collections.abc import Callable

import pytest
import torch

from looplm.data.evaluation_windows import EvaluationWindows
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.training.rows import LoadedRows
from looplm.training.stage_recipe import StageRecipe

from .runs import tiny_model, tiny_rows, tiny_stage


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
