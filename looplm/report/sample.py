"""A generated text as HTML, every token marked with the loop it left at: by colour, underline and number."""

from html import escape

from looplm.report.canvas import loop_number
from looplm.report.schema import Sample


def sample_html(sample: Sample, num_loops: int) -> str:
    """The text as laid out, its prompt in grey, with a legend and the counts of the work done."""
    tokens = "".join(
        f'<span class="t l{loop_number(token.exit_loops)}" data-loop="{token.exit_loops}">{escape(token.text)}</span>'
        for token in sample.tokens
    )
    return (
        f"{_legend(sample, num_loops)}\n"
        f'<div class="sample"><span class="prompt">{escape(sample.prompt)}</span>{tokens}</div>\n'
        f'<p class="note">{escape(sample_counts(sample))}</p>'
    )


def sample_counts(sample: Sample) -> str:
    """What the sample claims and what it cost, in a sentence."""
    count = max(len(sample.tokens), 1)
    depth = sum(token.exit_loops for token in sample.tokens) / count
    computed = sum(token.token_loops for token in sample.tokens) / count
    # The first token comes out of reading the prompt, whose passes are not counted.
    passes = sample.weight_passes / max(count - 1, 1)
    return (
        f"{len(sample.tokens)} tokens at exit threshold {sample.exit_threshold:g}: claimed depth {depth:.2f} loops, "
        f"{passes:.2f} weight passes and {computed:.2f} token-loops per token."
    )


def _legend(sample: Sample, num_loops: int) -> str:
    left_at = [token.exit_loops for token in sample.tokens]
    entries = []
    for loop in range(1, max([num_loops, *left_at]) + 1):
        share = left_at.count(loop) / max(len(left_at), 1)
        entries.append(
            f'<li><span class="t l{loop_number(loop)}" data-loop="{loop}">{loop}</span> '
            f"left at loop {loop}: {share:.0%}</li>"
        )
    return f'<ul class="legend">{"".join(entries)}</ul>'
