"""Records of a stage of 120 steps, as a trainer would tell them."""

import io
from dataclasses import replace

from rich.console import Console

from looplm.training.held_out import HeldOutRecord
from looplm.training.telemetry_record import Record

MEASURED = HeldOutRecord(loop_losses=[2.6, 2.4, 2.3, 2.35], bits_per_byte=[1.3, 1.2, 1.15, 1.175], num_tokens=5000)


def record(step: int = 30, **overrides) -> Record:
    """A record of a stage of 120 steps, two seconds each."""
    plain = Record(
        stage="first",
        step=step,
        num_steps=120,
        tokens=100 * step,
        loss=2.0,
        loop_losses=[2.5, 2.25, 2.125],
        exit_pdf=[0.5, 0.3, 0.2],
        entropy=1.03,
        expected_loops=1.7,
        lr=1e-3,
        grad_norm=0.5,
        tokens_per_second=1234.5,
        seconds=2.0 * step,
    )
    return replace(plain, **overrides)


def full_record(step: int = 30) -> Record:
    """A record with everything that only some steps and stages have."""
    return record(
        step,
        num_loops=3,
        exit_pdf_quantiles=[[0.1, 0.2, 0.3, 0.4, 0.5]] * 3,
        expected_loops_quantiles=[1.0, 1.5, 2.0, 2.5, 3.0],
        continue_label=[0.5, 0.25],
        routed_share=[0.5, 0.25, 0.25],
        state_gradients=[[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]],
        flops_utilisation=0.42,
        memory_bytes=3 * 2**30,
        num_skipped=1,
        num_spikes=2,
    )


def plain_console(file: io.StringIO) -> Console:
    return Console(file=file, force_terminal=False, width=200)
