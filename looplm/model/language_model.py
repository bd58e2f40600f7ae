"""What a looped language model is to everything that runs it, whatever shell is around it."""

from typing import Protocol, runtime_checkable

from torch import nn

from looplm.model.looped import LoopedTransformer


@runtime_checkable
class LoopLM(Protocol):
    """A looped transformer with its LM head, as `looplm.load` returns it."""

    @property
    def model(self) -> LoopedTransformer: ...

    @property
    def lm_head(self) -> nn.Linear: ...
