"""What the loops of a lab checkpoint do, beside the layers of its dense twin: every analysis on both, and one page.

    looplm lab study fold --seeds 1 --out runs/fold
    python examples/lab_findings.py runs/fold/cells/1x4-seed0/run/gate runs/fold/cells/4x1-seed0/run/train \\
        runs/findings --generator looplm.lab.fold:documents --arguments '{"max_k": 4}'

Both models are asked questions that the task holds out. OUT gets the pages of `looplm analyze` for each, and
`findings.html` with what there is to compare. Layers of the dense model are taken for as many loops as the other model
has: loop r of both ends after the same share of the work.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from looplm.analysis.lens import LevelReading
from looplm.cli.analyze import app
from looplm.cli.analyze_inputs import generator_prompts, parse_arguments
from looplm.errors import UserError
from looplm.hf.load import load
from looplm.report.analysis_plots import levels_figure
from looplm.report.analysis_sections import share_with_error
from looplm.report.page import page_html, write_pair
from looplm.report.sections import figure, table
from looplm.report.tables import Cells, terminal_table

Numbers = dict[str, Any]
"""What the analyses of one model have written, by the name of the analysis."""

READING = (
    "Does the answer change between loops: the first table; depth is used where harder levels change later. Where the "
    "right answer appears: the figures and the next two tables. What a loop's state says: the fourth; its own answer "
    "must be readable at its end, and the next loop's hardly better than from the prompt's last token alone if that "
    "loop still does the work. What it causes: the last two, the state at one loop and position replaced by that of "
    "another question. Moved: 1 means that it carries all of the difference. Spliced: 100 % means that the answer "
    "becomes that of the question which begins like the other one up to there, so that this state is all that is kept "
    "of the beginning. ± is one standard error over questions, for probes over folds. The head of the dense model was "
    "never trained on its early layers, so read its figure and first three tables with care; its patches need no head "
    "there."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("looped", help="checkpoint of the looped model")
    parser.add_argument("dense", help="checkpoint of its dense twin, of one loop")
    parser.add_argument("out", type=Path)
    parser.add_argument("--generator", required=True, help="documents of a task of the lab")
    parser.add_argument("--arguments", default="{}", help="the generator's arguments, as JSON")
    parser.add_argument("--hardest", type=int, help="level of probes and patches; the task's last if left out")
    parser.add_argument("--count", type=int, default=2000, help="questions for answers and probes")
    parser.add_argument("--few", type=int, default=200, help="questions for the lens and for patches")
    given = parser.parse_args()

    levels = [one.level for one in generator_prompts(given.generator, parse_arguments(given.arguments), None, 100, 0)]
    hardest = levels[-1] if given.hardest is None else given.hardest
    if hardest is None:
        raise UserError(f"{given.generator} is no task of the lab, whose questions have levels.")
    loops, layers = load(given.looped).model.config.num_loops, load(given.dense).model.config.num_hidden_layers
    per_loop, rest = divmod(layers, loops)
    if rest:
        raise UserError(f"{layers} layers of the dense model cannot be shared by the {loops} loops of the other.")
    task = ["--generator", given.generator, "--arguments", given.arguments]
    many, few, hard = ["--count", str(given.count)], ["--count", str(given.few)], ["--levels", str(hardest)]
    commands = {
        "agreement": many,
        "lens": few,
        "probes": [*many, *hard, "--no-layers"],
        "intervene": [*few, *hard, "--positions", "all"],
    }
    found: dict[str, Numbers] = {}
    for name, subject in (("looped", [given.looped]), ("dense", [given.dense, "--layers-per-loop", str(per_loop)])):
        out = given.out / name
        for command, options in commands.items():
            app([command, *subject, *task, *options, "--out", str(out)], standalone_mode=False)
        found[name] = {command: json.loads((out / f"{command}.json").read_text("utf-8")) for command in commands}

    tables = compared(found, hardest)
    for cells in tables:
        Console().print(terminal_table(cells))
    links = " ".join(
        f'<a href="{name}/{command}.html">{name}: {command}</a>' for name in found for command in commands
    )
    pictures = [
        figure(levels_figure([LevelReading(**one) for one in numbers["lens"]["levels"]], name), f"The {name} model.")
        for name, numbers in found.items()
    ]
    parts = ["<main>", '<div class="figures">', *pictures, "</div>", *map(table, tables), f"<p>{links}</p>", "</main>"]
    page = page_html("What loops do, and layers", READING, parts)
    print(*write_pair(given.out, "findings", json.dumps(found, indent=1) + "\n", page))


def compared(found: dict[str, Numbers], hardest: int) -> list[Cells]:
    """The tables of the page: rows of the looped model, then of the dense one."""
    loops = [f"Loop {loop + 1}" for loop in range(len(found["looped"]["agreement"]["agreement"]["matrix"]))]

    def cells(title: str, what: str, columns: list[str], rows: Callable[[Numbers], list[list[str]]]) -> Cells:
        together = [(name, *row) for name, numbers in found.items() for row in rows(numbers)]
        return Cells(title, ("Model", what, *columns), tuple(together))

    changed = [f"To {loop.lower()}" for loop in loops[1:]]
    probed = ["Own answer", "Next answer", "Right answer", "Next, last token", "Right, last token"]
    return [
        cells("Answers that one more loop changes", "Level", changed, changes),
        cells("Right answers", "Level", loops, rights),
        cells("Nats of the right answer", "Level", loops, nats),
        cells(f"AUC of linear probes at the end of a loop, level {hardest}", "Loop", probed, probes),
        cells(f"Moved by another question's state, level {hardest}", "Position", loops, moved),
        cells(f"Spliced by another question's state, level {hardest}", "Position", loops, spliced),
    ]


def changes(numbers: Numbers) -> list[list[str]]:
    return [
        [str(one["level"]), *(share_with_error(share, one["num_prompts"]) for share in one["changed"])]
        for one in numbers["agreement"]["by_level"]
    ]


def rights(numbers: Numbers) -> list[list[str]]:
    return [
        [str(one["level"]), *(share_with_error(share, one["num_prompts"]) for share in one["accuracy"])]
        for one in numbers["agreement"]["by_level"]
    ]


def nats(numbers: Numbers) -> list[list[str]]:
    readings = numbers["lens"]["levels"]
    ends = [one for one in readings if one["layer"] == max(reading["layer"] for reading in readings)]
    return [
        [str(level), *(f"{one['nats']:.2f} ± {one['nats_stderr']:.2f}" for one in ends if one["level"] == level)]
        for level in dict.fromkeys(one["level"] for one in ends)
    ]


def probes(numbers: Numbers) -> list[list[str]]:
    *answers, right = numbers["probes"]["probes"]["grids"]
    rows = []
    for loop in range(len(answers)):
        following = answers[loop + 1] if loop + 1 < len(answers) else None
        after = [with_error(following, loop) if following else "", with_error(right, loop)]
        alone = [
            "" if one is None or one["token_auc"] is None else f"{one['token_auc']:.3f}" for one in (following, right)
        ]
        rows.append([str(loop + 1), with_error(answers[loop], loop), *after, *alone])
    return rows


def with_error(grid: Numbers, loop: int) -> str:
    """Of the probe at the end of a loop; empty where there was nothing to tell apart."""
    auc, error = grid["auc"][loop][-1], grid["stderr"][loop][-1]
    return "" if auc is None else f"{auc:.3f} ± {error:.3f}"


def by_position(numbers: Numbers, show: Callable[[Numbers], str]) -> list[list[str]]:
    """What `show` says of the patches by another question's state, a row a position."""
    effects = numbers["intervene"]["patches"][0]["effects"]
    return [
        [str(place), *(show(one) for one in effects if one["position"] == place)]
        for place in dict.fromkeys(one["position"] for one in effects)
    ]


def moved(numbers: Numbers) -> list[list[str]]:
    return by_position(numbers, lambda one: f"{round(one['moved'], 2) + 0.0:.2f} ± {one['moved_stderr']:.2f}")


def spliced(numbers: Numbers) -> list[list[str]]:
    return by_position(numbers, lambda one: "" if one["spliced"] is None else f"{one['spliced']:.1%}")


if __name__ == "__main__":
    main()
