"""What is read off a step: memory, and the parts its time goes to."""

import dataclasses
import sys

import pytest
import torch

from looplm.bench import memory
from looplm.bench.breakdown import PARTS, breakdown, part_of
from looplm.bench.devices import peak_of
from looplm.bench.memory import PeakMeter
from looplm.bench.sides import build_side
from looplm.bench.sizes import SMOKE
from looplm.errors import UserError

MIB = 2**20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_peak_counts_what_was_freed_again_and_not_what_was_there_before():
    before = torch.ones(24 * MIB)  # 96 MiB
    meter = PeakMeter(torch.device("cpu"))
    meter.start()
    assert meter.held > 96 * MIB
    assert meter.peak_bytes() < 16 * MIB
    torch.ones(32 * MIB).sum()  # 128 MiB
    assert 120 * MIB < meter.peak_bytes() < 160 * MIB  # the kernel counts pages in batches
    meter.start()
    assert meter.peak_bytes() < 16 * MIB
    assert before.sum() == 24 * MIB


def test_no_proc_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "absent")
    with pytest.raises(UserError, match="under Linux"):
        PeakMeter(torch.device("cpu"))


@pytest.mark.parametrize("side", ["naive", "looplm"])
def test_shares_of_a_step_sum_to_one_and_head_and_core_are_told_apart(side):
    shares = breakdown(build_side(side, dataclasses.replace(SMOKE, vocab_size=4096, precision="fp32")))
    assert tuple(shares) == PARTS
    assert sum(shares.values()) == pytest.approx(1)
    assert all(share > 0 for share in shares.values())


def test_parts_are_known_by_operator_and_shape():
    assert part_of("aten::mm", [[1024, 512], [512, 49152]], 49152) == "head products"
    assert part_of("aten::addmm_", [[49152, 512], [], []], 49152) == "head products"
    assert part_of("aten::mm", [[1024, 512], [512, 1408]], 49152) == "core products"
    assert part_of("aten::_scaled_dot_product_flash_attention_for_cpu_backward", [], 49152) == "attention"
    assert part_of("aten::_fused_adamw_", [], 49152) == "optimizer"
    assert part_of("aten::exp_", [[42, 49152]], 49152) == "rest"


def test_peaks_are_found_by_whole_words_of_the_name():
    def tflops(name: str) -> float | None:
        peak = peak_of(name)
        return None if peak is None else peak.bf16_tflops

    assert tflops("NVIDIA H200") == tflops("NVIDIA H100 80GB HBM3") == 989
    assert tflops("NVIDIA H100 PCIe") == 756
    assert tflops("NVIDIA A100-SXM4-80GB") == 312
    assert tflops("NVIDIA GeForce RTX 4090") == 165
    assert (tflops("NVIDIA L40S"), tflops("NVIDIA L4"), tflops("NVIDIA A10")) == (362, 121, 125)
    assert tflops("NVIDIA A1000") is None and tflops("AMD EPYC, 2 cores") is None
