"""One side in a process of its own, so that its memory is its own: answers requests, a JSON object a line.

    {"do": "build", "side": "naive" | "looplm", "sizes": {...}, "compile": ..., "checkpointing": ..., "device": ...,
     "threads": n}                          -> {"num_parameters": n}
    {"do": "step"}                          -> {"seconds": s, "loss": x}
    {"do": "measure"}                       -> {"peak_bytes": n, "held_bytes": n}, of one more step
    {"do": "breakdown"}                     -> {part: share}, of one more step
An exception ends the process with its traceback on stderr.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from looplm.bench.sizes import Compile, TrainSizes
from looplm.errors import UserError
from looplm.training.stage_recipe import ActivationCheckpointing


class Worker:
    """The other end of the pipe. A context manager; raises UserError when the process dies (of memory, say)."""

    def __init__(self, threads: int) -> None:
        quiet = {"HF_HUB_OFFLINE": "1", "KINETO_LOG_LEVEL": "6"}  # at 5 USDT lines still come through
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **quiet}
        self.threads = threads
        self.process = subprocess.Popen(
            [sys.executable, "-m", "looplm.bench.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def build(
        self,
        side: str,
        sizes: TrainSizes,
        *,
        compile: Compile = "none",
        checkpointing: ActivationCheckpointing = "none",
        device: str = "cpu",
    ) -> int:
        """Builds a side in place of the one before; its number of parameters."""
        return self.ask(
            "build", side=side, sizes=asdict(sizes), compile=compile, checkpointing=checkpointing, device=device,
            threads=self.threads,
        )["num_parameters"]  # fmt: skip

    def ask(self, request: str, **arguments: Any) -> dict[str, Any]:
        """Sends one request and waits for its answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"do": request, **arguments}) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise UserError(
                f"The process that measured {arguments.get('side', 'this side')} ended with status "
                f"{self.process.wait()}; what it wrote is above. -9 is the system taking its memory back: try a "
                "smaller --batch-size or --seq-len."
            )
        return json.loads(answer)


class Answers:
    """What the worker's process does."""

    def __init__(self) -> None:
        self.side: Any = None

    def build(
        self,
        side: str,
        sizes: dict[str, Any],
        compile: Compile,
        checkpointing: ActivationCheckpointing,
        device: str,
        threads: int,
    ) -> dict[str, Any]:
        import torch

        from looplm.bench.memory import PeakMeter
        from looplm.bench.sides import build_side

        torch.set_num_threads(threads)
        self.side = None  # the one before goes first
        torch.compiler.reset()
        self.side = build_side(
            side, TrainSizes(**sizes), compile=compile, checkpointing=checkpointing, device=device  # type: ignore[arg-type]
        )  # fmt: skip
        self.meter = PeakMeter(self.side.device)
        return {"num_parameters": self.side.num_parameters}

    def step(self) -> dict[str, Any]:
        began = time.perf_counter()
        loss = self.side.step()
        return {"seconds": time.perf_counter() - began, "loss": loss}

    def measure(self) -> dict[str, Any]:
        self.meter.start()
        self.side.step()
        return {"peak_bytes": self.meter.peak_bytes(), "held_bytes": self.meter.held}

    def breakdown(self) -> dict[str, Any]:
        from looplm.bench.breakdown import breakdown

        return {str(part): share for part, share in breakdown(self.side).items()}


def main() -> None:
    """Answers until the pipe closes."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not meet the answers
    answers = Answers()
    verbs: dict[str, Callable[..., dict[str, Any]]] = {
        "build": answers.build, "step": answers.step, "measure": answers.measure, "breakdown": answers.breakdown
    }  # fmt: skip
    for line in sys.stdin:
        request = json.loads(line)
        pipe.write(json.dumps(verbs[request.pop("do")](**request)) + "\n")
        pipe.flush()


if __name__ == "__main__":
    main()
