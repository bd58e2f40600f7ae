"""From recorded passes to the parts of a report."""

from collections.abc import Sequence
from typing import get_args

from looplm.evaluation.depth_quality import depth_quality_gain
from looplm.evaluation.depth_sweep import depth_sweep, twin_difference
from looplm.evaluation.exit_curve import TABLE_THRESHOLDS, GateStatistics, exit_curve, gate_statistics
from looplm.evaluation.record import DepthRecord
from looplm.model.config import LoopedConfig
from looplm.model.flops import CacheStrategy, cache_bytes_per_token, count_parameters
from looplm.report.schema import CacheRow, Sample, TextModel, TrainingPoint, Twin

_CACHE_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def text_model(
    *,
    name: str,
    description: str,
    config: LoopedConfig,
    record: DepthRecord,
    stage_one_gate: GateStatistics,
    training_tokens: int,
    training_seconds: float,
    training: Sequence[TrainingPoint] = (),
    twin: Twin | None = None,
    sample: Sample | None = None,
    cache_dtype: str = "bfloat16",
) -> TextModel:
    """Measures `record`, the pass of the finished model, and puts everything known of the model together.

    `stage_one_gate` is :func:`~looplm.evaluation.exit_curve.gate_statistics` of a pass before Stage II.
    """
    return TextModel(
        name=name,
        description=description,
        num_parameters=count_parameters(config).total,
        training_tokens=training_tokens,
        training_seconds=training_seconds,
        sweep=depth_sweep(record),
        stage_one_gate=stage_one_gate,
        gate=gate_statistics(record),
        curve=exit_curve(record),
        thresholds=exit_curve(record, TABLE_THRESHOLDS),
        quality=depth_quality_gain(record),
        cache_dtype=cache_dtype,
        cache=cache_rows(config, cache_dtype),
        training=tuple(training),
        twin=twin,
        sample=sample,
    )


def twin_model(
    *,
    config: LoopedConfig,
    record: DepthRecord,
    looped_record: DepthRecord,
    training_tokens: int,
    training_seconds: float,
) -> Twin:
    """Measures the one-loop twin against the looped model at its trained depth."""
    return Twin(
        num_parameters=count_parameters(config).total,
        training_tokens=training_tokens,
        training_seconds=training_seconds,
        sweep=depth_sweep(record),
        difference_bits_per_byte=twin_difference(looped_record, looped_record.gated_loops(), record),
    )


def cache_rows(config: LoopedConfig, dtype: str = "bfloat16") -> tuple[CacheRow, ...]:
    """Cache bytes per token of `config` under every strategy; `dtype` is float32, bfloat16 or float16."""
    rows: list[CacheRow] = []
    for strategy in get_args(CacheStrategy):
        size = cache_bytes_per_token(config, strategy, dtype_bytes=_CACHE_DTYPE_BYTES[dtype])
        rows.append(
            CacheRow(
                strategy=strategy,
                decode_bytes_per_token=size.decode,
                prefill_peak_bytes_per_token=size.prefill_peak,
            )
        )
    return tuple(rows)
