"""Tiny models, stages and rows, and the jobs that tests run in processes of their own (see `processes`).

Small enough that a test can train for a few steps in well under a second. A job gets JSON-like arguments and returns
tensors and plain values; it is found by its name.
"""

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from looplm.data.packing import RingPacking, TokenStream
from looplm.data.rows import RowStream, StoredSource
from looplm.data.whole_packing import WholePacking
from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.objectives import cross_entropy
from looplm.training.checkpoint import latest_checkpoint, tensors_of
from looplm.training.interrupt import Interrupted
from looplm.training.recipe import CheckpointsRecipe
from looplm.training.rows import LoadedRows, Rows
from looplm.training.stage_model import change_for_stage, gathered, merged_after
from looplm.training.stage_recipe import StageRecipe
from looplm.training.telemetry import Telemetry
from looplm.training.trainer import Trainer

VOCAB_SIZE, SEQ_LEN = 17, 12


def tiny_model(**overrides: Any) -> LoopLMForCausalLM:
    """A model of three loops, always with the same starting weights; keywords override config fields."""
    tiny: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_loops": 3,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    torch.manual_seed(1)
    return LoopLMForCausalLM(LoopLMConfig(**(tiny | overrides)))


def tiny_stage(**overrides: Any) -> StageRecipe:
    """Six steps of Stage I over two rows each, every step told; keywords override."""
    small: dict[str, Any] = {
        "name": "first",
        "num_steps": 6,
        "seq_len": SEQ_LEN,
        "batch_tokens": 2 * SEQ_LEN,
        "objective": {"kind": "expected_loss", "beta": 0.05},
        "optimizer": {"lr": 1e-2},
        "num_loops": 3,
        "log_every": 1,
    }
    return StageRecipe(**(small | overrides))


def tiny_stream(lengths: tuple[int, ...], seed: int) -> TokenStream:
    """Documents of random tokens, each begun by token 0."""
    ids = np.random.default_rng(seed).integers(1, VOCAB_SIZE, sum(lengths)).astype(np.uint16)
    starts = np.cumsum([0, *lengths[:-1]])
    ids[starts] = 0
    return TokenStream(ids, starts, num_text_bytes=1)


def tiny_rows(*, rank: int = 0, world_size: int = 1, num_workers: int = 0, seq_len: int = SEQ_LEN) -> LoadedRows:
    """A mixture of nine documents cut as a ring and six short ones kept whole, with padding: every row predicts
    another number of tokens."""
    ring = RingPacking(tiny_stream((3, 20, 5, 5, 31, 2, 9, 14, 11), 0), seq_len)
    whole = WholePacking(tiny_stream((4, 7, 3, 5, 9, 6), 1), seq_len, 0)
    sources = [StoredSource("ring", ring, key=(3, 0)), StoredSource("whole", whole, key=(3, 1))]
    stream = RowStream(sources, [0.7, 0.3], seq_len=seq_len, seed=3, rank=rank, world_size=world_size)
    return LoadedRows(stream, num_workers)


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def run_stage(
    model: LoopLMForCausalLM, stage: StageRecipe, rows: Rows, run_dir: Path | None = None, **options: Any
) -> Telemetry:
    """Trains to the end of the stage; returns what was told of it."""
    telemetry = Telemetry()
    Trainer(model, stage, rows, telemetry, run_dir, **options).run()
    return telemetry


def whole_state(trainer: Trainer) -> dict[str, Tensor]:
    """Parameters and moments by name, gathered from all ranks."""
    flat = {
        f"{part}.{name}": value for part, tensors in tensors_of(trainer.model, trainer.optimizer).items()
        for name, value in tensors.items()
    }  # fmt: skip
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in flat.items()
    }


# --- Jobs -----------------------------------------------------------------------------------------------------------


def train(
    *,
    rank: int,
    world_size: int,
    stage: dict[str, Any],
    model: dict[str, Any] | None = None,
    dtype: str = "float64",
    run_dir: Path | None = None,
    every: int | None = None,
    resume: bool = False,
    steps: int | None = None,
) -> dict[str, Any]:
    """Trains a tiny model, `steps` steps or the whole stage; with `resume` from the latest checkpoint, if any."""
    built = tiny_model(**(model or {})).to(getattr(torch, dtype))
    telemetry = Telemetry(run_dir if rank == 0 else None, tensorboard=False)
    trainer = Trainer(
        built, tiny_stage(**stage), tiny_rows(rank=rank, world_size=world_size), telemetry, run_dir,
        seed=5, checkpoints=CheckpointsRecipe(every=every),
    )  # fmt: skip
    latest = latest_checkpoint(run_dir) if run_dir is not None else None
    if resume and latest is not None:
        trainer.resume(latest.directory)
    if steps is None:
        trainer.run()
    else:
        for _ in range(steps):
            trainer.train_step()
        if run_dir is not None:
            trainer.save()
    return {
        "losses": [record.loss for record in telemetry.records],
        "grad_norms": [record.grad_norm for record in telemetry.records],
        "state": whole_state(trainer),
        "data": trainer.rows.state_dict(),
        "step": trainer.step,
    }


