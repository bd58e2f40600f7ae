"""What must hold for every way to wire a looped model, over the whole grid of norms, loop states and injections."""

import itertools
from collections.abc import Iterator
from typing import Any, get_args

import torch
from torch import Tensor, nn

from looplm.model.config import FinalNorm, Injection, LoopedConfig, LoopState, NormPlacement
from looplm.model.gate import exit_entropy, exit_pdf
from looplm.model.looped import LoopedTransformer

EXTRAS: tuple[dict[str, Any], ...] = (
    {},
    {"lora_rank": 2},
    {"num_prelude_layers": 1, "num_coda_layers": 1},
    {"qk_norm": True, "attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
)


def every_config() -> Iterator[LoopedConfig]:
    """5 placements x 3 final norms x 2 loop states x 7 injections, taking the extras in turn."""
    grid = itertools.product(get_args(NormPlacement), get_args(FinalNorm), get_args(LoopState), get_args(Injection))
    for i, (placement, final_norm, loop_state, injection) in enumerate(grid):
        yield LoopedConfig(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=4,
            num_loops=2,
            norm_placement=placement,
            final_norm=final_norm,
            loop_state=loop_state,
            injection=injection,
            **EXTRAS[i % 4],
        )


def expected_reading(model: LoopedTransformer, ids: Tensor, attention_mask: Tensor) -> Tensor:
    """A stand-in for the training loss: something of every loop, weighted by its exit probability, and the entropy."""
    out = model(ids, attention_mask=attention_mask)
    readings = torch.stack([hidden.tanh().mean(-1) for hidden in out.loop_hidden_states])
    return (exit_pdf(out.gate_logits) * readings - 0.1 * exit_entropy(out.gate_logits)).sum()


def test_gradients_are_finite_and_reach_every_parameter():
    """All but LoRA's a get one that is not zero; a waits for b, which starts at zero. The padding is on the left."""
    ids = torch.randint(11, (2, 4))
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    for config in every_config():
        model = LoopedTransformer(config)
        # At the usual standard deviation of 0.02 the queries of so small a model get next to no gradient.
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.any():
                nn.init.normal_(parameter, std=0.4)
        value = expected_reading(model, ids, mask)
        value.backward()
        assert torch.isfinite(value), config
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, (name, config)
            assert torch.isfinite(parameter.grad).all(), (name, config)
            waits = name.startswith("lora.") and name.endswith(".a")
            assert waits or parameter.grad.any(), (name, config)


def test_bfloat16_is_near_float32_and_stays_bfloat16():
    """As weights or by autocast; no norm, table, scalar or LoRA scale widens a bfloat16 state on its way."""
    ids = torch.randint(11, (2, 4))
    for config in every_config():
        model = LoopedTransformer(config)
        with torch.no_grad():
            exact = model(ids)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                mixed = model(ids)
            narrow = model.bfloat16()(ids)
        assert narrow.gate_logits.dtype == torch.bfloat16, config
        for out in (mixed, narrow):
            for ours, wide in zip(out.loop_hidden_states, exact.loop_hidden_states, strict=True):
                assert (ours.float() - wide).norm() < 0.1 * wide.norm(), config
        assert all(hidden.dtype == torch.bfloat16 for hidden in narrow.loop_hidden_states), config
