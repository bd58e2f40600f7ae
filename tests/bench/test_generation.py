"""The sides that are compared do the work that they are said to do."""

import dataclasses

import pytest
import torch

from looplm.bench.dense_llama import dense_llama
from looplm.bench.generation import (
    SMOKE,
    Scripted,
    Side,
    drawn_depths,
    lock_step,
    random_model,
    random_prompts,
    step_seconds,
)
from looplm.bench.prompts import task_prompts
from looplm.errors import UserError
from looplm.inference import Engine


def test_the_dense_llama_stores_its_layers_once():
    sizes = dataclasses.replace(SMOKE, num_layers=2)
    model = dense_llama(sizes)
    assert len(model.model.layers) == 8
    stored = {p.data_ptr() for p in model.model.layers.parameters()}
    assert stored == {p.data_ptr() for p in model.model.layers[:2].parameters()}
    assert len({layer.self_attn.layer_idx for layer in model.model.layers}) == 8


def test_lock_step_waits_for_the_deepest_of_a_batch():
    depths = drawn_depths(4, 20, 4)
    locked = lock_step(depths, 2)
    for first in (0, 2):
        deepest = [max(column) for column in zip(*depths[first : first + 2], strict=True)]
        assert locked[first] == locked[first + 1] == deepest
    assert {depth for row in depths for depth in row} == {1, 2, 3, 4}


@pytest.mark.parametrize("batch", [1, 2])
def test_scripted_depths_are_what_the_engine_does(batch):
    """In one batch, or one text after another."""
    model, depths = random_model(SMOKE), drawn_depths(2, SMOKE.max_tokens, 4)
    engine = Engine(model, max_batch=batch)
    side = Side(engine, random_prompts(2, 4, 64), SMOKE.max_tokens, lambda: [Scripted(row) for row in depths])
    side.run()
    side.run()
    assert side.loops == depths
    assert side.stats.claimed_loops == sum(sum(row[1:]) for row in depths)
    assert side.stats.generated_tokens == 2 * (SMOKE.max_tokens - 1)
    assert side.stats.prompt_weight_passes == 0 and len(side.seconds) == 2
    assert torch.is_inference_mode_enabled() is False


def test_steps_after_a_long_prompt_are_timed_without_reading_it():
    engine = Engine(random_model(SMOKE, 40), max_batch=2, share_prefixes=False)
    assert len(step_seconds(engine, random_prompts(2, 40, 64), 6, 4)) == 4
    assert engine.stats.prompt_token_loops == 2 * 4  # the last position alone
    assert engine.stats.weight_passes == 4 * 5


def test_questions_of_a_task_are_cut_to_one_length():
    arguments = {"max_k": 4, "seed": 1}
    prompts = task_prompts("looplm.lab.fold:documents", arguments, 5, 3)
    assert [len(prompt) for prompt in prompts] == [3] * 5
    with pytest.raises(UserError, match="questions of 9 tokens"):
        task_prompts("looplm.lab.fold:documents", arguments, 5, 9)
