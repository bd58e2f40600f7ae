"""kill -9 at any moment: no complete checkpoint is lost, and the run ends as if it had never been killed."""

import json
import random
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from looplm.training.checkpoint import list_checkpoints

from .processes import exit_code, in_processes

JOB = "train_and_be_killed"
NUM_KILLS, MOST_EVENTS = 20, 60
UNTOLD = ("seconds", "tokens_per_second", "memory_bytes")


def told(run_dir: Path) -> list[dict[str, Any]]:
    """Telemetry, timings and memory aside."""
    lines = [json.loads(line) for line in (run_dir / "telemetry.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in UNTOLD} for line in lines]


def complete_steps(run_dir: Path) -> list[int]:
    """Steps of the checkpoints on disk, each of them checked to hold all its files."""
    found = list_checkpoints(run_dir / "checkpoints")
    for checkpoint in found:
        assert checkpoint.progress()["step"] == checkpoint.step
        metadata = dcp.FileSystemReader(checkpoint.directory).read_metadata()
        stored = metadata.storage_data.values()
        ends = {part.relative_path: 0 for part in stored}
        for part in stored:
            ends[part.relative_path] = max(ends[part.relative_path], part.offset + part.length)
        assert ends
        for name, end in ends.items():
            assert (checkpoint.directory / name).stat().st_size >= end
    return [checkpoint.step for checkpoint in found]


def test_twenty_kills_lose_no_checkpoint_and_change_nothing(tmp_path: Path) -> None:
    """A mixture with packing, accumulation over two micro-batches, drawn depth, saving every other step from a thread.

    Killed at the n-th event, n from a seed: a file opened, renamed or removed by the saving thread, or a step's rows
    taken while it writes.
    """
    ((straight),) = in_processes(JOB, 1, grouped=False, run_dir=tmp_path / "straight", kill_at=None)
    run_dir = tmp_path / "killed"
    draw = random.Random(20)
    latest = 0
    for _ in range(NUM_KILLS):
        code, _result = exit_code(JOB, run_dir=run_dir, kill_at=draw.randint(1, MOST_EVENTS))
        assert code == -signal.SIGKILL, "the run ended before it was killed: make it longer"
        steps = complete_steps(run_dir)
        assert max(steps, default=0) >= latest, "a complete checkpoint was lost"
        latest = max(steps, default=0)
    assert latest > 10, "the kills came too early to test much"
    code, resumed = exit_code(JOB, run_dir=run_dir, kill_at=None)
    assert code == 0
    assert resumed["data"] == straight["data"]
    assert resumed["state"].keys() == straight["state"].keys()
    for name, value in straight["state"].items():
        assert torch.equal(resumed["state"][name], value), name
    assert told(run_dir) == told(tmp_path / "straight")
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == ["0-first-00000088", "0-first-00000090"], "leftovers of the kills"
