"""Run by test_measuring_ranks.py as one of two processes: measures a model compiled, then sharded.

A file of its own, since the compiler does not trace through the shape checks that pytest switches on.

    python measure_on_ranks.py RANK FILE_STORE OUT
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

from looplm.data.evaluation_windows import EvaluationWindows
from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.objectives import expected_loss
from looplm.training.distributed import Ranks, shard
from looplm.training.gradients import measure_state_gradients
from looplm.training.held_out import HeldOut

NUM_TOKENS = 22


def build() -> tuple[LoopLMForCausalLM, EvaluationWindows, torch.Tensor, torch.Tensor]:
    """A model, held-out windows, and a batch of which NUM_TOKENS are predicted; always the same."""
    torch.manual_seed(0)
    config = LoopLMConfig(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, num_loops=3, initializer_range=0.2,
    )  # fmt: skip
    model = LoopLMForCausalLM(config).double().train()
    lengths = torch.tensor([12, 12, 9, 7, 7, 4, 2])
    document_index = torch.tensor([0, 1, 0, 1, 2, 2, 0])
    windows = EvaluationWindows(torch.randint(17, (7, 12)), lengths, document_index, torch.tensor([50, 60, 33]))
    ids = torch.randint(17, (4, 9))
    labels = ids.clone()
    labels[0, 3:] = labels[3, :5] = -100
    assert int((labels[:, 1:] != -100).sum()) == NUM_TOKENS
    return model, windows, ids, labels


def measure(rank: int, world_size: int) -> dict[str, object]:
    """What one of `world_size` ranks finds: held-out losses over three batches, and gradient norms."""
    model, windows, ids, labels = build()
    shard(model, Ranks.current())
    before = HeldOut(windows, 5, batch_rows=3).measure(model)
    with measure_state_gradients(model.model) as gradients:
        model.within(loss_of, ids[rank::world_size], labels[rank::world_size]).backward()
    assert model.training and all(p.grad is not None for p in model.parameters())
    after = HeldOut(windows, 5, batch_rows=3).measure(model)
    assert after == before
    return {"held_out": before.loop_losses, "bits": before.bits_per_byte, "norms": gradients.norms(3).tolist()}


def measure_compiled() -> dict[str, object]:
    """Gradient norms with layers compiled as the trainer does it, and the graphs made before measuring and after."""
    model, _, ids, labels = build()
    graphs = CompileCounterWithBackend("aot_eager")
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend=graphs)
    loss_of(model, ids, labels).backward()
    before = graphs.frame_count
    with measure_state_gradients(model.model) as gradients:
        loss_of(model, ids, labels).backward()
    return {"compiled_norms": gradients.norms(3).tolist(), "graphs": [before, graphs.frame_count]}


def loss_of(model: LoopLMForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Stage I over this rank's rows, divided by the tokens of all."""
    return expected_loss(model, model.model(ids), labels, beta=0.1, num_tokens=NUM_TOKENS)[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    own_rank, store, out = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    measured = measure_compiled()  # the compiler itself warns
    warnings.simplefilter("error")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=own_rank, world_size=2)
    found = measured | measure(own_rank, 2)
    dist.destroy_process_group()
    out.write_text(json.dumps(found))
