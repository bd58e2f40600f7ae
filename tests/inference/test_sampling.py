"""Sampling parameters, and the distributions that tokens are drawn from."""

import math
from fractions import Fraction

import pytest
import torch

from looplm.errors import UserError
from looplm.inference.sampling import (
    SamplingParams,
    all_finite,
    draw,
    filtered_probabilities,
    make_generator,
    sample,
    token_logprobs,
)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", Fraction(1, 2)),
        ("temperature", 10**400),
        ("n", 10**6),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("min_p", math.nan),
        ("n", 0),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ["", "a"]),
    ],
)
def test_impossible_parameters_are_named(name, value):
    with pytest.raises(UserError, match=name):
        SamplingParams(**{name: value})


def test_one_stop_string_is_a_tuple_of_one():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3]) == SamplingParams(stop=("a", "b"), stop_token_ids=(3,))


def test_temperature_zero_is_the_argmax_and_draws_nothing():
    logits = torch.randn(4, 9)
    assert torch.equal(sample(logits, [SamplingParams()] * 4, [None] * 4), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_without_filters_it_is_the_softmax(temperature):
    logits = torch.randn(3, 9, dtype=torch.float64)
    probs = filtered_probabilities(logits, SamplingParams(temperature=temperature))
    torch.testing.assert_close(probs, (logits / temperature).softmax(-1))


def test_a_tiny_temperature_is_greedy_not_nan():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert filtered_probabilities(logits, SamplingParams(temperature=1e-300)).tolist() == [[0, 1, 0]]


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.51}, [0, 1]),
        ({"top_p": 0.0}, [0]),
        ({"top_p": 0.89}, [0, 1, 2]),
        ({"top_p": 0.91}, [0, 1, 2, 3]),
        ({"min_p": 0.29}, [0, 1, 2]),
        ({"min_p": 0.31}, [0, 1]),
        ({"min_p": 0.5}, [0, 1]),
        ({"top_k": 3, "min_p": 1.0}, [0]),
        # 0.5, 0.25, 0.15 of what top-k leaves are 0.56, 0.28, 0.17.
        ({"top_k": 3, "top_p": 0.55}, [0]),
    ],
)
def test_filters_keep_what_they_say(filters, kept):
    full = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)
    order = torch.tensor([2, 0, 3, 1])  # the filters must not assume sorted logits
    probs = filtered_probabilities(full[order].log()[None], SamplingParams(temperature=1.0, **filters))[0]
    expected = torch.zeros(4, dtype=torch.float64)
    expected[kept] = full[kept] / full[kept].sum()
    torch.testing.assert_close(probs, expected[order])


def test_draw_inverts_the_cumulative_distribution():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64).expand(5, -1)
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.9999, 1 - 2**-53], dtype=torch.float64)
    assert draw(probs, uniform).tolist() == [1, 1, 3, 3, 3]


def test_draws_follow_the_distribution():
    logits = torch.randn(1, 6, dtype=torch.float64)
    params = SamplingParams(temperature=1.0, seed=3, top_p=0.9)
    expected = filtered_probabilities(logits, params)[0]
    generator = make_generator(params)
    count = 4000
    drawn = sample(logits.expand(count, -1), [params] * count, [generator] * count)
    counts = torch.bincount(drawn, minlength=6).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - count * expected)[possible] ** 2 / (count * expected)[possible]).sum()
    assert chi_square < 20.5  # 5 degrees of freedom or fewer, p > 0.001; the seed is fixed


def test_a_row_draws_from_its_own_generator_whatever_the_batch():
    logits = torch.randn(3, 50)
    params = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=2, top_k=20),
    ]
    together = sample(logits, params, [make_generator(p) for p in params])
    for row, p in enumerate(params):
        assert sample(logits[row : row + 1], [p], [make_generator(p)])[0] == together[row]


def test_samples_of_a_seed_differ_and_repeat():
    params = SamplingParams(seed=5)
    draws = [torch.rand(4, generator=make_generator(params, i)) for i in (0, 1, 2, 0)]
    assert torch.equal(draws[0], draws[3])
    assert not torch.equal(draws[0], draws[1]) and not torch.equal(draws[1], draws[2])
    neighbour = torch.rand(4, generator=make_generator(SamplingParams(seed=6)))
    assert not torch.equal(draws[1], neighbour)


def test_without_a_seed_the_global_generator_decides():
    torch.manual_seed(7)
    first = torch.rand(2, generator=make_generator(SamplingParams()))
    second = torch.rand(2, generator=make_generator(SamplingParams()))
    torch.manual_seed(7)
    again = torch.rand(2, generator=make_generator(SamplingParams()))
    assert torch.equal(first, again) and not torch.equal(first, second)


@pytest.mark.parametrize(("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_logprobs_are_wide_and_before_temperature(dtype, wide):
    logits = torch.randn(2, 7).to(dtype)
    tokens = torch.tensor([3, 5])
    logprobs = token_logprobs(logits, tokens)
    assert logprobs.dtype == wide
    torch.testing.assert_close(logprobs, logits.to(wide).log_softmax(-1)[[0, 1], tokens])


def test_non_finite_rows_are_found():
    logits = torch.zeros(4, 3)
    logits[1, 2], logits[2, 0], logits[3, 1] = torch.nan, torch.inf, -torch.inf
    assert all_finite(logits).tolist() == [True, False, False, False]
