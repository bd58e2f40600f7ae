"""What every test stands on: no network, one thread per worker, fixed seeds."""

import os
import random
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes a test starts; torch.set_num_threads below is for this one

import numpy as np
import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked `gpu` where there is no CUDA device."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Starts every test from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder `shared` beside the repository (released configs, golden checkpoints); skips where absent."""
    path = REPOSITORY.parent / "shared"
    if not path.is_dir():
        pytest.skip("needs the folder `shared` beside the repository")
    return path
