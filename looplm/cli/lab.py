"""`looplm lab`: the papers' controlled experiments, each a grid of training runs with a table and a plot."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from looplm.errors import UserError

if TYPE_CHECKING:
    from looplm.lab.study import Plan

app = typer.Typer(
    help="The papers' controlled experiments, at paper size on GPUs or small on this machine.", no_args_is_help=True
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Values to change in the recipe of every cell, as in stages.0.num_steps=200.",
        show_default=False,
    ),
]
PresetOption = Annotated[str, typer.Option("--preset", help="small (this machine) or paper (the exact sizes).")]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="Directory; runs/NAME-PRESET by default.", show_default=False)
]
PlanOption = Annotated[
    bool, typer.Option("--plan", help="Print parameters, tokens and FLOPs of every cell, and run nothing.")
]
SeedsOption = Annotated[
    int | None,
    typer.Option("--seeds", help="Seeds of every cell; the preset's by default.", min=1, show_default=False),
]
ProcessesOption = Annotated[
    int | None,
    typer.Option("--processes", help="Cells at a time; one a GPU, or one a core, by default.", min=1,
                 show_default=False),
]  # fmt: skip


@app.command("study")
def study(
    name: Annotated[
        str | None, typer.Argument(help="A shipped study or a YAML file; left out: the list.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    preset: PresetOption = "small",
    out: OutOption = None,
    plan: PlanOption = False,
    seeds: SeedsOption = None,
    processes: ProcessesOption = None,
) -> None:
    """Train a study's grid, and write its table, plot, results.json and runs.csv.

    The same command goes on where it was stopped. A cell that fails is named; the others are not stopped.
    """
    if name is None:
        list_studies()
        return
    run_or_plan(name, overrides, preset, out, plan, seeds, processes)


@app.command("mano")
def mano(
    overrides: Overrides = None, preset: PresetOption = "small", out: OutOption = None, plan: PlanOption = False,
    seeds: SeedsOption = None, processes: ProcessesOption = None,
) -> None:  # fmt: skip
    """Modular arithmetic in prefix form: k layers looped R times beside dense models (Ouro 6.2)."""
    run_or_plan("mano", overrides, preset, out, plan, seeds, processes)


@app.command("capo")
def capo(
    overrides: Overrides = None, preset: PresetOption = "small", out: OutOption = None, plan: PlanOption = False,
    seeds: SeedsOption = None, processes: ProcessesOption = None,
) -> None:  # fmt: skip
    """Bits of knowledge a parameter holds, looped and dense (Ouro 6.1)."""
    run_or_plan("capo", overrides, preset, out, plan, seeds, processes)


@app.command("multihop")
def multihop(
    overrides: Overrides = None, preset: PresetOption = "small", out: OutOption = None, plan: PlanOption = False,
    seeds: SeedsOption = None, processes: ProcessesOption = None,
) -> None:  # fmt: skip
    """Questions of several hops: accuracy against unique training pairs, by loops (Ouro 6.2, appendix B.3)."""
    run_or_plan("multihop", overrides, preset, out, plan, seeds, processes)


@app.command("reachability")
def reachability(
    num_random: Annotated[int, typer.Option("--random", help="Random graphs to check.", min=1)] = 1000,
    max_vertices: Annotated[int, typer.Option("--vertices", help="Most vertices of a random graph.", min=2)] = 64,
    seed: Annotated[int, typer.Option("--seed", help="Of the random graphs.", min=0)] = 0,
) -> None:
    """Check the looped transformer that is built by hand for graph reachability (Ouro, theorem 2).

    Every graph of up to 3 vertices, random larger ones, paths (which need the most loops), and wrong choices, which
    must fail. Status 1 where one is not as it should be. A learned one: looplm lab study reachability.
    """
    from rich.console import Console

    from looplm.cli.train_plan import narrow_table
    from looplm.lab.reachability import check_reachability

    table = narrow_table("Reachability, built by hand", "what", "graphs", "pairs", "wrong\ngraphs", "wrong\npairs", "")
    checks = check_reachability(num_random, max_vertices, seed)
    sound = [(check.wrong_graphs > 0) == check.must_fail for check in checks]
    for check, fine in zip(checks, sound, strict=True):
        numbers = (check.num_graphs, check.num_pairs, check.wrong_graphs, check.wrong_pairs)
        verdict = ("must fail: " if check.must_fail else "") + ("as it should be" if fine else "NOT AS IT SHOULD BE")
        table.add_row(check.what, *(f"{number:,}" for number in numbers), verdict)
    Console().print(table)
    if not all(sound):
        raise typer.Exit(1)


def list_studies() -> None:
    """Prints every shipped study with its question and sizes."""
    from rich.console import Console

    from looplm.lab.study import STUDIES, load_study

    console = Console()
    for path in sorted(STUDIES.glob("*.yaml")):
        _, content = load_study(path)
        console.print(f"[bold]{path.stem}[/bold]: {content.title}", highlight=False)
        console.print(f"  {content.question}", highlight=False, markup=False)
        for preset, size in content.presets.items():
            console.print(f"  {preset}: {size.time}", highlight=False, markup=False)


def run_or_plan(
    name: str, overrides: list[str] | None, preset: str, out: Path | None, only_plan: bool, seeds: int | None,
    processes: int | None,
) -> None:  # fmt: skip
    """Runs a study to its end and shows its table, or prints what it would take."""
    from rich.console import Console

    from looplm.lab.study import plan_study

    planned = plan_study(name, preset, seeds=seeds, overrides=overrides or [])
    if only_plan:
        print_plan(planned)
        return
    from looplm.cli.train import Stopped
    from looplm.lab.study_results import write_results
    from looplm.lab.study_run import StudyStopped, run_study

    console, directory = Console(), out or Path("runs") / f"{planned.name}-{preset}"
    try:
        failed = run_study(planned, directory, processes=processes, console=console)
    except StudyStopped as stop:
        print(f"looplm: {stop} The same command goes on from there.", file=sys.stderr)
        raise Stopped(stop.exit_status) from None
    write_results(planned, directory, failed, console)
    if failed:
        reasons = "".join(f"\n  {cell}: {reason}" for cell, reason in failed.items())
        raise UserError(
            f"{len(failed)} of {len(planned.cells)} cells failed; the same command tries them again.{reasons}"
        )


def print_plan(plan: "Plan") -> None:
    """Parameters, tokens and FLOPs of each cell of the grid, and of all seeds together."""
    from rich.console import Console

    from looplm.cli.train_plan import count, narrow_table, power
    from looplm.lab.study_run import planned_cells

    size = plan.study.presets[plan.preset]  # pyright: ignore[reportArgumentType]
    table = narrow_table(
        f"{plan.study.title} ({plan.preset})", *plan.axes, "params", "core", "loops", "tokens", "FLOPs"
    )
    total = 0.0
    for levels, found in planned_cells(plan):
        total += found.flops or 0.0
        tokens = "?" if found.num_tokens is None else count(found.num_tokens)
        flops = "?" if found.flops is None else power(found.flops, 2)
        table.add_row(*levels.values(), count(found.num_parameters), count(found.core_parameters),
                      str(found.num_loops), tokens, flops)  # fmt: skip
    console, seeds = Console(), len(plan.cells) // len(plan.places)
    console.print(table)
    console.print(f"{len(plan.cells)} cells, seeds included; {power(total * seeds, 2)} FLOPs in all. {size.time}.",
                  highlight=False, markup=False)  # fmt: skip
