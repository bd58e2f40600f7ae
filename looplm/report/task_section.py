"""Scores of tasks by depth, exit rule, cache and cost: tables in Markdown, and a section with plots."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from looplm.model.config import LoopedConfig
from looplm.model.flops import cache_bytes_per_token
from looplm.report import task_figures
from looplm.report.sections import figure, table
from looplm.report.tables import Cells

if TYPE_CHECKING:  # lm-eval, which they need, is an extra
    from looplm.evaluation.depth_sweep import DepthSweep
    from looplm.evaluation.task_gains import CategoryGain
    from looplm.evaluation.task_sweep import TaskResult


def task_tables(
    found: "Sequence[TaskResult]", gains: "dict[str, list[CategoryGain]]", config: LoopedConfig
) -> list[Cells]:
    """Every table that there is something to put into, in reading order."""
    made = [depth_table(found, config), rule_table(found), cache_table(found, config), sample_table(found)]
    made += [gain_table(task, rows) for task, rows in gains.items()]
    made.append(change_table(found))
    return [cells for cells in made if cells.rows]


def depth_table(found: "Sequence[TaskResult]", config: LoopedConfig) -> Cells:
    """Fixed depths down, tasks across: Ouro's Tables 10 to 13."""
    plain = [one for one in found if one.rule == "loops" and one.kv_cache == "per_loop"]
    columns = list(dict.fromkeys(_column(one) for one in plain))
    rows = []
    for depth in sorted({int(one.level) for one in plain}):
        cells = {_column(one): score_text(one.value, one.stderr) for one in plain if one.level == depth}
        note = " (untrained)" if depth > config.num_loops else ""
        rows.append((f"{depth}{note}", *(cells.get(column, "") for column in columns)))
    counts = {one.task: one.num_questions for one in plain}
    asked = ", ".join(f"{count:,} of {task}" for task, count in counts.items())
    return Cells(f"Score ± standard error by depth; questions: {asked}", ("Loops", *columns), tuple(rows))


def rule_table(found: "Sequence[TaskResult]") -> Cells:
    """Every setting with the exact cache: mean loops, score and cost. Ouro's Figure 5 in numbers."""
    plain = [one for one in found if one.kv_cache == "per_loop"]
    rows = [
        (
            one.task, one.setting, _loops(one), score_text(one.value, one.stderr), f"{one.flops / 1e9:.4g}",
            f"{one.seconds:.0f} s", str(one.cut_prompts or ""),
        )
        for one in sorted(plain, key=lambda one: (one.task, one.rule != "loops", one.rule, one.level))
    ]  # fmt: skip
    columns = ("Task", "Setting", "Mean loops", "Score", "GFLOPs a question", "Time", "Cut prompts")
    if not any(one.cut_prompts for one in plain):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Cells("Exit rules: mean loop that tokens were read out at, score, cost", columns, tuple(rows))


def cache_table(found: "Sequence[TaskResult]", config: LoopedConfig) -> Cells:
    """Cache strategies across the settings that were measured with several: Ouro's Table 14."""
    rows = []
    ordered = sorted(found, key=lambda one: (one.task, one.rule, one.level, one.max_gen_toks or 0))
    for _, group in groupby(ordered, key=lambda one: (one.task, one.rule, one.level, one.max_gen_toks)):
        alike = list(group)
        if len(alike) < 2:
            continue
        for one in alike:
            depth = int(one.level) if one.rule == "loops" else config.num_loops
            own = cache_bytes_per_token(config, one.kv_cache, num_loops=depth).decode
            per_loop = cache_bytes_per_token(config, "per_loop", num_loops=depth).decode
            rows.append((one.task, one.setting, score_text(one.value, one.stderr), f"{own / per_loop:.2f}"))
    columns = ("Task", "Setting", "Score", "Cache, of per_loop")
    return Cells("Cache strategies, in generation", columns, tuple(rows))


def sample_table(found: "Sequence[TaskResult]") -> Cells:
    """Several answers to a question: pass@n, majority of n, and what they cost."""
    rows = []
    for one in found:
        by_n = {(score.kind, score.n): score for score in one.samples}
        for n in sorted({score.n for score in one.samples}):
            passed, voted = by_n["pass", n], by_n["majority", n]
            cost = (one.prompt_flops + n * one.decode_flops) / 1e9
            rows.append(
                (
                    one.task, one.setting, str(n), score_text(passed.value, passed.stderr),
                    score_text(voted.value, voted.stderr), f"{cost:.4g}",
                )
            )  # fmt: skip
    columns = ("Task", "Setting", "Answers", "pass@n", "Majority of n", "GFLOPs a question")
    return Cells("Several answers to each question", columns, tuple(rows))


