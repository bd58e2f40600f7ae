import pytest

from looplm.report.depth_text import LOOP_STYLES, depth_text, legend, loop_style


def test_with_colours_each_piece_has_the_style_of_its_loop() -> None:
    text = depth_text("the", [" cat", " sat"], [1, 3], colours=True)
    assert text.plain == "the cat sat"
    styled = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styled == {" cat": f"not dim {LOOP_STYLES[0]}", " sat": f"not dim {LOOP_STYLES[2]}"}


def test_without_colours_the_loop_follows_as_a_superscript() -> None:
    assert depth_text("p", ["a", "b"], [1, 12], colours=False).plain == "pa¹b¹²"


def test_depths_past_the_last_style_take_it() -> None:
    assert loop_style(len(LOOP_STYLES) + 5) == LOOP_STYLES[-1]


def test_the_legend_counts_every_loop_up_to_the_deepest() -> None:
    plain = legend([1, 1, 1, 5], 2, colours=False).plain
    assert "loop 1 ¹ 75%" in plain and "loop 2 ² 0%" in plain and "loop 5 ⁵ 25%" in plain and "loop 6" not in plain


def test_pieces_and_loops_must_match() -> None:
    with pytest.raises(ValueError):
        depth_text("p", ["a"], [1, 2], colours=True)