def train_in_turn(*, rank: int, world_size: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Several trainings in one group of processes."""
    return {name: train(rank=rank, world_size=world_size, **case) for name, case in cases.items()}


def train_lora(*, rank: int, world_size: int, stage: dict[str, Any]) -> dict[str, Any]:
    """A LoRA stage over a tiny model, and the whole, merged model after it."""
    recipe = tiny_stage(**stage)
    assert recipe.lora is not None
    model = change_for_stage(tiny_model(), recipe, seed=4)
    rows, telemetry = tiny_rows(rank=rank, world_size=world_size), Telemetry()
    trainer = Trainer(model, recipe, rows, telemetry, seed=5)
    trainer.run()
    merged = merged_after(gathered(trainer.model), recipe.lora)
    return {"losses": [record.loss for record in telemetry.records], "merged": dict(merged.state_dict())}


def count_collectives(*, rank: int, world_size: int, chunk_logits: list[int], stage: dict[str, Any]) -> list[Any]:
    """Collectives of one step, by name, for several sizes of the head's chunks."""
    counts = []
    for size in chunk_logits:
        cross_entropy.CHUNK_LOGITS = size
        trainer = Trainer(tiny_model(), tiny_stage(**stage), tiny_rows(rank=rank, world_size=world_size), Telemetry())
        trainer.train_step()
        with Collectives() as collectives:
            trainer.train_step()
        counts.append(dict(collectives.counts))
    return counts


class Collectives(TorchDispatchMode):
    """Counts collectives by name. torch's own CommDebugMode wants every forward to be a module's."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional") and "wait" not in str(function):
            self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def interrupt_one(*, rank: int, world_size: int, run_dir: Path, number: int) -> dict[str, Any]:
    """Rank 1 alone gets a signal while it draws the rows of its third step."""
    trainer = Trainer(
        tiny_model(), tiny_stage(), tiny_rows(rank=rank, world_size=world_size), Telemetry(), run_dir,
        checkpoints=CheckpointsRecipe(),
    )  # fmt: skip
    after_calls(trainer, 3, lambda: os.kill(os.getpid(), number) if rank == 1 else None)
    try:
        trainer.run()
    except Interrupted as left:
        return {"step": left.step, "exit_status": left.exit_status, "checkpoint": str(left.checkpoint)}
    return {}


def after_calls(trainer: Trainer, count: int, then: Callable[[], object]) -> None:
    """Has `then` called when the trainer takes rows for the `count`-th time."""
    take, calls = trainer.rows.take, [0]

    def counted(num_rows: int) -> dict[str, Tensor]:
        calls[0] += 1
        if calls[0] == count:
            then()
        return take(num_rows)

    trainer.rows.take = counted  # type: ignore[method-assign]


KILL_STAGE = {
    "num_steps": 90,
    "batch_tokens": 4 * SEQ_LEN,
    "micro_batch_rows": 2,
    "num_loops": {"kind": "uniform", "min": 1, "max": 4},
    "divergence": {"window": 8},
}


def train_and_be_killed(*, rank: int, world_size: int, run_dir: Path, kill_at: int | None) -> dict[str, Any]:
    """Trains from the latest checkpoint on, saving every other step, and dies at the event of number `kill_at`.

    An event is whatever touches a file under the checkpoints' directory, in whichever thread, and each step's rows.
    """
    seen = [0]

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "looplm.rows" or (arguments and "checkpoints" in str(arguments[0])):
            seen[0] += 1
            if seen[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    telemetry = Telemetry(run_dir, tensorboard=False)
    trainer = Trainer(
        tiny_model(), tiny_stage(**KILL_STAGE), tiny_rows(), telemetry, run_dir,
        seed=5, checkpoints=CheckpointsRecipe(every=2),
    )  # fmt: skip
    latest = latest_checkpoint(run_dir)
    if latest is None:
        telemetry.rewind("first", 0)
    else:
        trainer.resume(latest.directory)
    sys.addaudithook(count)
    take = trainer.rows.take

    def counted(num_rows: int) -> dict[str, Tensor]:
        sys.audit("looplm.rows")
        return take(num_rows)

    trainer.rows.take = counted  # type: ignore[method-assign]
    trainer.run()
    return {"state": whole_state(trainer), "data": trainer.rows.state_dict(), "events": seen[0]}


def join_group(store: str, rank: int, world_size: int) -> None:
    """A gloo group that meets in a file."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
