"""Looped language models: train them, run them with early exit, look inside.

    model = looplm.load("path-or-hub-name")
    engine = looplm.Engine(model, looplm.load_tokenizer("path-or-hub-name"))

Importing looplm imports nothing else: a public name brings its module in when it is first used. That first
use also registers our architectures with transformers' Auto classes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from looplm.errors import UserError
    from looplm.hf.config import LoopLMConfig, OuroConfig
    from looplm.hf.load import load, load_tokenizer
    from looplm.hf.modeling import LoopLMForCausalLM
    from looplm.hf.register import register
    from looplm.hf.save import save_checkpoint
    from looplm.inference.engine import Engine
    from looplm.inference.exit_policy import ConfidenceExit, Deadline, FixedDepth, HiddenDiffExit, QuantileExit
    from looplm.inference.sampling import SamplingParams
    from looplm.inference.screening import Screen
    from looplm.inference.speculative import Speculation

_MODULES = {
    "ConfidenceExit": "looplm.inference.exit_policy",
    "Deadline": "looplm.inference.exit_policy",
    "Engine": "looplm.inference.engine",
    "FixedDepth": "looplm.inference.exit_policy",
    "HiddenDiffExit": "looplm.inference.exit_policy",
    "LoopLMConfig": "looplm.hf.config",
    "LoopLMForCausalLM": "looplm.hf.modeling",
    "OuroConfig": "looplm.hf.config",
    "QuantileExit": "looplm.inference.exit_policy",
    "SamplingParams": "looplm.inference.sampling",
    "Screen": "looplm.inference.screening",
    "Speculation": "looplm.inference.speculative",
    "UserError": "looplm.errors",
    "load": "looplm.hf.load",
    "load_tokenizer": "looplm.hf.load",
    "register": "looplm.hf.register",
    "save_checkpoint": "looplm.hf.save",
}
"""Public name -> the module that defines it."""

__all__ = [
    "ConfidenceExit",
    "Deadline",
    "Engine",
    "FixedDepth",
    "HiddenDiffExit",
    "LoopLMConfig",
    "LoopLMForCausalLM",
    "OuroConfig",
    "QuantileExit",
    "SamplingParams",
    "Screen",
    "Speculation",
    "UserError",
    "load",
    "load_tokenizer",
    "register",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    """Finds a public name on its first use."""
    if name == "__version__":
        from importlib.metadata import version

        return version("looplm")
    if name not in _MODULES:
        raise AttributeError(f"module 'looplm' has no attribute {name!r}")
    if name != "UserError":
        import_module("looplm.hf.register").register()
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES, "__version__"])
