"""The lazy public interface: nothing is imported until a name is used, and then the architectures are registered."""

import subprocess
import sys

import pytest

import looplm


def test_every_public_name_resolves():
    assert sorted(looplm._MODULES) == looplm.__all__
    for name in looplm.__all__:
        assert getattr(looplm, name).__name__ == name
        assert name in dir(looplm)


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="'looplm' has no attribute 'lode'"):
        looplm.lode  # noqa: B018


def test_first_use_imports_and_registers():
    code = """
import sys, looplm
before = "torch" in sys.modules, "transformers" in sys.modules
looplm.UserError
light = "torch" in sys.modules
looplm.LoopLMConfig
from transformers import AutoConfig
print(before, light, AutoConfig.for_model("ouro").__class__.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "(False, False) False OuroConfig", done.stderr
