"""Runs the jobs of `runs` in processes of their own: as ranks of a group, or alone, to be killed.

Processes are forked from a server that has imported torch once, so that one costs milliseconds and not seconds. The
server is no copy of pytest's process, whose threads a fork would lose.
"""

import multiprocessing
import runpy
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

RUNS = Path(__file__).with_name("runs.py")
PRELOADED = ["torch", "looplm.training.trainer", "looplm.data.rows", "looplm.data.whole_packing"]
TIMEOUT = 300


def in_processes(job: str, world_size: int = 1, *, grouped: bool = True, **arguments: Any) -> list[Any]:
    """What the job returned on every rank. Fails with the traceback of the first rank that raised."""
    with tempfile.TemporaryDirectory() as folder:
        codes = _run(job, world_size, grouped, arguments, Path(folder))
        failures = [path.read_text() for path in sorted(Path(folder).glob("*.err"))]
        assert not failures and not any(codes), f"exit codes {codes}\n" + "\n".join(failures)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def exit_code(job: str, **arguments: Any) -> tuple[int, Any]:
    """The exit code of a job that runs alone, negative for the signal that killed it, and what it returned, if so."""
    with tempfile.TemporaryDirectory() as folder:
        (code,) = _run(job, 1, False, arguments, Path(folder))
        failures = [path.read_text() for path in Path(folder).glob("*.err")]
        assert not failures, failures[0]
        result = Path(folder) / "0.pt"
        return code, torch.load(result, weights_only=False) if result.exists() else None


def _run(job: str, world_size: int, grouped: bool, arguments: dict[str, Any], folder: Path) -> list[int]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes = [
        context.Process(target=runpy.run_path, args=(__file__,), kwargs={
            "init_globals": {"JOB": (job, rank, world_size, grouped, arguments, str(folder))}, "run_name": "child",
        })
        for rank in range(world_size)
    ]  # fmt: skip
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode or 0 for process in processes]


def _child(job: str, rank: int, world_size: int, grouped: bool, arguments: dict[str, Any], folder: str) -> None:
    warnings.simplefilter("error")
    # torch's own compiler: while it is imported, and where it looks at tensors and hides what that says.
    warnings.filterwarnings("ignore", message=".*script_method", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor", category=UserWarning)
    torch.set_num_threads(1)
    runs = runpy.run_path(str(RUNS), run_name="runs")
    try:
        if grouped:
            runs["join_group"](f"{folder}/store", rank, world_size)
        result = runs[job](rank=rank, world_size=world_size, **arguments)
        torch.save(result, f"{folder}/{rank}.pt")
        if grouped:
            torch.distributed.destroy_process_group()
    except BaseException:
        Path(folder, f"{rank}.err").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        sys.exit(1)


if __name__ == "child":
    _child(*JOB)  # noqa: F821  (given by runpy)
