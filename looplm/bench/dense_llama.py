"""The same work in transformers: a dense Llama of R * L layers that share the storage of L, and its `generate`."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from looplm.bench.generation import DecodeSizes


def dense_llama(sizes: DecodeSizes) -> LlamaForCausalLM:
    """R * L layers with caches of their own; layer i uses the very parameters of layer i mod L."""
    config = sizes.model_config()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=sizes.num_loops * sizes.num_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=False,
            attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
        )
    )
    model = model.to(sizes.dtype_of()).eval()  # pyright: ignore[reportArgumentType]
    layers = model.model.layers
    for i in range(sizes.num_layers, len(layers)):
        first = layers[i % sizes.num_layers]
        for name, parameter in first.named_parameters():
            owner, _, leaf = name.rpartition(".")
            setattr(layers[i].get_submodule(owner), leaf, parameter)
    return model


@dataclass
class LlamaSide:
    """Greedy `generate`; the time of one token, prompt included, is taken off."""

    model: LlamaForCausalLM
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    seconds: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Generates once in full and once a single token."""
        self.seconds.append(self._time(self.max_tokens) - self._time(1))

    def _time(self, max_tokens: int) -> float:
        input_ids = torch.tensor([list(prompt) for prompt in self.prompts])
        began = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(  # pyright: ignore[reportAttributeAccessIssue]
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        return time.perf_counter() - began

    @property
    def median(self) -> float:
        """Seconds of the median run; the first one warms up."""
        return statistics.median(self.seconds[1:])

    @property
    def tokens_per_second(self) -> float:
        return len(self.prompts) * (self.max_tokens - 1) / self.median
