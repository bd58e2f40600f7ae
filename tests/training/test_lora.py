"""LoRA stages of a run: what they train, leave behind and cost."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import looplm
from looplm.conversion.checked import export_checkpoint
from looplm.data.tokenizer import train_tokenizer
from looplm.errors import UserError
from looplm.hf.save import save_checkpoint
from looplm.objectives import expected_loss
from looplm.strict import parse
from looplm.training.lora import lora_shapes
from looplm.training.memory import estimate_memory, is_trained
from looplm.training.optimizer import freeze_for
from looplm.training.plan import plan_run
from looplm.training.recipe import RunRecipe
from looplm.training.recipe_file import load_recipe
from looplm.training.run import run
from looplm.training.stage_model import change_for_stage
from looplm.training.trainer import Trainer

from .processes import in_processes
from .runs import tiny_model, tiny_stage

RECIPES = Path(looplm.__file__).parent / "recipes"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for i in range(30):
        (folder / f"document{i}.txt").write_text("\n".join(f"word{(i * j) % 17} and {(i + j) % 7}" for j in range(20)))
    return folder


@pytest.fixture(scope="module")
def base(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny looped checkpoint with its tokenizer."""
    tokenizer = train_tokenizer((path.read_text() for path in sorted(texts.iterdir())), 280)
    model = tiny_model(vocab_size=280, num_hidden_layers=2, tie_word_embeddings=False)
    return save_checkpoint(model, tmp_path_factory.mktemp("base") / "model", tokenizer)


def fine_tuning(texts: Path, base: Path, lora: dict[str, Any], **stage: Any) -> dict[str, Any]:
    data = {"sources": [{"kind": "files", "paths": [f"{texts}/*.txt"]}]}
    first = {
        "name": "tune", "num_steps": 4, "seq_len": 16, "batch_tokens": 64, "data": data, "log_every": 1,
        "objective": {"kind": "expected_loss", "beta": 0.1}, "optimizer": {"lr": 1e-2}, "lora": {"rank": 2} | lora,
    }  # fmt: skip
    return {
        "name": "tiny", "model": {"kind": "checkpoint", "path": str(base)}, "telemetry": {"tensorboard": False},
        "tokenizer": {"kind": "load", "path": str(base)}, "stages": [first | stage],
        "checkpoints": {"every": 1, "asynchronous": False},
    }  # fmt: skip


def recipe_of(data: dict[str, Any]) -> RunRecipe:
    return parse(RunRecipe, data, "tiny")


def changed(before: Path, after: Path) -> set[str]:
    old, new = looplm.load(before).state_dict(), looplm.load(after).state_dict()
    assert old.keys() == new.keys()
    return {name for name, weight in new.items() if not torch.equal(weight, old[name])}


