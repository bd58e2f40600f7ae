"""Two gloo ranks under FSDP2 are one process: losses, weights, checkpoints either way, and few collectives."""

from pathlib import Path
from typing import Any

import pytest
import torch

from looplm.errors import UserError
from looplm.training.distributed import Ranks, process_group, shard
from looplm.training.telemetry import Telemetry
from looplm.training.trainer import Trainer

from .processes import in_processes
from .runs import SEQ_LEN, VOCAB_SIZE, tiny_model, tiny_rows, tiny_stage

FOUR_ROWS = {"batch_tokens": 4 * SEQ_LEN, "optimizer": {"lr": 1e-2, "grad_clip": 0.5}}
CASES: dict[str, dict[str, Any]] = {
    "fp64": {"stage": FOUR_ROWS | {"num_steps": 20, "micro_batch_rows": 1}},
    "fp32": {"stage": FOUR_ROWS | {"num_steps": 20}, "dtype": "float32"},
    "drawn depth": {"stage": FOUR_ROWS | {"num_loops": {"kind": "uniform", "min": 1, "max": 4}}},
    "gate": {"stage": FOUR_ROWS | {"objective": {"kind": "gate_loss"}}, "model": {"tie_word_embeddings": False}},
    "gate by expected loss": {
        "stage": FOUR_ROWS | {"objective": {"kind": "expected_loss", "beta": 0.1, "gate_only": True}}
    },
    "one loop": {"stage": FOUR_ROWS | {"num_loops": 1}, "model": {"num_loops": 1}},
    "routing": {"stage": FOUR_ROWS | {"objective": {"kind": "routing", "phase_steps": 2}}},
    "last loop": {"stage": FOUR_ROWS | {"objective": {"kind": "last_loop"}, "micro_batch_rows": 1}},
    "truncated": {
        "stage": FOUR_ROWS | {"backprop_loops": 1, "micro_batch_rows": 1}, "model": {"injection": "scalar"}
    },
    "layer checkpointing": {"stage": FOUR_ROWS | {"activation_checkpointing": "layer"}},
    "loop checkpointing": {"stage": FOUR_ROWS | {"activation_checkpointing": "loop"}, "model": {"lora_rank": 2}},
    "layers within loops": {"stage": FOUR_ROWS | {"activation_checkpointing": "both"}, "model": {"injection": "add"}},
    "frozen": {"stage": FOUR_ROWS | {"freeze": ("embed_tokens.*", "layers.0.mlp.*")}},
}  # fmt: skip


@pytest.fixture(scope="module")
def both() -> tuple[dict[str, Any], dict[str, Any]]:
    """All cases on one process without a group, and on two ranks."""
    (alone,) = in_processes("train_in_turn", 1, grouped=False, cases=CASES)
    together = in_processes("train_in_turn", 2, cases=CASES)
    return alone, together[0]


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one_process(both: tuple[dict[str, Any], dict[str, Any]], case: str) -> None:
    """With uneven masks, so a mean of the ranks' means would differ."""
    one, two = (results[case] for results in both)
    exact = case != "fp32"
    assert len(one["losses"]) == CASES[case]["stage"].get("num_steps", 6)
    torch.testing.assert_close(two["losses"], one["losses"], rtol=0, atol=1e-12 if exact else 1e-5)
    torch.testing.assert_close(two["grad_norms"], one["grad_norms"], rtol=0, atol=1e-12 if exact else 1e-4)
    assert two["state"].keys() == one["state"].keys()
    for name, expected in one["state"].items():
        torch.testing.assert_close(
            two["state"][name], expected, rtol=0, atol=1e-9 if exact else 1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert two["data"] == one["data"]


def test_the_cases_train_what_they_say(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """A case in which nothing moved would pass above as well."""
    for case, options in CASES.items():
        start = tiny_model(**options.get("model", {})).to(torch.float64)
        trained = both[1][case]["state"]
        moved = {n for n, p in start.named_parameters() if not torch.equal(trained[f"model.{n}"].double(), p.data)}
        gate = {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}
        if case in ("gate", "gate by expected loss"):
            assert moved == gate
        else:
            assert "model.layers.0.self_attn.q_proj.weight" in moved
            assert ("model.layers.0.mlp.up_proj.weight" in moved) == (case != "frozen")
            # A single loop gives the gate no gradient, though weight decay reaches its matrix; the last loop's loss
            # leaves it alone.
            assert ("model.early_exit_gate.bias" in moved) == (case not in ("one loop", "last loop"))
            assert (gate & moved == set()) == (case == "last loop")


@pytest.mark.slow
def test_compiled_and_recomputed_under_sharding_is_eager_in_one_process() -> None:
    stage = FOUR_ROWS | {"num_steps": 2, "optimizer": {"lr": 1e-2, "eps": 1e-3}}
    (eager,) = in_processes("train", 1, grouped=False, stage=stage)
    wrapped = in_processes("train", 2, stage=stage | {"compile": True, "activation_checkpointing": "layer"})[0]
    torch.testing.assert_close(wrapped["losses"], eager["losses"], rtol=0, atol=1e-12)
    for name, expected in eager["state"].items():
        torch.testing.assert_close(wrapped["state"][name], expected, rtol=0, atol=1e-9)


SAVED = {"stage": FOUR_ROWS | {"num_steps": 8, "micro_batch_rows": 1}, "every": 4}


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2), (2, 2)])
def test_a_checkpoint_resumes_on_another_number_of_ranks(tmp_path: Path, first: int, second: int) -> None:
    """2 -> 2 bit for bit; otherwise to rounding, since sums over ranks are added in another order."""
    (straight, *_) = in_processes("train", first, grouped=first > 1, run_dir=tmp_path / "straight", **SAVED)
    begun = SAVED | {"run_dir": tmp_path / "resumed"}
    in_processes("train", first, grouped=first > 1, **begun, steps=4)
    (resumed, *_) = in_processes("train", second, grouped=second > 1, **begun, resume=True)
    assert resumed["step"] == 8 and len(resumed["losses"]) == 4
    assert resumed["data"] == straight["data"]
    tolerance = 0.0 if first == second else 1e-9
    torch.testing.assert_close(resumed["losses"], straight["losses"][4:], rtol=0, atol=tolerance)
    for name, expected in straight["state"].items():
        torch.testing.assert_close(resumed["state"][name], expected, rtol=0, atol=tolerance)


