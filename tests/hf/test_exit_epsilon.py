"""A saved epsilon of the hidden-difference exit: kept, checked, and absent where there is none."""

import json

import pytest

from looplm.conversion.exporting import exported
from looplm.errors import UserError
from looplm.hf.config import OuroConfig
from looplm.hf.load import load
from looplm.hf.save import save_checkpoint
from looplm.inference import HiddenDiffExit
from looplm.inference.prompts import model_defaults
from looplm.quickstart.shipped import shipped_directory


def test_it_is_saved_read_and_exported(tmp_path):
    model = load(shipped_directory())
    assert model.config.exit_epsilon is None
    save_checkpoint(model, tmp_path / "none")
    assert "exit_epsilon" not in json.loads((tmp_path / "none" / "config.json").read_text(encoding="utf-8"))
    model.config.exit_threshold, model.config.exit_epsilon = 1.0, 2.5
    save_checkpoint(model, tmp_path / "some")
    again = load(tmp_path / "some")
    assert model_defaults(again)[1] == HiddenDiffExit(2.5)
    assert exported(again, "hf").config.exit_epsilon == 2.5


def test_ouro_has_a_place_for_it(tmp_path):
    config = OuroConfig(**{**OuroConfig.CLASS_DEFAULTS, "exit_epsilon": 0.5})
    config.save_pretrained(tmp_path / "some")
    assert OuroConfig.from_pretrained(tmp_path / "some").exit_epsilon == 0.5
    OuroConfig(**OuroConfig.CLASS_DEFAULTS).save_pretrained(tmp_path / "none")
    assert "exit_epsilon" not in json.loads((tmp_path / "none" / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"exit_epsilon": -1}, "exit_epsilon is -1"),
        ({"exit_epsilon": float("nan")}, "exit_epsilon is nan"),
        ({"exit_epsilon": True}, "exit_epsilon is True"),
        ({"exit_epsilon": 1.0, "early_exit_threshold": 0.5}, "by one rule only"),
    ],
)
def test_impossible_values_are_refused(fields, wrong):
    with pytest.raises(UserError, match=wrong):
        OuroConfig(**{**OuroConfig.CLASS_DEFAULTS, **fields})
