"""A generated text for the terminal, every token marked with the loop it left at."""

from collections.abc import Sequence

from rich.text import Text

LOOP_STYLES = ("yellow", "cyan", "bold blue", "bold magenta", "bold red", "bold reverse yellow", "bold reverse cyan")
"""Styles of loops 1, 2, ...; deeper ones take the last."""


def depth_text(prompt: str, pieces: Sequence[str], loops: Sequence[int], colours: bool) -> Text:
    """Prompt and continuation; `pieces` is the text of each token, `loops` the loop, from 1, at which each left.

    Without colours, the loop follows each token as a superscript. Raises ValueError for unequal lengths.
    """
    text = Text(prompt, style="dim")
    for piece, loop in zip(pieces, loops, strict=True):
        text.append(piece, style=f"not dim {loop_style(loop)}")
        if not colours:
            text.append(superscript(loop))
    return text


def legend(loops: Sequence[int], num_loops: int, colours: bool) -> Text:
    """How many tokens left at each loop, 1 to `num_loops` or as deep as any went."""
    text = Text("left at  ")
    for loop in range(1, max(num_loops, *loops) + 1):
        mark = "" if colours else f" {superscript(loop)}"
        text.append(f"loop {loop}{mark}", style=loop_style(loop))
        text.append(f" {list(loops).count(loop) / len(loops):.0%}  ")
    return text


def loop_style(loop: int) -> str:
    """Style of the tokens that left at `loop`."""
    return LOOP_STYLES[min(loop, len(LOOP_STYLES)) - 1]


def superscript(number: int) -> str:
    """A number in raised digits."""
    return str(number).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