def test_collectives_do_not_grow_with_head_chunks_loops_or_micro_batches() -> None:
    """One gathering of the weights a step, one reduction of the gradients, and the same few sums always."""
    sizes = [2**24, VOCAB_SIZE * 4, VOCAB_SIZE]
    counts = []
    for num_loops, micro_batch_rows in ((3, 2), (5, 2), (3, 1)):
        stage = FOUR_ROWS | {"num_loops": num_loops, "micro_batch_rows": micro_batch_rows}
        counts += in_processes("count_collectives", 2, chunk_logits=sizes, stage=stage)[0]
    assert all(count == counts[0] for count in counts), counts
    gathers, scatters, sums = (
        sum(count for name, count in counts[0].items() if kind in name)
        for kind in ("gather", "reduce_scatter", "allreduce")
    )
    # The sums: predicted tokens, metrics with stop flags, and the gradient's norm.
    assert (gathers, scatters) == (1, 1) and sums <= 3, counts[0]


@pytest.mark.parametrize(("number", "status"), [(2, 130), (15, 143)])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path: Path, number: int, status: int) -> None:
    first, second = in_processes("interrupt_one", 2, run_dir=tmp_path, number=number)
    assert first == second
    assert (first["step"], first["exit_status"]) == (3, status)
    assert first["checkpoint"] == str(tmp_path / "checkpoints" / "0-first-00000003")


def test_alone_there_is_no_group() -> None:
    ranks = Ranks.current()
    assert (ranks.rank, ranks.world_size, ranks.is_main, ranks.grouped) == (0, 1, True, False)
    model = tiny_model()
    shard(model, ranks)
    assert type(model).__name__ == "LoopLMForCausalLM"
    assert ranks.sum(torch.ones(2)).tolist() == [1, 1]
    ranks.barrier()


def test_without_torchrun_no_group_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with process_group() as ranks:
        assert not ranks.grouped and not torch.distributed.is_initialized()


def test_torchrun_s_environment_is_joined_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    with process_group() as ranks:
        assert ranks.grouped and (ranks.rank, ranks.world_size) == (0, 1)
        with process_group() as again:
            assert again == ranks
        assert torch.distributed.is_initialized()
    assert not torch.distributed.is_initialized()


def test_a_batch_that_ranks_cannot_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "current", staticmethod(lambda: Ranks(0, 3, torch.device("cpu"), False)))
    with pytest.raises(UserError, match=r"2 rows of 12, which 3 processes cannot share evenly"):
        Trainer(tiny_model(), tiny_stage(), tiny_rows(), Telemetry())
