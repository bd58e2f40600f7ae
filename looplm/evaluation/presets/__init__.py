"""Which tasks the papers report, with their shots and metrics: one YAML file each, read by name."""

from importlib.resources import files
from typing import Any

import yaml
from pydantic import Field

from looplm.errors import UserError
from looplm.strict import Strict, nearest, parse


class PresetTask(Strict):
    """A task of lm-eval as the paper asks it."""

    task: str
    num_fewshot: int
    metric: str
    runs_code: bool = False
    """Whether it runs generated code."""


class Preset(Strict):
    """One paper's evaluation."""

    description: str
    tasks: list[PresetTask]
    generation: dict[str, float] = Field(default_factory=dict)
    """Sampling arguments; greedy where there are none."""
    samples: int = 1
    chat: bool = False
    elsewhere: dict[str, str] = Field(default_factory=dict)
    """Benchmarks of the paper that lm-eval does not have, and what there is instead."""


def preset_names() -> list[str]:
    """All presets."""
    found = files(__name__).iterdir()
    return sorted(one.name.removesuffix(".yaml") for one in found if one.name.endswith(".yaml"))


def load_preset(name: str) -> Preset:
    """The preset of that name. Raises UserError when there is none."""
    if name not in preset_names():
        hint = nearest(name, preset_names())
        meant = f" Did you mean {hint}?" if hint else ""
        raise UserError(f"There is no preset {name}; choose one of {', '.join(preset_names())}.{meant}")
    text: Any = yaml.safe_load(files(__name__).joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
    return parse(Preset, text, f"preset {name}")
