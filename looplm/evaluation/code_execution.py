"""Generated programs, each in a process of its own, behind walls: what came of it, never what it wanted to do here.

Two grades. "namespaces", where the kernel lets us: no network, no other process to see, no file but the interpreter's
own libraries (read-only) and an empty directory in memory; no process or thread can be started. "process", where it
does not: limits of time, memory and file size, and an audit hook that ends a program which opens a socket, starts a
process or writes outside its directory. The hook is there in both; it stops accidents, not a program that was written
to get around it. For programs that may be hostile, only "namespaces" is a wall, and it is the kernel's: no virtual
machine.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from looplm.errors import UserError
from looplm.evaluation import code_child
from looplm.inference.sampling import check_number

Isolation = Literal["namespaces", "process"]

MOST_SAID = 4096
"""Bytes that are read of what a child says; a pipe holds more, so that it never waits for us."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one program may use. Raises UserError for an impossible one."""

    cpu_seconds: int = 5
    wall_seconds: float = 16.0
    """More than CPU time, so that a busy machine fails no program; one that sleeps is ended by it."""
    memory_mb: int = 1024
    """Of address space, in 2^20 bytes."""
    disk_mb: int = 16
    """Of files in its directory, in 2^20 bytes; of each file in the isolation "process"."""

    def __post_init__(self) -> None:
        for name, kind, least in (
            ("cpu_seconds", Integral, 1), ("wall_seconds", Real, 0.1), ("memory_mb", Integral, 64),
            ("disk_mb", Integral, 1),
        ):  # fmt: skip
            check_number(name, getattr(self, name), kind, least, 10**6)


@dataclass(frozen=True)
class Outcome:
    """What came of one program."""

    passed: bool
    reason: str
    """"passed", or the exception, the limit or the refused event that it ended at."""


def find_isolation() -> Isolation:
    """The stronger grade that this machine allows, found by trying. Raises UserError where none is to be had."""
    if not sys.platform.startswith("linux"):
        raise UserError("Generated programs are run on Linux only: their limits are Linux's. Use a container.")
    if run_program("pass", Limits(), "namespaces").passed:
        return "namespaces"
    tried = run_program("pass", Limits(), "process")
    if tried.passed:
        return "process"
    raise UserError(f"No process can be started to run programs in ({tried.reason}).")


def run_program(program: str, limits: Limits, isolation: Isolation) -> Outcome:
    """Runs `program`, its tests included, to its end. It has passed if that is reached without an exception.

    A program that ends itself before, however it does so, has not.
    """
    word = secrets.token_hex(16)
    with TemporaryDirectory(prefix="looplm-code-", ignore_cleanup_errors=True) as scratch:
        job = {
            "program": program,
            "word": word,
            "scratch": os.path.realpath(scratch),
            "namespaces": isolation == "namespaces",
            "cpu_seconds": limits.cpu_seconds,
            "memory_bytes": limits.memory_mb << 20,
            "disk_bytes": limits.disk_mb << 20,
        }
        # -I -S: nothing from the environment, the directory or what is installed; -B: no byte code is written.
        with subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(Path(code_child.__file__))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            cwd=scratch, env={}, start_new_session=True,
        ) as process:  # fmt: skip
            assert process.stdin is not None and process.stdout is not None
            try:
                with suppress(BrokenPipeError), process.stdin:  # it may end before it has read; the status says why
                    process.stdin.write(json.dumps(job).encode())
                ended = wait(process.pid, limits.wall_seconds)
            finally:
                # Before it is reaped, and its number free for another process.
                os.killpg(process.pid, signal.SIGKILL)
            os.set_blocking(process.stdout.fileno(), False)
            said = os.read(process.stdout.fileno(), MOST_SAID) if ended else b""
    return outcome(said, word, ended, process.returncode, limits)


def wait(pid: int, seconds: float) -> bool:
    """Whether a child ends within `seconds`; it is left to be reaped."""
    deadline, pause = time.monotonic() + seconds, 0.002
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True


def outcome(said: bytes, word: str, ended: bool, status: int, limits: Limits) -> Outcome:
    """What a child's last words mean."""
    if not ended:
        return Outcome(False, f"more than {limits.wall_seconds:g} s")
    if said == word.encode() and status == 0:
        return Outcome(True, "passed")
    if status == code_child.NO_NAMESPACES:
        return Outcome(False, "the kernel refuses namespaces")
    text = said.decode("utf-8", "replace").replace(word, "").strip()
    return Outcome(False, text or "ended before its tests were done")


def run_programs(
    programs: Sequence[str], limits: Limits, isolation: Isolation, num_processes: int = 1
) -> Iterator[Outcome]:
    """The outcomes of many, in order, `num_processes` at a time."""
    with ThreadPoolExecutor(num_processes) as pool:
        try:
            yield from pool.map(lambda program: run_program(program, limits, isolation), programs)
        finally:
            pool.shutdown(cancel_futures=True)
