from dataclasses import replace

from looplm.evaluation.depth_sweep import depth_sweep
from looplm.report.assemble import cache_rows
from looplm.report.schema import QuickstartReport

from .conftest import CONFIG, synthetic_record


def test_cache_rows_by_hand() -> None:
    # 2 layers, 2 key-value heads of 32, keys and values: 2 * 2 * 2 * 32 elements a loop.
    rows = {row.strategy: (row.decode_bytes_per_token, row.prefill_peak_bytes_per_token) for row in cache_rows(CONFIG)}
    assert rows == {
        "per_loop": (2048, 2048),
        "fill": (2048, 2048),
        "last": (512, 512),
        "mean": (512, 1024),
        "first": (512, 1024),
    }
    assert [row.decode_bytes_per_token for row in cache_rows(replace(CONFIG, num_loops=1), "float32")] == [1024] * 5


def test_a_text_model_holds_the_figures_of_its_record(report: QuickstartReport) -> None:
    record = synthetic_record((3.70, 3.55, 3.50, 3.51, 3.56, 3.66, 3.80, 3.98), 4, 0.4)
    assert report.trained.sweep == depth_sweep(record)
    assert report.trained.num_parameters == 656_641
    assert [point.threshold for point in report.trained.thresholds][:2] == [0.0, 0.1]
    assert report.trained.curve[-1].mean_loops == report.trained.thresholds[-1].mean_loops == 4