def gain_table(task: str, gains: "Sequence[CategoryGain]") -> Cells:
    """What loops add by kind of question: Ouro's Table 15."""
    if not gains:
        return Cells("", (), ())
    depths = [depth for depth, _, _ in gains[0].by_loop]
    rows = []
    for one in gains:
        gain = "" if one.gain is None else f"{100 * one.gain:+.1f} %"
        gain += "" if one.gain_stderr is None else f" ± {100 * one.gain_stderr:.1f}"
        scores = [score_text(value, stderr) for _, value, stderr in one.by_loop]
        rows.append((one.category, str(one.num_questions), *scores, gain))
    columns = ("Category", "Questions", *(f"Loop {depth}" for depth in depths), f"(L{gains[0].to_loop} - L1) / L1")
    return Cells(f"{task}: gain by category", columns, tuple(rows))


def change_table(found: "Sequence[TaskResult]") -> Cells:
    """The anytime claim on right answers: what one more loop does to their loss."""
    rows = []
    for task, group in groupby(found, key=lambda one: one.task):
        recorded = max((one.loop_changes for one in group), key=len, default=())
        rows += [
            (
                task, f"{one.loop} to {one.loop + 1}", f"{one.mean_nats:+.4f} ± {one.stderr:.4f}",
                f"{one.worse_share:.1%} ± {one.worse_stderr:.1%}", f"{one.num_tokens:,}",
            )
            for one in recorded
        ]  # fmt: skip
    columns = ("Task", "Loops", "Change of the loss, nats a token", "Tokens made worse", "Tokens")
    return Cells("One more loop, on the tokens of right answers", columns, tuple(rows))


def text_table(sweep: "DepthSweep") -> Cells:
    """The same on held-out text, with bits per byte."""
    rows = []
    for point in sweep.points:
        error = point.loss_change_nats_stderr
        change = "" if point.loss_change_nats is None else f"{point.loss_change_nats:+.4f} ± {error or 0:.4f}"
        worse = "" if point.worsened_share is None else f"{point.worsened_share:.1%}"
        bits = f"{point.bits_per_byte:.4f} ± {point.bits_per_byte_stderr:.4f}"
        note = " (untrained)" if point.num_loops > sweep.trained_loops else ""
        rows.append((f"{point.num_loops}{note}", bits, f"{point.accuracy:.1%}", change, worse))
    columns = ("Loops", "Bits per byte", "Tokens right", "One more loop, nats a token", "Tokens made worse by it")
    title = f"Held-out text: {sweep.num_tokens:,} tokens of {sweep.num_documents} documents"
    return Cells(title, columns, tuple(rows))


def markdown(cells: Cells) -> str:
    """A table in Markdown."""
    lines = [cells.columns, tuple("---" for _ in cells.columns), *cells.rows]
    return f"{cells.title}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def tasks_section(found: "Sequence[TaskResult]", made: Sequence[Cells]) -> str:
    """Plots, then tables."""
    parts = ['<h2 id="tasks">Scores by depth</h2>', f"<p>{_HOW_TO_READ}</p>"]
    for task in dict.fromkeys(one.task for one in found):
        mine = [one for one in found if one.task == task]
        parts += [
            f"<h3>{task}</h3>",
            '<div class="figures">',
            figure(task_figures.rule_figure(mine), f"{task}: {mine[0].metric} against mean loops."),
            figure(task_figures.cost_figure(mine), f"{task}: {mine[0].metric} against FLOPs a question."),
            "</div>",
        ]
    return "\n".join([*parts, "<h2>Tables</h2>", *(table(cells) for cells in made)])


_HOW_TO_READ = (
    "Every dot is one setting, at the mean loop that tokens were read out at. A rule is worth having where its dots "
    "lie above the line between fixed depths. Bars are one standard error over questions; the same questions are "
    "asked at every setting, so that differences between settings are known better than the bars suggest. FLOPs leave "
    "attention scores out. A question of given answers pays all loops of its rule's deepest for every token, since "
    "texts that are only read gain nothing from an exit; generated tokens pay the loops that were computed for them."
)


def score_text(value: float, stderr: float | None) -> str:
    """A score with its standard error."""
    return f"{value:.4f}" + ("" if stderr is None else f" ± {stderr:.4f}")


def _loops(one: "TaskResult") -> str:
    return "" if one.mean_loops is None else f"{one.mean_loops:.2f}"


def _column(one: "TaskResult") -> str:
    length = "" if one.max_gen_toks is None else f" ({one.max_gen_toks} tokens)"
    return f"{one.task} {one.metric}{length}"
