"""The sides that are compared do the work that they are said to do."""

import dataclasses

import torch

from looplm.bench.dense_llama import dense_llama
from looplm.bench.generation import SMOKE, Side, random_model, random_prompts, scripts
from looplm.inference import Engine


def test_the_dense_llama_stores_its_layers_once():
    sizes = dataclasses.replace(SMOKE, num_layers=2)
    model = dense_llama(sizes)
    assert len(model.model.layers) == 8
    stored = {p.data_ptr() for p in model.model.layers.parameters()}
    assert stored == {p.data_ptr() for p in model.model.layers[:2].parameters()}
    assert len({layer.self_attn.layer_idx for layer in model.model.layers}) == 8


def test_lock_step_waits_for_the_deepest():
    plain, locked = scripts(4, 20, 4), scripts(4, 20, 4, lock_step=True)
    columns = [max(depths) for depths in zip(*(script.depths for script in plain), strict=True)]
    assert all(list(script.depths) == columns for script in locked)
    assert {depth for script in plain for depth in script.depths} == {1, 2, 3, 4}


def test_scripted_depths_are_what_the_engine_does():
    model = random_model(SMOKE)
    exits = scripts(2, SMOKE.max_tokens, 4)
    side = Side(Engine(model), random_prompts(2, 4, 64), SMOKE.max_tokens, lambda: exits)
    side.run()
    claimed = sum(sum(script.depths[1 : SMOKE.max_tokens]) for script in exits)
    assert side.stats.claimed_loops == claimed
    assert side.stats.generated_tokens == 2 * (SMOKE.max_tokens - 1)
    assert side.stats.prompt_weight_passes == 0 and len(side.seconds) == 1
    assert torch.is_inference_mode_enabled() is False
