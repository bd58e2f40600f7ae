"""The injections against their formulas, at their starting values and off them."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch

from looplm.model.config import Injection, LoopedConfig
from looplm.model.injection import (
    AddInjection,
    ConcatInjection,
    LayerInjections,
    ScalarInjection,
    build_injection,
)
from looplm.model.looped import LoopedTransformer

MakeModel = Callable[..., LoopedTransformer]
MakeConfig = Callable[..., LoopedConfig]


@pytest.fixture
def embeds() -> torch.Tensor:
    return torch.randn(2, 5, 12, dtype=torch.float64)


@pytest.fixture
def state() -> torch.Tensor:
    return 30 * torch.randn(2, 5, 12, dtype=torch.float64)


def test_scalar_mixes_the_embedding_with_the_normed_state(
    make_config: MakeConfig, embeds: torch.Tensor, state: torch.Tensor
):
    injection = ScalarInjection(make_config(injection="scalar")).double()
    scale = torch.nn.init.uniform_(injection.norm.get_parameter("weight"), 0.5, 1.5)
    torch.nn.init.constant_(injection.logit, 0.7)
    w = 1 / (1 + torch.tensor(-0.7, dtype=torch.float64).exp())
    normed = scale * state / (state.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(injection(embeds, state), w * embeds + (1 - w) * normed, rtol=1e-7, atol=1e-7)


def test_scalar_starts_as_nearly_the_embedding(make_model: MakeModel, make_config: MakeConfig):
    """w = 0.990, and the state, whatever its size, comes in at one hundredth of the embeddings' size."""
    injection = LoopedTransformer(make_config(injection="scalar", hidden_size=64)).injection
    assert injection is not None
    size = 0.02
    embeds = size * torch.randn(1, 50, 64)
    for state_size in (0.1, 40.0):
        mixed = injection(embeds, state_size * torch.randn(1, 50, 64))
        rest = mixed - torch.sigmoid(torch.tensor(4.6)) * embeds
        assert rest.square().mean().sqrt().item() == pytest.approx(0.00995 * size, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scalar_keeps_the_small_share_of_the_state_in_low_precision(make_config: MakeConfig, dtype: torch.dtype):
    """1 - w taken from a rounded w = 0.99 would be a fifth off in bfloat16."""
    injection = ScalarInjection(make_config(injection="scalar", hidden_size=64)).to(dtype)
    state = torch.randn(1, 50, 64).to(dtype)
    mixed = injection(torch.zeros_like(state), state)
    assert mixed.dtype == dtype
    share = mixed.float().square().mean().sqrt().item()  # the norm's vector is one here
    assert share == pytest.approx(0.00995, rel=0.02)


def test_add(embeds: torch.Tensor, state: torch.Tensor):
    assert torch.equal(AddInjection()(embeds, state), state + embeds)


def test_concat_is_one_matrix_on_both(make_config: MakeConfig, embeds: torch.Tensor, state: torch.Tensor):
    injection = ConcatInjection(make_config(injection="concat")).double()
    weight = torch.nn.init.normal_(injection.proj.weight)
    expected = state @ weight[:, :12].T + embeds @ weight[:, 12:].T
    torch.testing.assert_close(injection(embeds, state), expected, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("injection", ["concat", "concat_layers"])
def test_concat_starts_neutral(make_config: MakeConfig, injection: str):
    plain = LoopedTransformer(make_config()).double()
    concat = LoopedTransformer(make_config(injection=injection)).double()
    concat.load_state_dict(plain.state_dict(), strict=False)
    ids = torch.randint(31, (2, 5))
    for a, b in zip(plain(ids).loop_hidden_states, concat(ids).loop_hidden_states, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def test_concat_random_does_not_start_neutral(make_config: MakeConfig):
    weight = ConcatInjection(make_config(injection="concat_random")).proj.weight
    assert not torch.equal(weight[:, :12], torch.eye(12))


def test_the_norms_before_concat_make_both_of_one_size(
    make_config: MakeConfig, embeds: torch.Tensor, state: torch.Tensor
):
    injection = ConcatInjection(make_config(injection="concat_norm")).double()
    torch.nn.init.normal_(injection.proj.weight)
    torch.testing.assert_close(injection(embeds, state), injection(7 * embeds, state / 9), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("injection", [name for name in get_args(Injection) if name != "none"])
def test_enters_from_the_second_loop_on(make_model: MakeModel, injection: str):
    plain, injected = make_model(), make_model(injection=injection)
    injected.load_state_dict(plain.state_dict(), strict=False)
    ids = torch.randint(31, (2, 5))
    a, b = plain(ids).loop_hidden_states, injected(ids).loop_hidden_states
    assert torch.equal(a[0], b[0])
    assert (a[1] - b[1]).abs().max() > 1e-2


def test_what_is_injected_is_the_state_after_the_prelude(make_model: MakeModel):
    model = make_model(num_prelude_layers=1, injection="add", num_loops=2)
    ids = torch.randint(31, (2, 5))
    context = model.context(ids)
    embeds = model.encode(ids, context)
    assert (embeds - model.embed_tokens(ids)).abs().max() > 1e-2
    state = model.readout(model.run_core(embeds, 0, embeds, context)).state
    plain = make_model(num_prelude_layers=1, num_loops=2)
    by_hand = plain.readout(plain.run_core(state + embeds, 1, embeds, context)).hidden
    torch.testing.assert_close(model(ids).loop_hidden_states[1], by_hand, rtol=0, atol=1e-13)


def test_build(make_config: MakeConfig):
    assert build_injection(make_config(injection="none")) is None
    kinds = {
        "scalar": ScalarInjection,
        "add": AddInjection,
        "concat": ConcatInjection,
        "concat_random": ConcatInjection,
        "concat_norm": ConcatInjection,
        "concat_layers": LayerInjections,
    }
    for name, kind in kinds.items():
        assert isinstance(build_injection(make_config(injection=name)), kind)


def test_no_parameter_is_a_scalar(make_config: MakeConfig):
    """fully_shard refuses parameters without a dimension."""
    for name in ("scalar", "concat", "concat_norm"):
        assert all(p.ndim for p in LoopedTransformer(make_config(injection=name, lora_rank=1)).parameters())