def test_a_run_leaves_the_adapter_and_the_merged_model(texts: Path, base: Path, tmp_path: Path) -> None:
    lora = {"targets": ["q_proj", "down_proj"], "also_train": ["early_exit_gate.*"]}
    run(recipe_of(fine_tuning(texts, base, lora)), tmp_path / "run")
    adapted = {f"model.layers.{i}.{name}.weight" for i in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")}
    gate = {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}
    assert changed(base, tmp_path / "run" / "tune") == adapted | gate
    told = [json.loads(line) for line in (tmp_path / "run" / "telemetry.jsonl").read_text().splitlines()]
    assert told[-1]["loss"] < told[0]["loss"] - 0.03
    config = json.loads((tmp_path / "run" / "tune-adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    # The adapter, merged by hand, is the merged model.
    report = export_checkpoint(base, tmp_path / "merged", "hf", adapter=tmp_path / "run" / "tune-adapter")
    assert changed(tmp_path / "run" / "tune", report.target) == set()


@pytest.mark.parametrize(
    "lora", [{}, {"per_loop": True}, {"merge": False}, {"base": "bf16"}, {"base": "bf16", "per_loop": True}], ids=str
)
def test_in_pieces_it_is_the_same(
    texts: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: dict[str, Any]
) -> None:
    recipe = recipe_of(fine_tuning(texts, base, lora, precision="bf16" if "base" in lora else "fp32"))
    run(recipe, tmp_path / "straight")
    real, left = Trainer.train_step, 2

    def step(self: Trainer) -> Any:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        return real(self)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Trainer, "train_step", step)
        run(recipe, tmp_path / "run")
    run(recipe, tmp_path / "run", resume=True)
    files = sorted(path.relative_to(tmp_path / "straight") for path in (tmp_path / "straight").rglob("*.safetensors"))
    assert {str(path.parent) for path in files} == {
        *([] if lora.get("per_loop") else ["tune-adapter"]), *(["tune"] if lora.get("merge", True) else []),
    }  # fmt: skip
    for path in files:
        assert (tmp_path / "run" / path).read_bytes() == (tmp_path / "straight" / path).read_bytes(), path
    if "tune" in {str(path.parent) for path in files}:
        assert looplm.load(tmp_path / "run" / "tune").dtype == torch.float32


def test_killed_between_adapter_and_merged_model(texts: Path, base: Path, tmp_path: Path) -> None:
    recipe = recipe_of(fine_tuning(texts, base, {}))
    run(recipe, tmp_path / "run")
    weights = tmp_path / "run" / "tune" / "model.safetensors"
    before = weights.read_bytes()
    (tmp_path / "run" / "tune" / "config.json").unlink()
    for path in (tmp_path / "run" / "tune").iterdir():
        path.unlink()
    run(recipe, tmp_path / "run", resume=True)
    assert weights.read_bytes() == before


def test_banks_stay_in_the_model(texts: Path, base: Path, tmp_path: Path) -> None:
    run(recipe_of(fine_tuning(texts, base, {"per_loop": True, "alpha": 4.0})), tmp_path / "run")
    model, plain = looplm.load(tmp_path / "run" / "tune"), looplm.load(base)
    assert (model.model.config.lora_rank, model.model.config.lora_alpha) == (2, 4.0)
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
    assert model.get_parameter("model.lora.1.up_proj.b").abs().amax(dim=(1, 2)).min() > 0  # every loop's own
    with pytest.raises(UserError, match="cannot carry LoRA banks"):
        export_checkpoint(tmp_path / "run" / "tune", tmp_path / "ouro", "ouro")


def test_the_next_stage_begins_with_the_merged_model(texts: Path, base: Path, tmp_path: Path) -> None:
    data = fine_tuning(texts, base, {})
    again = data["stages"][0] | {"name": "again", "optimizer": {"lr": 1e-12, "weight_decay": 0.0}}
    whole = {key: value for key, value in again.items() if key != "lora"} | {"name": "whole"}
    data["stages"] += [again, whole]
    run(recipe_of(data), tmp_path / "run")
    tuned = looplm.load(tmp_path / "run" / "tune").state_dict()
    for stage in ("again", "whole"):
        for name, weight in looplm.load(tmp_path / "run" / stage).state_dict().items():
            torch.testing.assert_close(weight, tuned[name], rtol=0, atol=1e-7, msg=f"{stage}: {name}")
    assert json.loads((tmp_path / "run" / "again-adapter" / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(tmp_path / "run" / "tune")


@pytest.mark.parametrize(
    "lora", [{}, {"per_loop": True}, {"targets": ["v_proj"], "also_train": ["norm.weight"]}], ids=str
)
def test_what_is_planned_is_what_is_trained(lora: dict[str, Any]) -> None:
    stage = tiny_stage(lora={"rank": 2} | lora, freeze=["layers.0.*"])
    model = tiny_model(num_hidden_layers=2, num_prelude_layers=1)
    config = model.model.config
    shapes = lora_shapes(config, stage)
    model = change_for_stage(model, stage)
    freeze_for(model, stage.objective, stage.freeze, stage.lora)
    found = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert found == {name for name, _ in model.named_parameters() if is_trained(name, stage)}
    assert found and not any(".layers.0." in name for name in found)
    held = {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters() if name.endswith(("_a", "_b"))
    }
    assert held == shapes


def test_a_1p4b_fits_on_24_gb() -> None:
    recipe = load_recipe(RECIPES / "lora_ouro_1p4b.yaml")
    stage = plan_run(recipe, 1, 24 * 10**9).stages[0]
    assert stage.fits and stage.memory.total < 0.9 * 24e9
    # Rank 16 on q, k, v, o (2048 -> 2048) and gate, up, down (2048 <-> 5632) of 24 layers, and the gate.
    assert stage.num_trained == 24 * 16 * (4 * 4096 + 3 * 7680) + 2049
    assert stage.num_parameters == 1_434_652_673
    # Projections in two bytes, embedding, head, norms and corrections in four.
    narrow = 24 * (4 * 2048**2 + 3 * 2048 * 5632)
    assert stage.memory.parameters == 2 * narrow + 4 * (stage.num_parameters - narrow + stage.num_trained - 2049)
    assert stage.memory.moments == 2 * stage.memory.gradients == 8 * stage.num_trained
    # The same with everything trained, or with the base in float32 and nothing run again, does not fit.
    (whole,) = plan_run(recipe.model_copy(update={"stages": (recipe.stages[0].model_copy(update={"lora": None}),)}), 1,
                        24 * 10**9).stages  # fmt: skip
    assert whole.fits is False and whole.length is not None and stage.length is not None
    assert stage.length.flops == pytest.approx(whole.length.flops * 2 / 3)


def test_copies_of_frozen_weights() -> None:
    """Autocast makes them at every use, and the backward pass keeps each."""

    def casts(**fields: Any) -> int:
        stage = tiny_stage(lora={"rank": 2, "base": fields.pop("base", "fp32")}, precision="bf16", **fields)
        return estimate_memory(tiny_model().model.config, stage, 2).casts

    corrections = 2 * sum(
        math.prod(s) for s in lora_shapes(tiny_model().model.config, tiny_stage(lora={"rank": 2})).values()
    )
    assert casts() == 3 * casts(activation_checkpointing="loop")
    assert 3 * corrections < casts(base="bf16") < casts() // 3


@pytest.mark.parametrize(
    "lora", [{"rank": 2, "also_train": ["early_exit_gate.*"]}, {"rank": 2, "per_loop": True}], ids=str
)
def test_two_ranks_are_one_process(lora: dict[str, Any]) -> None:
    """Sharded, gathered, merged."""
    stage = {"lora": lora, "num_steps": 3, "optimizer": {"lr": 3e-2}}
    (alone,) = in_processes("train_lora", 1, grouped=False, stage=stage)
    for found in in_processes("train_lora", 2, stage=stage):
        assert found["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        assert found["merged"].keys() == alone["merged"].keys()
        for name, weight in alone["merged"].items():
            torch.testing.assert_close(found["merged"][name], weight, atol=2e-4, rtol=1e-3, msg=name)


@pytest.mark.slow
def test_a_base_in_bfloat16_is_sharded_too() -> None:
    stage = {"lora": {"rank": 2, "base": "bf16"}, "precision": "bf16", "num_steps": 2}
    found = in_processes("train_lora", 2, stage=stage)
    assert torch.equal(found[0]["merged"]["model.norm.weight"], found[1]["merged"]["model.norm.weight"])


@pytest.mark.parametrize(
    ("lora", "stage", "said"),
    [
        ({"per_loop": True, "targets": ["q_proj"]}, {}, "per_loop banks"),
        ({"per_loop": True, "merge": False}, {}, "per_loop banks"),
        ({"base": "bf16"}, {}, "needs precision: bf16"),
        ({"targets": ["query"]}, {}, "targets"),
        ({"rank": 0}, {}, "rank"),
        ({}, {"objective": {"kind": "gate_loss"}}, "gate_loss trains the gate alone"),
        ({"also_train": ["gate.*"]}, {}, "lora.also_train names 'gate"),
        ({"also_train": ["layers.0.*"]}, {}, "leaves frozen"),
        ({}, {"freeze": ["injection.*"]}, "freeze names 'injection"),
    ],
    ids=str,
)
def test_refused(
    texts: Path, base: Path, tmp_path: Path, lora: dict[str, Any], stage: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        run(recipe_of(fine_tuning(texts, base, lora, **stage)), tmp_path / "run")
    assert not (tmp_path / "run" / "telemetry.jsonl").exists()


def test_an_unmerged_adapter_is_the_last_stage_s(texts: Path, base: Path) -> None:
    data = fine_tuning(texts, base, {"merge": False})
    data["stages"] = [data["stages"][0], data["stages"][0] | {"name": "more"}]
    with pytest.raises(UserError, match="stage tune must merge its adapter"):
        recipe_of(data)
    data = fine_tuning(texts, base, {})
    data["stages"] = [data["stages"][0], data["stages"][0] | {"name": "tune-adapter"}]
    with pytest.raises(UserError, match="a stage cannot be called tune-adapter"):
        recipe_of(data)


@pytest.mark.parametrize("base", ["fp32", "bf16"])
def test_what_autograd_keeps_of_a_lora_step(base: str) -> None:
    stage = tiny_stage(seq_len=64, batch_tokens=192, precision="bf16", lora={"rank": 4, "base": base})
    model = tiny_model(hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=32, vocab_size=300)
    config = model.model.config
    model = change_for_stage(model, stage)
    freeze_for(model, stage.objective, stage.freeze, stage.lora)
    held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        return kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    ids = torch.randint(0, 300, (3, 64))
    documents = (torch.arange(64) >= 32).long().expand_as(ids)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        expected_loss(model, model.model(ids, document_ids=documents), ids, beta=0.1)
    found = sum(tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in held)
    memory = estimate_memory(config, stage, 3, dense_mask=True)
    temporaries = 3 * 64 * (16 * 64 + 2 * 4 * 96) + 3 * 64**2
    assert 0.97 * found <= memory.activations + memory.casts - temporaries <= 1.1 * found
