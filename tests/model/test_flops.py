"""The cost model: the papers' figures, the real module's tensors, and the FLOPs PyTorch itself counts."""

import inspect
import json
import math
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from looplm.model.cache import GrowingKVCache
from looplm.model.config import FinalNorm, Injection, LoopedConfig, NormPlacement
from looplm.model.flops import (
    CacheStrategy,
    cache_bytes_per_token,
    count_parameters,
    describe,
    expected_inference_flops,
    inference_flops,
    parameter_shapes,
    training_flops,
)
from looplm.model.looped import LoopedTransformer

OURO_1P4B = LoopedConfig(
    vocab_size=49_152,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=128,
    num_loops=4,
    rope_theta=1e6,
    max_position_embeddings=65_536,
)
OURO_2P6B = replace(OURO_1P4B, num_hidden_layers=48)
DENSE_1P4B = replace(OURO_1P4B, num_loops=1)
DENSE_3P9B = replace(OURO_1P4B, num_hidden_layers=72, num_loops=1)
QWEN3_1P7B = LoopedConfig(
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    num_loops=1,
    norm_placement="pre",
    qk_norm=True,
    tie_word_embeddings=True,
)
QWEN3_4B = replace(QWEN3_1P7B, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32)
LOOPED_QWEN = replace(QWEN3_1P7B, num_loops=3, injection="scalar")
LOOPED_QWEN_LORA = replace(LOOPED_QWEN, lora_rank=32)

TINY = LoopedConfig(
    vocab_size=48,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_loops=3,
    max_position_embeddings=64,
)

BATCH_TOKENS = 2_097_152
SCRATCH_TOKENS = (100_000 + 47_684) * BATCH_TOKENS
CONVERSION_TOKENS = 28_611 * BATCH_TOKENS


def rounded(value: float, digits: int = 4) -> float:
    """`value` at the number of significant digits that the papers print."""
    return float(f"{value:.{digits - 1}e}")


# --- The papers' figures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "parameters", "tensors"),
    [(OURO_1P4B, 1_434_652_673, 269), (OURO_2P6B, 2_667_974_657, 533)],
    ids=["ouro-1.4b", "ouro-2.6b"],
)
def test_released_ouro_counts(config: LoopedConfig, parameters: int, tensors: int) -> None:
    count = count_parameters(config)
    assert (count.total, count.num_tensors) == (parameters, tensors)
    assert count.total_separate_head == parameters  # its head is stored already


def test_qwen3_counts_tied_and_separate() -> None:
    count = count_parameters(QWEN3_1P7B)
    assert count.total_without_gate == 1_720_574_976
    assert count.total_separate_head - count.gate == 2_031_739_904
    assert count.head == 0


def test_looped_qwen_counts() -> None:
    count, plain = count_parameters(LOOPED_QWEN_LORA), count_parameters(LOOPED_QWEN)
    assert count.lora == count.total - plain.total == 104_595_456
    assert count.gate + count.injection == 2_049 + 1 + 2_048
    assert count.total == 1_825_174_530
    assert count.total_separate_head == 2_136_339_458


@pytest.mark.parametrize(
    ("config", "parameters"), [(DENSE_1P4B, 1_434_650_624), (DENSE_3P9B, 3_901_294_592)], ids=["1.4b", "3.9b"]
)
def test_dense_baselines_have_no_gate(config: LoopedConfig, parameters: int) -> None:
    assert count_parameters(config).total_without_gate == parameters


def test_training_flops_of_the_two_stage_recipe_and_of_ouro() -> None:
    scratch = training_flops(OURO_1P4B, SCRATCH_TOKENS)
    ouro = training_flops(OURO_1P4B, 3 * 10**12, num_loops=8) + training_flops(OURO_1P4B, 472 * 10**10)
    assert rounded(scratch) == 9.916e21
    assert rounded(ouro) == 3.432e23
    assert rounded(ouro / scratch, 3) == 34.6
    assert rounded(scratch / ouro, 3) == 2.89e-2


def test_training_flops_of_the_conversion() -> None:
    conversion = training_flops(LOOPED_QWEN, CONVERSION_TOKENS)
    pretraining = training_flops(QWEN3_1P7B, 36 * 10**12)
    assert rounded(conversion) == 1.858e21
    assert rounded(pretraining) == 3.716e23
    assert rounded(conversion / pretraining, 3) == 5.00e-3


