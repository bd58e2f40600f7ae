"""Whether a device computes what the CPU computes: the model, bfloat16, the engine's cache, the chunked loss."""

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from looplm.bench.figures import Figure, checked
from looplm.hf.load import load
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.inference import Engine, FixedDepth, SamplingParams
from looplm.inference.reference import generate as reference
from looplm.objectives.cross_entropy import shift_labels, weighted_cross_entropy

SECTION = "agreement"


def agreement(checkpoint: Path, token_ids: list[int], device: torch.device, *, seq_len: int) -> Iterator[Figure]:
    """Figures on a checkpoint and a text, at least 4 * seq_len tokens of it, each as soon as it is there."""
    torch.backends.cuda.matmul.allow_tf32 = False
    on_cpu = load(checkpoint, dtype=torch.float32, device="cpu").eval()
    wide = copy.deepcopy(on_cpu).to(device)  # pyright: ignore[reportArgumentType]
    narrow = copy.deepcopy(on_cpu).to(device, torch.bfloat16)  # pyright: ignore[reportArgumentType]
    ids = torch.tensor(token_ids[: 4 * seq_len]).view(4, seq_len)
    yield from _forwards(on_cpu, wide, narrow, ids, device)
    yield from _generation(wide, token_ids, seq_len)
    yield from _losses(wide, ids.to(device))


@torch.no_grad()
def _forwards(
    on_cpu: LoopLMForCausalLM, wide: LoopLMForCausalLM, narrow: LoopLMForCausalLM, ids: Tensor, device: torch.device
) -> Iterator[Figure]:
    expected = on_cpu(ids).logits
    on_device, in_bf16 = wide(ids.to(device)).logits, narrow(ids.to(device)).logits
    difference = (on_device.cpu() - expected).abs().max().item()
    yield checked(SECTION, "float32 logits, device against CPU", difference, 1e-3)
    same = (in_bf16.argmax(-1) == on_device.argmax(-1)).double().mean().item()
    yield Figure(
        section=SECTION,
        what="bfloat16 chooses the token of float32",
        value=f"{same:.1%} of positions (at least 95%)",
        verdict="ok" if same >= 0.95 else "FAILED",
        number=same,
    )


def _generation(model: LoopLMForCausalLM, token_ids: list[int], seq_len: int) -> Iterator[Figure]:
    """Greedy, in one batch with a cache, against one at a time without."""
    prompts = [token_ids[i * seq_len : i * seq_len + 8 + 5 * i] for i in range(4)]
    params, depth = SamplingParams(max_tokens=16, ignore_eos=True), FixedDepth(model.config.num_loops)
    cached = [result.token_ids for result in Engine(model).generate(prompts, params, depth)]
    plain = [reference(model, prompt, params, depth).token_ids for prompt in prompts]
    same = sum(mine == theirs for mine, theirs in zip(cached, plain, strict=True))
    yield Figure(
        section=SECTION,
        what="engine with cache = all loops without, greedy",
        value=f"{same} of {len(prompts)} texts",
        verdict="ok" if same == len(prompts) else "FAILED",
        number=same / len(prompts),
    )


def _losses(model: LoopLMForCausalLM, ids: Tensor) -> Iterator[Figure]:
    """The chunked head against full logits: value, and gradient of the head's weight relative to its size."""
    with torch.no_grad():
        hidden = model.model(ids).loop_hidden_states
    targets = shift_labels(ids)
    weights = torch.full((len(hidden), *ids.shape), 1 / targets.numel(), device=ids.device)
    head = model.lm_head.weight.detach().clone().requires_grad_()

    def full(head: Tensor) -> Tensor:
        logits = (torch.stack(hidden) @ head.T).float()
        repeated = targets.expand(len(hidden), *ids.shape)
        return cross_entropy(logits.flatten(0, 2), repeated.flatten(), reduction="sum") / targets.numel()

    for name, most in (("float32", 1e-5), ("bfloat16 autocast", 2e-2)):
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=name != "float32"):
            value = weighted_cross_entropy(head, hidden, targets, weights)[0]
        (gradient,) = torch.autograd.grad(value, head)
        exact = full(head)
        (expected,) = torch.autograd.grad(exact, head)
        difference = abs(value.item() - exact.item()) / exact.item()
        yield checked(SECTION, f"chunked loss against full float32 logits, {name}", difference, most)
        distance = ((gradient - expected).norm() / expected.norm()).item()
        yield checked(SECTION, f"gradient of the head, {name}", distance, most)
