"""The two sides of the comparison, built so that nothing differs but how loops and losses are run."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from looplm.bench.naive import NaiveLoopedLlama
from looplm.bench.sizes import Compile, TrainSizes
from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.objectives import expected_loss
from looplm.training.layer_wrapping import wrap_layers
from looplm.training.stage_recipe import ActivationCheckpointing

SideName = Literal["naive", "looplm"]


@dataclass
class Side:
    """A model that can make training steps."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    """(input_ids, labels), both (B, S) -> scalar."""
    sizes: TrainSizes
    device: torch.device
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(0)
        shape = (self.sizes.batch_size, self.sizes.seq_len)
        self.input_ids = torch.randint(self.sizes.vocab_size, shape, generator=generator).to(self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        """bf16 autocast where the sizes ask for it."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.sizes.precision == "bf16" else nullcontext()

    def step(self) -> float:
        """Forward, backward, AdamW; returns the loss before the step. No gradient is left behind."""
        with self.autocast():
            loss = self.loss(self.input_ids, self.input_ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()  # on a device this waits for the whole step

    @property
    def num_parameters(self) -> int:
        """Stored parameters; one that is used several times counts once."""
        return sum(p.numel() for p in self.model.parameters())


def build_side(
    name: SideName,
    sizes: TrainSizes,
    *,
    compile: Compile = "none",
    checkpointing: ActivationCheckpointing = "none",
    device: str = "cpu",
) -> Side:
    """One side, freshly initialised from seed 0.

    checkpointing: what our backward pass runs again, see :func:`looplm.training.layer_wrapping.wrap_layers`.
    """
    torch.manual_seed(0)
    if name == "naive":
        return _naive(sizes, compile, torch.device(device))
    return _ours(sizes, compile, checkpointing, torch.device(device))


def _naive(sizes: TrainSizes, compile: Compile, device: torch.device) -> Side:
    with device:
        model = NaiveLoopedLlama(sizes).to(_dtype(sizes))
    if compile != "none":
        for layer in model.llama.model.layers[: sizes.num_layers]:
            layer.compile()
    if compile == "blocks+loss":
        model.token_losses = torch.compile(model.token_losses)
    return Side(model, model, sizes, device)


def _ours(sizes: TrainSizes, compile: Compile, checkpointing: ActivationCheckpointing, device: torch.device) -> Side:
    with device:  # drawn where it will stay
        model = LoopLMForCausalLM(LoopLMConfig.from_model_config(sizes.model_config()))
    model.to(_dtype(sizes))  # pyright: ignore[reportArgumentType]
    wrap_layers(model, compile != "none", checkpointing)

    def loss(input_ids: Tensor, labels: Tensor) -> Tensor:
        return expected_loss(model, model.model(input_ids), labels, beta=sizes.beta)[0]

    return Side(model, loss, sizes, device)


def _dtype(sizes: TrainSizes) -> torch.dtype:
    return torch.float64 if sizes.precision == "fp64" else torch.float32
