"""`looplm train`: the stages of a recipe, one after another; resumable at any moment, on one process or many."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from looplm.errors import UserError

if TYPE_CHECKING:
    from looplm.training.recipe import RunRecipe

SHIPPED = Path(__file__).parent.parent / "recipes"
"""The recipes that come with the package, known by name."""


class Stopped(SystemExit):
    """A training run has saved, said so, and leaves with the status of its signal."""


def train(
    recipe: Annotated[
        str, typer.Argument(help="A YAML file, or the name of a shipped recipe (docs/train.md).", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Values to change, as in seed=1, stages.0.optimizer.lr=1e-3 or stages.pretrain.num_steps=10.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; runs/NAME by default.", show_default=False)] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in that directory, or begin one if there is none.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print parameters, steps, tokens, FLOPs and memory, and run nothing.")
    ] = False,
    devices: Annotated[int, typer.Option(help="With --plan: devices the model is sharded over.", min=1)] = 1,
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="With --plan: memory of one device, as 80GB; the micro-batch is made to fit.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --plan: print one JSON object.")] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU where there is one.", show_default=False)
    ] = None,
) -> None:
    """Train the stages of RECIPE. Ctrl-C and SIGTERM finish the step, save and leave; `--resume` goes on from there.

    On several devices: `torchrun --nproc_per_node 8 -m looplm train RECIPE ...`. Writes checkpoints, telemetry and,
    for each finished stage, a directory that `looplm generate` reads.
    """
    if not plan and (as_json or device_memory is not None or devices != 1):
        raise UserError("--json, --devices and --device-memory belong to --plan.")
    if device is not None:
        choose_device(device)
    from looplm.training.recipe_file import load_recipe

    loaded = load_recipe(find_recipe(recipe), overrides or [])
    if plan:
        from looplm.cli.train_plan import print_plan
        from looplm.training.plan import parse_bytes, plan_run

        memory = None if device_memory is None else parse_bytes(device_memory)
        twin = None
        if loaded.baseline is not None:
            from looplm.training.baseline import dense_twin

            twin = plan_run(dense_twin(loaded, Path(loaded.name)), devices, memory)
        print_plan(plan_run(loaded, devices, memory), as_json, twin)
        return
    run_to_the_end(loaded, out or Path("runs") / loaded.name, resume)


def find_recipe(name: str) -> Path:
    """The file of that path, or the shipped recipe of that name. Raises UserError where there is neither."""
    path = Path(name)
    if not name.strip():
        raise UserError("The recipe is an empty word; give a YAML file or the name of a shipped recipe.")
    if os.path.exists(path):  # unlike Path.exists, no error for a name too long to be one
        return path
    shipped = {file.relative_to(SHIPPED).with_suffix("").as_posix(): file for file in sorted(SHIPPED.rglob("*.yaml"))}
    if name.removesuffix(".yaml") in shipped:
        return shipped[name.removesuffix(".yaml")]
    from looplm.strict import nearest

    close = nearest(name.removesuffix(".yaml"), shipped)
    hint = f"did you mean {close}?" if close else f"shipped are {', '.join(shipped)}."
    shown = name if len(name) <= 200 else name[:197] + "..."
    raise UserError(f"There is no recipe file {shown}, and no shipped recipe of that name; {hint}")


def choose_device(device: str) -> None:
    """Leaves visible to torch, which has not looked yet, only the device asked for."""
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or device == "cpu:":
        raise UserError(f"--device is {device!r}; choose cpu, cuda or cuda:N.")
    if kind == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    if index:
        os.environ["CUDA_VISIBLE_DEVICES"] = index
    import torch

    if not torch.cuda.is_available():
        raise UserError(f"--device is {device}, but torch finds no such GPU here.")


def run_to_the_end(recipe: "RunRecipe", run_dir: Path, resume: bool) -> None:
    """Runs, and ends in the status that a shell expects of a command stopped by a signal. Rank 0 alone speaks."""
    from rich.console import Console

    from looplm.training.interrupt import Interrupted
    from looplm.training.run import run

    speaks = os.environ.get("RANK", "0") == "0"
    try:
        run(recipe, run_dir, resume, Console())
    except Interrupted as stop:
        if speaks:
            print(f"looplm: {stop} The same command with --resume goes on from there.", file=sys.stderr)
        raise Stopped(stop.exit_status) from None
    except UserError:
        if speaks:
            raise
        raise SystemExit(2) from None
