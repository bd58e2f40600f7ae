"""The obvious way to train a looped model with transformers: a deep Llama whose layers repeat, and R losses.

This is the baseline, written as one would write it in an afternoon: full logits after each pass of the stack,
`F.cross_entropy` in float32 as transformers does, the losses weighted by the gate, one `backward`.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from looplm.bench.sizes import TrainSizes
from looplm.model.gate import exit_entropy, exit_pdf


class NaiveLoopedLlama(nn.Module):
    """A Llama of R * L layers, of which L are stored, with the final norm, a gate and a loss after every L.

    It computes what :func:`looplm.objectives.expected_loss` computes on a LoopLM with the same weights.
    """

    def __init__(self, sizes: TrainSizes) -> None:
        super().__init__()
        config = sizes.model_config()
        self.sizes = sizes
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_hidden_layers,
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                rms_norm_eps=config.rms_norm_eps,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                initializer_range=config.initializer_range,
                tie_word_embeddings=False,
                attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
                use_cache=False,
            )
        )
        stored = list(self.llama.model.layers)
        self.llama.model.layers = nn.ModuleList(stored * sizes.num_loops)  # the same modules, R times
        self.gate = nn.Linear(config.hidden_size, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The Stage-I loss of a batch: token ids and unshifted labels (B, S), all of them predicted."""
        model, targets = self.llama.model, labels[:, 1:].flatten()
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        state = model.embed_tokens(input_ids)
        rotary = model.rotary_emb(state, position_ids=positions)
        losses, gate_logits = [], []
        for i, layer in enumerate(model.layers, start=1):
            state = layer(state, position_embeddings=rotary)
            if i % self.sizes.num_layers == 0:
                state = model.norm(state)
                gate_logits.append(self.gate(state).squeeze(-1)[:, :-1])
                losses.append(self.token_losses(state, targets))
        logits = torch.stack(gate_logits)  # (R, B, S - 1)
        expected = (exit_pdf(logits) * torch.stack(losses).view_as(logits)).sum(0)
        return (expected - self.sizes.beta * exit_entropy(logits)).mean()

    def token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of every predicted token, (B * (S - 1),), from full logits."""
        logits = self.llama.lm_head(hidden[:, :-1])
        wide = torch.promote_types(logits.dtype, torch.float32)
        return cross_entropy(logits.flatten(0, 1).to(wide), targets, reduction="none")
