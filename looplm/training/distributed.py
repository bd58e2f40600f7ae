"""One process or many: who this one is, what all agree on, and how a model is sharded over them (FSDP2).

    torchrun --nproc_per_node 8 -m looplm train RECIPE.yaml     # nccl on GPUs, gloo on CPUs

A looped core is used R times a step. All parameters form one FSDP2 group, gathered once a forward however many loops
and head chunks read them; a group per layer would gather each layer R times, and again in the backward pass.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from looplm.errors import UserError
from looplm.hf.modeling import LoopLMForCausalLM


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together."""

    rank: int
    world_size: int
    device: torch.device
    """Where this process computes."""
    grouped: bool
    """Whether there is a process group, be it of one; without it, models are not sharded."""

    @property
    def is_main(self) -> bool:
        """Rank 0, which writes for all."""
        return self.rank == 0

    @staticmethod
    def current() -> "Ranks":
        """Who this process is: a member of torch's process group, if one is set up, or alone."""
        grouped = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        return Ranks(rank, world_size, _device(), grouped)

    def sum(self, values: Tensor) -> Tensor:
        """Sums a tensor over the ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def memory_bytes(self) -> int | None:
        """Memory that this process may count on, its GPU's or its share of the machine's; None where unknown."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory
        if sys.platform == "win32":
            return None
        on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // on_this_machine

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.world_size > 1:
            dist.barrier()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; without it bf16 autocast is slower than float32."""
    # There is no public query; these two are what PyTorch's own kernels ask.
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@contextmanager
def process_group() -> Iterator[Ranks]:
    """Joins the group of processes that torchrun started, and leaves it at the end; alone without torchrun.

    A group that is set up already is used as it is. Raises UserError where there are more processes than GPUs.
    """
    if dist.is_initialized() or "RANK" not in os.environ:
        yield Ranks.current()
        return
    if torch.cuda.is_available():
        local_rank, num_gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local_rank >= num_gpus:
            raise UserError(
                f"torchrun started process {local_rank + 1} on a machine of {num_gpus} GPUs; give it "
                f"--nproc_per_node {num_gpus}."
            )
        torch.cuda.set_device(local_rank)
        # gloo too: checkpoints are written from a thread, by way of the CPU.
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", local_rank))
    else:
        dist.init_process_group("gloo")
    try:
        yield Ranks.current()
    finally:
        dist.destroy_process_group()


def shard(model: LoopLMForCausalLM, ranks: Ranks) -> None:
    """Shards `model` over the ranks in place, if there is a process group and it has not been done.

    Every rank must hold the same weights, on `ranks.device`. From then on each holds a slice of every parameter as a
    DTensor, `within` is the verb to run it through, and gradients are summed over ranks, not averaged: the objectives
    divide by the tokens of all ranks. Parameters stay gathered between the forward and the backward pass.
    """
    if not ranks.grouped or isinstance(model, FSDPModule):
        return
    fully_shard(model, mesh=init_device_mesh(ranks.device.type, (ranks.world_size,)))
    assert isinstance(model, FSDPModule)  # fully_shard has changed its class
    model.set_gradient_divide_factor(1.0)
    # gloo has no scaled sum, and a factor of 1 needs none.
    model.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, "within")


def defer_reduction(model: LoopLMForCausalLM, deferred: bool) -> None:
    """Whether the next backward pass keeps gradients and gathered weights here, for more micro-batches to follow."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(not deferred)
        model.set_reshard_after_backward(not deferred)


def gathered_no_more(model: LoopLMForCausalLM) -> None:
    """Gives back what a forward without a backward pass has gathered."""
    if isinstance(model, FSDPModule):
        model.reshard()
