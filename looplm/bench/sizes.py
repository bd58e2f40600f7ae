"""What is measured: the size of the model and of the batch."""

from dataclasses import dataclass
from typing import Literal, get_args

from looplm.errors import UserError
from looplm.model.config import LoopedConfig, NormPlacement

Precision = Literal["bf16", "fp32", "fp64"]
Compile = Literal["none", "blocks", "blocks+loss"]
"""What torch.compile gets: nothing, every block on both sides, or the baseline's head and loss too (ours takes its
softmax in the cache and has nothing there to compile)."""


@dataclass(kw_only=True, frozen=True)
class TrainSizes:
    """A looped decoder and a batch. Raises UserError for what no model or batch can be.

    Every query head has its own keys, and the LM head is a matrix of its own.
    """

    hidden_size: int = 512
    intermediate_size: int = 1408
    num_layers: int = 6
    """L, layers of the core."""
    num_loops: int = 4
    head_dim: int = 64
    vocab_size: int = 49_152
    seq_len: int = 512
    batch_size: int = 8
    precision: Precision = "bf16"
    """bf16: autocast, parameters and optimizer in float32; fp64 is for checking that two sides agree."""
    norm_placement: NormPlacement = "pre"
    """Llama's, as the baseline has it; the Ouro shape has its own."""
    beta: float = 0.05
    """Entropy weight of the Stage-I loss."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "head_dim"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.seq_len < 2:
            raise UserError(f"seq_len is {self.seq_len}; a row needs two tokens to have one to predict.")
        if self.hidden_size % self.head_dim:
            raise UserError(f"hidden_size {self.hidden_size} is not a multiple of head_dim {self.head_dim}.")
        if self.precision not in get_args(Precision):
            raise UserError(f"precision is {self.precision!r}; choose one of {', '.join(get_args(Precision))}.")
        self.model_config()

    @property
    def num_tokens(self) -> int:
        """Positions of a batch."""
        return self.batch_size * self.seq_len

    def model_config(self) -> LoopedConfig:
        """The architecture."""
        heads = self.hidden_size // self.head_dim
        return LoopedConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=self.head_dim,
            num_loops=self.num_loops,
            norm_placement=self.norm_placement,
            max_position_embeddings=self.seq_len,
        )


SMOKE = TrainSizes(
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_loops=2,
    head_dim=16,
    vocab_size=64,
    seq_len=16,
    batch_size=2,
)
"""Seconds, and no figure worth keeping."""
