"""Whole runs of tiny recipes: what they leave behind, and that a run in pieces is the run in one piece."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import looplm
from looplm.errors import UserError
from looplm.hf.load import load_tokenizer
from looplm.training.distributed import Ranks
from looplm.training.recipe_file import dump_recipe, load_recipe
from looplm.training.run import run
from looplm.training.run_directory import LOCK

from .whole_runs import recipe_of, run_until, tiny, told


def test_what_a_run_leaves_behind(straight: Path, texts: Path) -> None:
    names = {".looplm-run", "recipe.yaml", "telemetry.jsonl", "tokenizer", "tokens", "checkpoints", "first", "second"}
    assert {path.name for path in straight.iterdir()} - {LOCK} == names
    assert [path.name for path in (straight / "checkpoints").iterdir()] == ["1-second-00000004"]
    assert load_recipe(straight / "recipe.yaml") == recipe_of(tiny(texts))
    first, second = (looplm.load(straight / name) for name in ("first", "second"))
    assert (first.model.config.num_hidden_layers, second.model.config.num_hidden_layers) == (1, 2)
    assert (first.config.rope_theta, second.config.rope_theta) == (10_000.0, 50_000)
    assert (first.model.config.num_loops, second.model.config.num_loops) == (2, 2)  # the second draws its depth
    assert (first.config.beta, first.dtype) == (0.1, torch.float32)
    assert load_recipe(straight / "second" / "recipe.yaml") == recipe_of(tiny(texts))
    tokenizer = load_tokenizer(straight / "second")
    assert tokenizer.decode(tokenizer.encode("word3 and then 5")) == "word3 and then 5"
    assert first.model.config.vocab_size == len(tokenizer)


def test_what_a_run_tells(straight: Path) -> None:
    lines = told(straight)
    steps = [(line["stage"], line["step"]) for line in lines if "loss" in line]
    assert steps == [("first", i) for i in (1, 2, 3, 4)] + [("second", i) for i in (1, 2, 3, 4)]
    measured = [(line["stage"], line["step"]) for line in lines if "held_out" in line]
    assert measured == [("first", 3), ("first", 4), ("second", 3), ("second", 4)]
    assert len(next(line for line in lines if "held_out" in line)["held_out"]["loop_losses"]) == 4  # two beyond R
    assert {len(line["loop_losses"]) for line in lines if line.get("stage") == "second" and "loss" in line} != {2}


def test_training_lowers_the_loss(texts: Path, tmp_path: Path) -> None:
    data = tiny(texts)
    data["stages"] = [data["stages"][0] | {"num_steps": 40}]
    del data["evaluation"], data["checkpoints"]
    run(recipe_of(data), tmp_path / "run")
    losses = [line["loop_losses"][-1] for line in told(tmp_path / "run") if "loop_losses" in line]
    assert losses[-1] < losses[0] - 1.5


@pytest.mark.parametrize("kills", [(1, 3), (4,), (5, 2), (3, 3)], ids=str)
def test_a_run_in_pieces_is_the_run(
    straight: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: tuple[int, ...]
) -> None:
    recipe, run_dir = recipe_of(tiny(texts)), tmp_path / "run"
    for num_steps in kills:
        run_until(recipe, run_dir, num_steps, monkeypatch)
    run(recipe, run_dir, resume=True)
    for stage in ("first", "second"):
        weights = [(path / stage / "model.safetensors").read_bytes() for path in (run_dir, straight)]
        assert weights[0] == weights[1]
    assert told(run_dir) == told(straight)


def test_a_kill_between_stages_costs_nothing(
    straight: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_until(recipe_of(tiny(texts)), run_dir, 4, monkeypatch)
    assert (run_dir / "first" / "config.json").exists()
    shutil.rmtree(run_dir / "first")  # as if killed before the model was saved
    run(recipe_of(tiny(texts)), run_dir, resume=True)
    for stage in ("first", "second"):
        assert (run_dir / stage / "model.safetensors").read_bytes() == (
            straight / stage / "model.safetensors"
        ).read_bytes()


def test_moments_go_on_into_the_next_stage_unless_reset(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(name: str, **second: Any) -> bytes:
        data = tiny(texts)
        del data["stages"][1]["upcycle"]
        data["stages"][1] |= second
        run(recipe_of(data), tmp_path / name)
        return (tmp_path / name / "second" / "model.safetensors").read_bytes()

    kept = weights("kept")
    assert kept != weights("reset", reset_optimizer=True)
    data = tiny(texts)
    del data["stages"][1]["upcycle"]
    run_until(recipe_of(data), tmp_path / "killed", 4, monkeypatch)  # before the second stage has a checkpoint
    run(recipe_of(data), tmp_path / "killed", resume=True)
    assert (tmp_path / "killed" / "second" / "model.safetensors").read_bytes() == kept


# --- A finished run -------------------------------------------------------------------------------------------------


def test_a_finished_run_resumes_to_nothing(straight: Path, texts: Path) -> None:
    before = told(straight), (straight / "second" / "model.safetensors").stat().st_mtime_ns
    run(recipe_of(tiny(texts)), straight, resume=True)
    assert (told(straight), (straight / "second" / "model.safetensors").stat().st_mtime_ns) == before


def test_a_finished_run_may_get_another_stage(straight: Path, texts: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(straight, tmp_path / "run")
    data = tiny(texts)
    gate = {"name": "gate", "objective": {"kind": "gate_loss"}, "num_loops": 3, "optimizer": {"lr": 0.1}}
    data["stages"].append({**data["stages"][0], **gate})
    run(recipe_of(data), run_dir, resume=True)
    before, after = (looplm.load(run_dir / name).state_dict() for name in ("second", "gate"))
    differ = {name for name in before if not torch.equal(before[name], after[name])}
    assert differ == {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}
    assert looplm.load(run_dir / "gate").config.num_loops == 2  # the depth the model was trained for


def test_a_changed_recipe(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: Path) -> None:
    run_dir = tmp_path / "run"
    run_until(recipe_of(tiny(texts)), run_dir, 3, monkeypatch)
    changed = tiny(texts, seed=1)
    changed["stages"][0] = changed["stages"][0] | {"log_every": 2, "batch_tokens": 128}
    with pytest.raises(UserError) as error:
        run(recipe_of(changed), run_dir, resume=True)
    assert "seed: 0 -> 1" in str(error.value) and "stages.0.batch_tokens: 64 -> 128" in str(error.value)
    assert "log_every: 1" not in str(error.value)
    assert load_recipe(run_dir / "recipe.yaml") == recipe_of(tiny(texts))
    allowed = tiny(texts, checkpoints={"every": 1})
    run(recipe_of(allowed), run_dir, resume=True)
    assert (run_dir / "second" / "model.safetensors").read_bytes() == (
        straight / "second" / "model.safetensors"
    ).read_bytes()
    assert load_recipe(run_dir / "recipe.yaml") == recipe_of(allowed)


# --- Models and data ------------------------------------------------------------------------------------------------


def test_a_checkpoint_goes_on(straight: Path, texts: Path, tmp_path: Path) -> None:
    data = tiny(texts, model={"kind": "checkpoint", "path": str(straight / "first")},
                tokenizer={"kind": "load", "path": str(straight / "first")})  # fmt: skip
    data["stages"] = [data["stages"][0] | {"name": "more", "freeze": ["embed_tokens.*", "layers.*"]}]
    run(recipe_of(data), tmp_path / "run")
    before, after = (looplm.load(path).state_dict() for path in (straight / "first", tmp_path / "run" / "more"))
    assert torch.equal(before["model.layers.0.mlp.up_proj.weight"], after["model.layers.0.mlp.up_proj.weight"])
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])


def test_a_checkpoint_that_is_something_else(straight: Path, texts: Path, tmp_path: Path) -> None:
    shape = tiny(texts)["model"]["architecture"] | {"num_hidden_layers": 5, "num_loops": 2}
    data = tiny(texts, model={"kind": "checkpoint", "path": str(straight / "first"), "architecture": shape},
                tokenizer={"kind": "load", "path": str(straight / "first")})  # fmt: skip
    del data["stages"][1]
    with pytest.raises(UserError, match="not the model that the recipe describes: num_hidden_layers is 1, not 5"):
        run(recipe_of(data), tmp_path / "run")


def test_a_dense_model_is_looped_at_the_start(straight: Path, texts: Path, tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = load_tokenizer(straight / "tokenizer")
    dense = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True,
    ))  # fmt: skip
    dense.save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    shape = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "num_loops": 3, "norm_placement": "pre", "qk_norm": True,
        "tie_word_embeddings": True, "injection": "scalar",
    }  # fmt: skip
    data = tiny(texts, tokenizer={"kind": "load", "path": str(tmp_path / "dense")},
                model={"kind": "convert", "source": str(tmp_path / "dense"), "architecture": shape})  # fmt: skip
    data["stages"] = [data["stages"][0] | {"num_loops": 3, "optimizer": {"lr": 1e-9, "weight_decay": 0.0}}]
    run(recipe_of(data), tmp_path / "run")
    looped = looplm.load(tmp_path / "run" / "first")
    ids = torch.randint(0, len(tokenizer), (2, 12))
    torch.testing.assert_close(looped(ids, num_loops=1).logits, dense(ids).logits, atol=1e-4, rtol=1e-4)
    assert looped.model.config.num_loops == 3


def test_epochs_chat_and_a_shared_cache(straight: Path, texts: Path, tmp_path: Path) -> None:
    turns = [("user", "word{}"), ("assistant", "{} and then")]
    lines = [{"messages": [{"role": role, "content": text.format(i)} for role, text in turns]} for i in range(40)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = tiny(
        texts, tokenizer={"kind": "load", "path": str(straight / "tokenizer")}, data_cache=str(tmp_path / "tokens")
    )
    del data["evaluation"], data["stages"][1], data["stages"][0]["num_steps"]
    data["stages"][0] |= {
        "epochs": 2, "seq_len": 32,
        "data": {
            "packing": "whole", "sources": [{"kind": "files", "paths": [f"{tmp_path}/chat.jsonl"], "format": "chat"}],
        },
    }  # fmt: skip
    run(recipe_of(data), tmp_path / "run")
    assert (tmp_path / "tokens").is_dir() and not (tmp_path / "run" / "tokens").exists()
    last = [line for line in told(tmp_path / "run") if "loss" in line][-1]
    assert last["step"] == last["num_steps"] > 10


def test_a_tokenizer_larger_than_the_vocabulary(straight: Path, texts: Path, tmp_path: Path) -> None:
    data = tiny(texts)
    data["model"]["architecture"]["vocab_size"] = 100
    with pytest.raises(UserError, match="100"):
        run(recipe_of(data), tmp_path / "run")


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no such file"), ("", "no documents|empty|no text"), ('{"text": "a"}\n{"text": 3}\n', "line 2"),
     ("{}\n{", "line")],
)  # fmt: skip
def test_data_that_cannot_be_used(texts: Path, tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "bad.jsonl").write_text(content)
    data = tiny(texts)
    del data["evaluation"]
    data["stages"][0]["data"] = {"sources": [{"kind": "files", "paths": [f"{tmp_path}/bad.jsonl"]}]}
    with pytest.raises(UserError, match=said):
        run(recipe_of(data), tmp_path / "run")


def test_a_batch_that_the_ranks_cannot_share_is_said_first(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = Ranks(0, 3, torch.device("cpu"), False)
    monkeypatch.setattr("looplm.training.run.process_group", lambda: nullcontext(three))
    # Rank 0 alone is here; what it finds it would tell the others.
    monkeypatch.setattr("looplm.training.run._Run.on_main", lambda _, function: function())
    data = tiny(texts)
    data["stages"][0] = {name: value for name, value in data["stages"][0].items() if name != "num_steps"}
    for length in ({"num_steps": 4}, {"tokens": 256}, {"epochs": 1}):
        data["stages"][0] |= {"num_steps": None, "tokens": None, "epochs": None, **length}
        with pytest.raises(UserError, match="Stage first: .* which 3 processes cannot share evenly"):
            run(recipe_of(data), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_empty_texts_are_said_of_the_tokenizer(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n' * 3)
    data = tiny(texts)
    data["stages"][0]["data"] = {"sources": [{"kind": "files", "paths": [f"{tmp_path}/*.jsonl"]}]}
    with pytest.raises(UserError, match=r"no text to train the tokenizer on.*tokenizer\.kind: load"):
        run(recipe_of(data), tmp_path / "run")


def test_what_the_last_stage_lacks_is_said_before_the_first(texts: Path, tmp_path: Path) -> None:
    def complaint(**second: Any) -> str:
        data = tiny(texts)
        data["stages"][1] |= second
        with pytest.raises(UserError) as error:
            run(recipe_of(data), tmp_path / "run")
        assert not (tmp_path / "run").exists()
        return str(error.value)

    nowhere = {"sources": [{"kind": "files", "paths": [f"{tmp_path}/none.txt"]}]}
    assert "none.txt" in complaint(data=nowhere)
    assert "no_such_module" in complaint(data={"sources": [{"kind": "generator", "function": "no_such_module:f"}]})
    assert "freeze names 'layer.*'" in complaint(freeze=["layer.*"])
    assert "num_layers is 1, and the core has 1 layers" in complaint(upcycle={"num_layers": 1})
    assert "warmup_steps 5" in complaint(num_steps=None, tokens=64, schedule={"warmup_steps": 5})
    assert "backprop_loops is 4, and the stage runs 3 loops at most" in complaint(backprop_loops=4)
    assert "micro_batch_rows is 3, and a step has 2 rows" in complaint(backprop_loops=None, micro_batch_rows=3)
    run(recipe_of(tiny(texts)), tmp_path / "run")  # none of which keeps a right recipe from being run there


def test_a_full_disk(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "run" / "recipe.yaml"))

    monkeypatch.setattr("looplm.training.run.dump_recipe", full)
    with pytest.raises(UserError, match="recipe.yaml could not be written: No space left on device.*resume"):
        run(recipe_of(tiny(texts)), tmp_path / "run")


def test_the_resolved_recipe_is_plain_yaml(straight: Path) -> None:
    plain = yaml.safe_load((straight / "recipe.yaml").read_text())
    assert plain["stages"][0]["optimizer"]["weight_decay"] == 0.1 and plain["stages"][1]["reset_optimizer"] is False


@pytest.mark.slow
def test_two_ranks_go_on_with_what_one_began(
    straight: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharded in the middle of the first stage, upcycled while sharded, and saved whole."""
    recipe, run_dir = recipe_of(tiny(texts)), tmp_path / "run"
    run_until(recipe, run_dir, 3, monkeypatch)
    (tmp_path / "tiny.yaml").write_text(dump_recipe(recipe))
    arguments = ["--standalone", "--nproc_per_node", "2", "-m", "looplm", "train", str(tmp_path / "tiny.yaml")]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments, "--out", str(run_dir), "--resume"],
        capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("Done. The model is in") == 1 and "on 2 x cpu" in done.stdout
    for stage in ("first", "second"):
        one, two = (looplm.load(path / stage).state_dict() for path in (straight, run_dir))
        for name, weight in one.items():
            torch.testing.assert_close(two[name], weight, atol=1e-4, rtol=1e-4, msg=f"{stage}: {name}")
    losses = [[line["loss"] for line in told(path) if "loss" in line] for path in (straight, run_dir)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert json.loads((run_dir / "second" / "config.json").read_text())["architectures"] == ["LoopLMForCausalLM"]
