from dataclasses import replace

import pytest

from looplm.evaluation.depth_sweep import depth_sweep
from looplm.report.assemble import cache_rows, sample_tokens
from looplm.report.schema import QuickstartReport

from .conftest import CONFIG, synthetic_record


def byte_decode(ids: list[int]) -> str:
    """A byte-level vocabulary: unfinished characters come out as U+FFFD, as tokenizers do it."""
    return bytes(ids).decode("utf-8", errors="replace")


def test_pieces_join_to_the_text_and_characters_stay_whole() -> None:
    text = "aé\n€ <b>"
    ids = list(text.encode())
    tokens = sample_tokens(byte_decode, ids, [1] * len(ids), [4] * len(ids))
    assert "".join(token.text for token in tokens) == text
    assert [token.text for token in tokens] == ["a", "", "é", "\n", "", "", "€", " ", "<", "b", ">"]


def test_an_unfinished_character_at_the_end_is_shown_as_such() -> None:
    ids = [*b"a", *"€".encode()[:2]]
    assert [token.text for token in sample_tokens(byte_decode, ids, [1, 2, 3], [4, 4, 4])] == ["a", "", "\ufffd"]


def test_a_broken_character_inside_the_text_does_not_shift_what_follows() -> None:
    ids = [*b"a", 0xE2, *b"bc"]
    tokens = sample_tokens(byte_decode, ids, [1, 2, 3, 4], [4, 4, 4, 4])
    assert [(token.text, token.exit_loops) for token in tokens] == [("a", 1), ("", 2), ("\ufffdb", 3), ("c", 4)]


def test_depths_must_match_the_tokens() -> None:
    with pytest.raises(ValueError, match="2 depths|shorter"):
        sample_tokens(byte_decode, list(b"abc"), [1, 1], [4, 4])
    with pytest.raises(ValueError, match="shorter"):
        sample_tokens(byte_decode, list(b"ab"), [1, 1], [4])


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
