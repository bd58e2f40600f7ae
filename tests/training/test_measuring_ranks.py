"""Two ranks of a sharded model measure what one process does, and so does a compiled model."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("measure_on_ranks.py")


def test_two_ranks_and_a_compiled_model_measure_what_one_plain_process_does(tmp_path: Path):
    """Three batches on two ranks: one rank has none left in the end, and must keep the other company."""
    spec = importlib.util.spec_from_file_location("measure_on_ranks", WORKER)
    assert spec is not None and spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    alone = worker.measure(0, 1)
    outs = [tmp_path / f"{rank}.json" for rank in (0, 1)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORKER.parents[2])}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(tmp_path / "store"), str(outs[rank])],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    found = [json.loads(out.read_text()) for out in outs]
    assert found[0] == found[1]
    for name in ("held_out", "bits"):
        assert found[0][name] == pytest.approx(alone[name], abs=1e-12)
    assert found[0]["norms"] == [pytest.approx(row, rel=1e-10) for row in alone["norms"]]
    assert found[0]["compiled_norms"] == [pytest.approx(row, rel=1e-10) for row in alone["norms"]]
    before, after = found[0]["graphs"]
    assert before == after == 1, "measuring must not compile anew, nor a loop"
