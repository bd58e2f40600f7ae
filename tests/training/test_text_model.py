"""A small text model trained with and without a run directory."""

import copy
import shutil
from pathlib import Path

import pytest
import torch

from looplm.data.documents import Document, DocumentSplit
from looplm.training.checkpoint import list_checkpoints
from looplm.training.recipe import CheckpointsRecipe
from looplm.training.telemetry import Telemetry
from looplm.training.text_model import Corpus, TextRecipe, new_model, prepare_corpus, train_stage

RECIPE = TextRecipe(
    vocab_size=280,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_heads=2,
    num_loops=2,
    seq_len=16,
    batch_size=2,
    lr=1e-2,
    beta=0.1,
    num_steps=4,
    num_gate_steps=2,
)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    texts = [Document(f"d{i}", f"loops within loops, number {i}; " * 8) for i in range(6)]
    return prepare_corpus(DocumentSplit(train=texts[:5], held_out=texts[5:]), RECIPE.vocab_size, RECIPE.seq_len)


def test_sizes_at_the_start_are_the_recipe_s(corpus: Corpus) -> None:
    model = new_model(RECIPE, corpus, 2).model
    assert model.embed_tokens.weight.std().item() == pytest.approx(RECIPE.embedding_start, rel=0.05)
    assert set(model.norm.weight.tolist()) == {torch.tensor(RECIPE.final_norm_start).item()}
    assert set(model.layers[0].input_layernorm_2.weight.tolist()) == {torch.tensor(RECIPE.branch_norm_start).item()}
    assert set(model.layers[0].input_layernorm.weight.tolist()) == {1.0}


def test_twin_starts_from_the_same_weights(corpus: Corpus) -> None:
    looped, twin = new_model(RECIPE, corpus, 2), new_model(RECIPE, corpus, 1)
    for (name, one), (_, other) in zip(looped.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(one, other), name


EVERY_OTHER = CheckpointsRecipe(every=2)


def test_checkpoints_are_written_where_there_is_a_run_directory(corpus: Corpus, tmp_path: Path) -> None:
    stage = RECIPE.stage_one(2, "looped")
    without, kept = new_model(RECIPE, corpus, 2), new_model(RECIPE, corpus, 2)
    train_stage(without, stage, RECIPE, corpus, Telemetry())
    result = train_stage(kept, stage, RECIPE, corpus, Telemetry(), tmp_path, checkpoints=EVERY_OTHER)
    assert [c.step for c in list_checkpoints(tmp_path / "checkpoints")] == [2, 4]
    assert result.tokens == 4 * RECIPE.batch_size * RECIPE.seq_len
    for (name, one), (_, other) in zip(without.named_parameters(), kept.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_run_is_resumed_where_it_stood(corpus: Corpus, tmp_path: Path) -> None:
    """Stages keep their checkpoints apart; without one to resume, a stage begins."""
    stage, gate = RECIPE.stage_one(2, "looped"), RECIPE.stage_two("gate")
    straight = new_model(RECIPE, corpus, 2)
    whole = train_stage(straight, stage, RECIPE, corpus, Telemetry(), tmp_path, resume=True, checkpoints=EVERY_OTHER)
    train_stage(copy.deepcopy(straight), gate, RECIPE, corpus, Telemetry(), tmp_path, resume=True, stage_index=1)
    shutil.rmtree(tmp_path / "checkpoints" / "0-looped-00000004")  # as if killed before it was there
    again = new_model(RECIPE.model_copy(update={"seed": 5}), corpus, 2)
    resumed = train_stage(again, stage, RECIPE, corpus, Telemetry(), tmp_path, resume=True)
    assert resumed.tokens == whole.tokens
    for (name, one), (_, other) in zip(straight.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), name