def test_ratios_to_the_dense_baselines() -> None:
    looped, small, large = (training_flops(c, 1) for c in (OURO_1P4B, DENSE_1P4B, DENSE_3P9B))
    assert rounded(looped / large) == 1.404
    assert looped == 4 * small
    parameters = count_parameters(DENSE_3P9B).total_without_gate / count_parameters(OURO_1P4B).total
    assert rounded(parameters) == 2.719
    assert OURO_1P4B.effective_depth(3) == DENSE_3P9B.effective_depth() == 72


def test_inference_flops_of_the_conversion() -> None:
    looped, dense = inference_flops(LOOPED_QWEN, 2), inference_flops(QWEN3_4B, 1)
    assert rounded(looped) == 6.260e9
    assert rounded(dense) == 8.045e9
    assert rounded(1 - looped / dense) == 0.2219
    # The layer and embedding sizes behind the second figure.
    count = count_parameters(QWEN3_4B)
    assert (count.core, count.embedding) == (36 * 100_930_816, 388_956_160)


@pytest.mark.parametrize(
    ("config", "cache_bytes"), [(OURO_1P4B, 786_432), (OURO_2P6B, 1_572_864)], ids=["ouro-1.4b", "ouro-2.6b"]
)
def test_released_ouro_cache_bytes(config: LoopedConfig, cache_bytes: int) -> None:
    sets_while_reading = {"per_loop": 4, "fill": 4, "last": 1, "mean": 2, "first": 2}
    for strategy in get_args(CacheStrategy):
        held = cache_bytes_per_token(config, strategy)
        assert held.decode == (cache_bytes if strategy in ("per_loop", "fill") else cache_bytes // 4)
        assert held.prefill_peak == sets_while_reading[strategy] * cache_bytes // 4


# --- Against the module ----------------------------------------------------------------------------------------

ALL_BIASES = {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}
WIRINGS: list[dict[str, Any]] = [
    *(
        {"norm_placement": placement, "final_norm": final, "num_prelude_layers": extra, "num_coda_layers": extra}
        for placement, final, extra in product(get_args(NormPlacement), get_args(FinalNorm), (0, 2))
    ),
    *(
        {"injection": injection, "lora_rank": rank, "num_loops": loops, "num_prelude_layers": 1}
        for injection, rank, loops in product(get_args(Injection), (0, 3), (1, 3))
    ),
    *({field: True} for field in (*ALL_BIASES, "qk_norm", "tie_word_embeddings")),
    {**ALL_BIASES, "qk_norm": True, "num_coda_layers": 1, "lora_rank": 2, "injection": "concat"},
    {"loop_state": "raw", "num_key_value_heads": 4, "num_hidden_layers": 1},
]


@pytest.mark.parametrize("wiring", WIRINGS, ids=lambda wiring: "-".join(str(value) for value in wiring.values()))
def test_shapes_are_those_of_the_module(wiring: dict[str, Any]) -> None:
    config = replace(TINY, **wiring)
    with torch.device("meta"):
        module = LoopedTransformer(config)
    stored = {f"model.{name}": tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    if not config.tie_word_embeddings:
        stored["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    shapes = parameter_shapes(config)
    assert shapes == stored

    count = count_parameters(config)
    groups = {k: v for k, v in asdict(count).items() if k not in ("total", "total_separate_head", "num_tensors")}
    assert sum(groups.values()) == count.total == sum(math.prod(shape) for shape in stored.values())
    assert count.num_tensors == len(stored)
    head = config.vocab_size * config.hidden_size
    assert count.total_separate_head == count.total + (head if config.tie_word_embeddings else 0)
    assert count.core == sum(parameter.numel() for parameter in module.layers.parameters())
    assert count.lora == (sum(p.numel() for p in module.lora.parameters()) if module.lora is not None else 0)


def counted_forward_flops(config: LoopedConfig, batch: int, seq_len: int, num_loops: int, heads: int) -> int:
    """What PyTorch counts for one forward pass of `num_loops` loops with the first `heads` of them read out."""
    torch.manual_seed(0)
    model = LoopedTransformer(config).requires_grad_(False)
    ids = torch.randint(config.vocab_size, (batch, seq_len))
    # The counter knows plain matrix products; the CPU's fused attention is opaque to it.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = model(ids, num_loops=num_loops)
        for hidden in output.loop_hidden_states[:heads]:
            linear(hidden, model.embed_tokens.weight)
    return counter.get_total_flops()


def uncounted_by_torch(config: LoopedConfig, num_loops: int) -> int:
    """Twice the layers' vectors (norms, biases), which the papers charge and PyTorch, rightly, does not."""
    vectors = {"prelude": 0, "layers": 0, "coda": 0}
    for name, shape in parameter_shapes(config).items():
        stack = name.split(".")[1]
        if stack in vectors and len(shape) == 1:
            vectors[stack] += math.prod(shape)
    return 2 * (vectors["prelude"] + num_loops * (vectors["layers"] + vectors["coda"]))


@pytest.mark.parametrize("num_loops", [1, 3, 5])
@pytest.mark.parametrize(
    "wiring",
    [
        {},
        {"norm_placement": "magic", "loop_state": "raw"},
        {**ALL_BIASES, "qk_norm": True, "norm_placement": "pre"},
        {"injection": "scalar", "lora_rank": 2, "num_loops": 5},
        {"injection": "concat", "num_prelude_layers": 1, "num_coda_layers": 2, "num_key_value_heads": 4},
        {"injection": "concat_layers"},
    ],
    ids=["ouro", "magic", "qwen", "lora", "prelude-coda-concat", "concat-layers"],
)
def test_inference_flops_are_those_torch_counts(wiring: dict[str, Any], num_loops: int) -> None:
    config, batch, seq_len = replace(TINY, **wiring), 2, 5
    # The plain attention kernel works on the full square: every query is charged all S keys.
    formula = inference_flops(config, num_loops, heads=num_loops, context=seq_len)
    gate = 2 * num_loops * config.hidden_size
    expected = batch * seq_len * (formula + gate - uncounted_by_torch(config, num_loops))
    assert counted_forward_flops(config, batch, seq_len, num_loops, heads=num_loops) == expected


def test_attention_scores_and_head_are_charged_apart() -> None:
    config, loops = replace(TINY, norm_placement="magic"), 2
    gate = 2 * loops * config.hidden_size
    once, twice = (counted_forward_flops(config, 1, 4, loops, heads) / 4 - gate for heads in (1, 2))
    assert once == inference_flops(config, loops, heads=1, context=4)
    assert twice == inference_flops(config, loops, heads=2, context=4)


@pytest.mark.parametrize(
    "wiring", [{}, {"num_prelude_layers": 1, "num_coda_layers": 2}, {"lora_rank": 2}, {"injection": "concat"}]
)
@pytest.mark.parametrize("num_loops", [1, 3])
def test_training_is_three_forwards(wiring: dict[str, Any], num_loops: int) -> None:
    config, tokens, seq_len = replace(TINY, **wiring), 70, 7
    plain = training_flops(config, tokens, num_loops)
    assert plain == 3 * tokens * inference_flops(config, num_loops, heads=num_loops)
    # Causal: the queries of a sequence of 7 read 1, 2, ..., 7 keys, 4 on average.
    causal = sum(inference_flops(config, num_loops, heads=num_loops, context=keys) for keys in range(1, 8)) / 7
    assert training_flops(config, tokens, num_loops, seq_len=seq_len) == pytest.approx(3 * tokens * causal, rel=1e-12)
    assert training_flops(config, tokens) == training_flops(config, tokens, config.num_loops)


@pytest.mark.parametrize("wiring", [{}, {"num_prelude_layers": 1, "num_coda_layers": 2}])
@pytest.mark.parametrize("num_loops", [1, 3, 4])
def test_cache_bytes_are_what_the_exact_cache_holds(wiring: dict[str, Any], num_loops: int) -> None:
    config, seq_len = replace(TINY, **wiring), 6
    cache = GrowingKVCache(config)
    with torch.no_grad():
        LoopedTransformer(config)(torch.zeros(1, seq_len, dtype=torch.long), num_loops=num_loops, cache=cache)
    held = sum(t.numel() * t.element_size() for slots in (cache.keys, cache.values) for t in slots.values())
    expected = cache_bytes_per_token(config, "per_loop", dtype_bytes=4, num_loops=num_loops)
    assert held == seq_len * expected.decode == seq_len * expected.prefill_peak


# --- Exit policies, other strategies, the report ---------------------------------------------------------------


def test_expected_flops_follow_the_exit_distribution() -> None:
    config = replace(TINY, injection="concat", num_prelude_layers=1, num_coda_layers=1)
    exit_pdf = [0.4, 0.3, 0.2, 0.1]
    for depth in range(1, 5):
        surely = [float(loops == depth) for loops in range(1, 5)]
        assert expected_inference_flops(config, surely, context=9) == inference_flops(config, depth, context=9)
    for every, heads in ((False, [1, 1, 1, 1]), (True, [1, 2, 3, 4])):
        mixture = sum(p * inference_flops(config, n, heads[n - 1]) for n, p in enumerate(exit_pdf, start=1))
        assert expected_inference_flops(config, exit_pdf, head_every_loop=every) == pytest.approx(mixture, rel=1e-12)


def test_expected_flops_take_float32_probabilities() -> None:
    exit_pdf = torch.tensor([0.1] * 10).tolist()
    assert expected_inference_flops(TINY, exit_pdf) == pytest.approx(inference_flops(TINY, 5.5), rel=1e-6)
    assert expected_inference_flops(TINY, [0.0, 0.99995]) == inference_flops(TINY, 2)
    assert expected_inference_flops(TINY, [0.99995, 0.0]) == inference_flops(TINY, 1)


def test_shared_caches_keep_one_set() -> None:
    config = replace(TINY, num_prelude_layers=1, num_coda_layers=1)
    layer = 2 * config.num_key_value_heads * config.head_dim * 2
    for strategy in ("last", "mean", "first"):
        assert cache_bytes_per_token(config, strategy).decode == layer * 4
        # With one loop there is nothing to merge: no second set while reading.
        assert cache_bytes_per_token(config, strategy, num_loops=1).prefill_peak == layer * 4
    assert cache_bytes_per_token(config, "per_loop").decode == layer * (1 + 3 * 3)
    assert cache_bytes_per_token(config, "mean").prefill_peak == layer * (1 + 2 * 2 + 1)
    assert cache_bytes_per_token(config, "mean", dtype_bytes=4).decode == layer * 8


def test_report_is_plain_json_and_agrees_with_the_parts() -> None:
    report = asdict(describe(OURO_1P4B))
    assert json.loads(json.dumps(report)) == {**report, "depths": list(report["depths"])}
    assert report["parameters"]["total"] == 1_434_652_673
    assert [depth["num_loops"] for depth in report["depths"]] == [1, 2, 3, 4]
    third = report["depths"][2]
    assert third["effective_depth"] == 72
    assert third["flops"] == inference_flops(OURO_1P4B, 3) == 2 * (72 * 51_388_416 + 100_663_296)
    assert third["flops_head_every_loop"] - third["flops"] == 2 * 2 * 100_663_296
    assert third["flops_full_context"] - third["flops"] == 72 * 4 * 2048 * 65_536
    assert report["training_flops_per_token"] == 24 * (24 * 51_388_416 + 100_663_296)
    assert report["cache"]["per_loop"]["bytes_per_token"]["decode"] == 786_432
    assert report["cache"]["mean"]["bytes_full_context"] == {
        "decode": 196_608 * 65_536,
        "prefill_peak": 393_216 * 65_536,
    }


def test_impossible_numbers_are_refused() -> None:
    for loops in (0, 0.5, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match="expected_loops"):
            inference_flops(TINY, loops)
    for heads, context in ((-1, 0), (math.nan, 0), (1, -1), (1, math.inf)):
        with pytest.raises(ValueError, match="heads is"):
            inference_flops(TINY, 1, heads, context)
    for exit_pdf in ([], [0.5, 0.4], [1.5, -0.5], [math.nan, 1.0]):
        with pytest.raises(ValueError, match="exit_pdf"):
            expected_inference_flops(TINY, exit_pdf)
    with pytest.raises(ValueError, match="num_loops"):
        training_flops(TINY, 1, num_loops=0)
    with pytest.raises(ValueError, match="num_tokens"):
        training_flops(TINY, -1)
    with pytest.raises(ValueError, match="seq_len"):
        training_flops(TINY, 1, seq_len=0)
    # Unwrapped: the suite's own type checks would refuse the name before the function sees it.
    with pytest.raises(ValueError, match="per_loop, fill, last, mean, first"):
        inspect.unwrap(cache_bytes_per_token)(TINY, "lasst")
    with pytest.raises(ValueError, match="num_loops"):
        cache_bytes_per_token(TINY, "last", num_loops=0)


def test_accounting_needs_no_torch() -> None:
    program = "import sys, looplm.model.flops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
