"""`looplm bench train`: Stage-I steps of a LoopLM against the obvious way, and how ours grows."""

import dataclasses
import os
import platform
import re
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import get_args

import torch

from looplm.bench.breakdown import Part
from looplm.bench.sizes import Compile, TrainSizes
from looplm.bench.worker import Worker
from looplm.errors import UserError
from looplm.training.stage_recipe import ActivationCheckpointing

Say = Callable[[str], None]
SIDES = ("naive", "looplm")


@dataclass(kw_only=True)
class Measured:
    """What one side did."""

    side: str
    compile: Compile = "none"
    checkpointing: ActivationCheckpointing = "none"
    num_loops: int
    seq_len: int
    batch_size: int
    num_parameters: int
    first_loss: float
    """Before the first step."""
    held_bytes: int
    """Before the measured step: model, optimizer state, and on the CPU the libraries."""
    peak_bytes: int
    """The most a step holds at one time above that."""
    seconds: list[float] = field(default_factory=list)
    """Of each timed step."""
    breakdown: dict[Part, float] = field(default_factory=dict)
    """Share of each part in a step; empty if not asked for."""

    @property
    def tokens_per_second(self) -> float:
        """At the median step."""
        return self.batch_size * self.seq_len / statistics.median(self.seconds)


@dataclass(kw_only=True, frozen=True)
class Machine:
    """Where a figure is from."""

    date: str
    device: str
    threads: int
    torch: str

    @classmethod
    def here(cls, device: str, threads: int) -> "Machine":
        """This machine, today."""
        name = torch.cuda.get_device_name(torch.device(device)) if device.startswith("cuda") else cpu_name()
        return cls(date=date.today().isoformat(), device=name, threads=threads, torch=torch.__version__)


@dataclass(kw_only=True, frozen=True)
class TrainReport:
    """All that `looplm bench train` found; `dataclasses.asdict` makes it JSON."""

    machine: Machine
    sizes: TrainSizes
    rows: list[Measured]


def cpu_name() -> str:
    """What the processor calls itself, and its cores."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    name = found[1] if found is not None else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def parse_checkpointing(text: str) -> ActivationCheckpointing:
    """`none`, `layer`, `loop` or `both`; UserError for anything else."""
    if text not in get_args(ActivationCheckpointing):
        raise UserError(f"--recompute is {text!r}; choose from {', '.join(get_args(ActivationCheckpointing))}.")
    return text  # type: ignore[return-value]


def parse_compiles(text: str, *, one: bool = False) -> list[Compile]:
    """`none,blocks` as a list without repeats; the first alone if only one is wanted. UserError for other names."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in get_args(Compile):
            raise UserError(f"--compile has {name!r}; choose from {', '.join(get_args(Compile))}.")
    return names[:1] if one else names  # type: ignore[return-value]


def compare(
    sizes: TrainSizes,
    *,
    compiles: Sequence[Compile] = ("none", "blocks", "blocks+loss"),
    repeats: int = 5,
    checkpointing: ActivationCheckpointing = "none",
    threads: int = 1,
    device: str = "cpu",
    parts: bool = True,
    say: Say = lambda _: None,
) -> TrainReport:
    """Both sides at each way of compiling: each in a process of its own, their steps in turn.

    A first step warms up (and compiles), a second is measured for memory, `repeats` more are timed; with `parts` a
    last one is profiled. `checkpointing` is ours alone. Raises UserError when a process dies.
    """
    rows: list[Measured] = []
    for compile in compiles:
        with ExitStack() as stack:
            pair = {}
            for name in SIDES:
                say(f"{name}, compile {compile}: first step")
                worker = stack.enter_context(Worker(threads))
                recomputed: ActivationCheckpointing = checkpointing if name == "looplm" else "none"
                pair[name] = worker, _prepare(worker, name, sizes, compile, recomputed, device)
            for i in range(repeats):
                say(f"compile {compile}: step {i + 1} of {repeats} of each in turn")
                for worker, row in pair.values():
                    row.seconds.append(worker.ask("step")["seconds"])
            for worker, row in pair.values():
                if parts:
                    row.breakdown = worker.ask("breakdown")  # type: ignore[assignment]
                rows.append(row)
    return TrainReport(machine=Machine.here(device, threads), sizes=sizes, rows=rows)


def sweep(
    sizes: TrainSizes,
    *,
    loops: Sequence[int] = (1, 2, 4, 8),
    seq_lens: Sequence[int] = (256, 512, 1024),
    compile: Compile = "none",
    repeats: int = 3,
    threads: int = 1,
    device: str = "cpu",
    say: Say = lambda _: None,
) -> TrainReport:
    """How time and memory grow with R and with the sequence: ours with and without recomputation, and the baseline.

    The sequence grows at an unchanged number of tokens in the batch as long as that is possible.
    """
    points = [dataclasses.replace(sizes, num_loops=number) for number in loops]
    for seq_len in seq_lens:
        batch_size = max(1, sizes.num_tokens // seq_len)
        points.append(dataclasses.replace(sizes, seq_len=seq_len, batch_size=batch_size))
    variants: list[tuple[str, ActivationCheckpointing]] = [
        ("looplm", "none"), ("looplm", "layer"), ("looplm", "loop"), ("naive", "none")
    ]  # fmt: skip
    rows: list[Measured] = []
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(threads)) for _ in variants]
        for point in dict.fromkeys(points):
            say(f"{point.num_loops} loops, {point.batch_size} x {point.seq_len} tokens")
            group = [
                (worker, _prepare(worker, side, point, compile, checkpointing, device))
                for worker, (side, checkpointing) in zip(workers, variants, strict=True)
            ]
            for _ in range(repeats):
                for worker, row in group:
                    row.seconds.append(worker.ask("step")["seconds"])
            rows += [row for _, row in group]
            say("  " + ", ".join(f"{row.tokens_per_second:,.0f} tokens/s" for _, row in group))
    return TrainReport(machine=Machine.here(device, threads), sizes=sizes, rows=rows)


def _prepare(
    worker: Worker, side: str, sizes: TrainSizes, compile: Compile, checkpointing: ActivationCheckpointing, device: str
) -> Measured:
    """Builds a side, warms it up and measures the memory of a step."""
    num_parameters = worker.build(side, sizes, compile=compile, checkpointing=checkpointing, device=device)
    first = worker.ask("step")
    return Measured(
        side=side,
        compile=compile,
        checkpointing=checkpointing,
        num_loops=sizes.num_loops,
        seq_len=sizes.seq_len,
        batch_size=sizes.batch_size,
        num_parameters=num_parameters,
        first_loss=first["loss"],
        **worker.ask("measure"),
    )
