"""What importing the package does, and does not do."""

import subprocess
import sys

import pytest
import torch
from jaxtyping import TypeCheckError


def test_import_looplm_is_instant():
    heavy = ["torch", "transformers", "numpy"]
    code = f"import sys, looplm; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_shape_annotations_are_checked_in_tests():
    """Guards the pytest option in pyproject.toml: without it, every annotation in the package is only a comment."""
    from looplm.model.gate import exit_pdf

    with pytest.raises(TypeCheckError):
        exit_pdf(torch.zeros(3, 1, 2, dtype=torch.int64))
