"""Peaks by name, memory, and what a step is worth in FLOPs."""

import pytest
import torch

from looplm.model.config import LoopedConfig
from looplm.model.flops import training_flops
from looplm.training.telemetry_device import peak_flops, peak_memory_bytes, peak_of, step_flops


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307),
    ],
)
def test_the_peak_of_a_device_is_found_by_its_name(name: str, tera: float):
    assert peak_of(name) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize("name", ["NVIDIA RTX A4000", "NVIDIA RTX A1000", "Tesla T4", "Apple M3", ""])
def test_a_device_that_is_not_listed_has_no_peak(name: str):
    assert peak_of(name) is None


def test_a_cpu_has_no_listed_peak():
    assert peak_flops(torch.device("cpu"), "bf16") is None


def test_memory_of_a_cpu_is_that_of_the_process_in_bytes():
    """With PyTorch loaded it takes more than 64 MiB, and no test takes 64 GiB."""
    used = peak_memory_bytes(torch.device("cpu"))
    assert used is not None and 2**26 < used < 2**36
    assert peak_memory_bytes(torch.device("meta")) is None


@pytest.fixture
def config() -> LoopedConfig:
    return LoopedConfig(
        vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, num_loops=4, num_prelude_layers=1, num_coda_layers=1, injection="concat",
    )  # fmt: skip


def test_a_full_step_is_worth_what_the_cost_model_says(config: LoopedConfig):
    for backprop_loops in (None, 3, 5):
        found = step_flops(config, 512, seq_len=64, num_loops=3, backprop_loops=backprop_loops)
        assert found == training_flops(config, 512, 3, seq_len=64)


def test_loops_without_a_backward_pass_cost_a_third(config: LoopedConfig):
    """Of their core: deep in a long truncated run, a further loop costs its forward and its readout."""
    full = step_flops(config, 512, seq_len=64, num_loops=5) - step_flops(config, 512, seq_len=64, num_loops=4)
    cut = step_flops(config, 512, seq_len=64, num_loops=5, backprop_loops=2) - step_flops(
        config, 512, seq_len=64, num_loops=4, backprop_loops=2
    )
    scores = 2 * 3 * 4 * 16 * 65 / 2  # 3 x 4 H d (S + 1) / 2 FLOPs of the attention scores of the core's layers
    core = 2 * (4 * 16 * 16 + 3 * 16 * 32 + 4 * 16) + 32 * 16  # two layers with their norms, and the injection
    assert full - cut == pytest.approx(512 * (2 / 3) * (6 * core + scores))


def test_stage_two_costs_a_forward(config: LoopedConfig):
    full = step_flops(config, 512, seq_len=64, num_loops=4)
    assert step_flops(config, 512, seq_len=64, num_loops=4, gate_only=True) == pytest.approx(full / 3)


def test_routing_reads_the_head_at_every_loop_and_trains_it_at_one(config: LoopedConfig):
    head = 512 * 2 * 100 * 16
    for num_loops in (1, 4):
        full = step_flops(config, 512, seq_len=64, num_loops=num_loops)
        routed = step_flops(config, 512, seq_len=64, num_loops=num_loops, head_passes=num_loops + 3)
        assert routed - (full - 3 * num_loops * head) == pytest.approx((num_loops + 3) * head)
