"""The tiny models, stages and rows of `runs` as fixtures."""

from collections.abc import Callable

import pytest

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
