"""The looped transformer. The loop over loops stands here, once; everything else drives it through four verbs.

    encode     token ids -> input embedding e                      (embedding, prelude)
    run_core   state -> raw state after one more loop              (injection, L layers)
    readout    raw state -> next state, hidden state, gate logit   (final norm, gate)
    run_coda   hidden state -> what the LM head reads              (coda; nothing for Ouro)

`loops` chains them over a whole sequence and `forward` collects what it yields. Parameter names are those
of the released Ouro checkpoints, less their `model.` prefix; the LM head belongs to the caller.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn

from looplm.errors import UserError
from looplm.model.attention import AttentionContext
from looplm.model.block import Block
from looplm.model.cache import LoopIndex, SequenceCache
from looplm.model.config import LoopedConfig
from looplm.model.flex import document_block_mask, packs_in_blocks
from looplm.model.injection import SCALAR_START, ConcatInjection, LayerInjections, ScalarInjection, build_injection
from looplm.model.lora import LayerLora, LoraBank
from looplm.model.mask import causal_mask, positions_from_documents, positions_from_mask
from looplm.model.norm import RMSNorm
from looplm.model.rope import rope_cos_sin


class Readout(NamedTuple):
    """What one loop leaves behind."""

    state: Float[Tensor, "B S D"]
    """Input of the next loop."""
    hidden: Float[Tensor, "B S D"]
    """What the coda or LM head will read: the normed state that the gate has read, or the raw one before a coda that
    asks for it (`coda_input`)."""
    gate_logits: Float[Tensor, "B S"]
    """Logit of the hazard of leaving after this loop."""


@dataclass(frozen=True)
class LoopedOutput:
    """What :meth:`LoopedTransformer.forward` returns."""

    loop_hidden_states: tuple[Float[Tensor, "B S D"], ...]
    """R states, normed and past the coda: `lm_head(loop_hidden_states[r - 1])` are the logits of loop r."""
    gate_logits: Float[Tensor, "R B S"]


class LoopedTransformer(nn.Module):
    """A decoder whose core of L layers runs R times (Ouro, section 3; defaults are the released architecture)."""

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.config = config
        first_core, first_coda = config.num_prelude_layers, config.num_prelude_layers + config.num_hidden_layers
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.prelude = nn.ModuleList(Block(config, i) for i in range(first_core))
        self.layers = nn.ModuleList(Block(config, i) for i in range(first_core, first_coda))
        self.coda = nn.ModuleList(Block(config, i) for i in range(first_coda, config.num_layers))
        self.norm = self._final_norm()
        self.coda_norm = self._final_norm() if config.num_coda_layers else nn.Identity()
        # MagicNorm: one more parameter-free norm each time the recurrent module ends (HRM-Text).
        magic = config.norm_placement == "magic"
        self.core_exit_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, False) if magic else nn.Identity()
        self.injection = build_injection(config)
        self.lora = nn.ModuleList(LayerLora(config) for _ in self.layers) if config.lora_rank else None
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)
        self.apply(lambda module: initialize(module, config.initializer_range))

    def _final_norm(self) -> nn.Module:
        config = self.config
        if config.final_norm == "none":
            return nn.Identity()
        return RMSNorm(config.hidden_size, config.rms_norm_eps, learned_scale=config.final_norm == "rms")

    def encode(self, input_ids: Int[Tensor, "B S"], context: AttentionContext) -> Float[Tensor, "B S D"]:
        """The input embedding e, past the prelude: the state before loop 1, and what injection adds again."""
        embeds = self.embed_tokens(input_ids)
        for layer in self.prelude:
            embeds = layer(embeds, context, 0, {})
        return embeds

    def run_core(
        self,
        state: Float[Tensor, "B S D"],
        loop_idx: LoopIndex,
        embeds: Float[Tensor, "B S D"],
        context: AttentionContext,
    ) -> Float[Tensor, "B S D"]:
        """One application of the core. Returns the raw state; `readout` norms it.

        `loop_idx` is 0-based. As a vector it gives each row its own loop: injection, LoRA slices and the
        cache follow it row by row, the weights are read once.
        """
        x = state
        for i, layer in enumerate(self.layers):
            x = self._inject(x, i, loop_idx, embeds)
            x = layer(x, context, loop_idx, self.lora[i](loop_idx) if self.lora is not None else {})
        return self.core_exit_norm(x)

    def _inject(self, x: Tensor, layer_idx: int, loop_idx: LoopIndex, embeds: Tensor) -> Tensor:
        """What layer `layer_idx` of the core reads: most injections stand before the first alone."""
        injection = self.injection
        if isinstance(injection, LayerInjections):
            injection = injection.layers[layer_idx]
        elif layer_idx or injection is None:
            return x
        if isinstance(loop_idx, int):
            return injection(embeds, x) if loop_idx else x
        return torch.where((loop_idx > 0)[:, None, None], injection(embeds, x), x)

    def readout(self, raw: Float[Tensor, "B S D"]) -> Readout:
        """The final norm after a loop, the gate that reads it, and the state the next loop reads."""
        normed = self.norm(raw)
        state = normed if self.config.loop_state == "normed" else raw
        raw_coda = self.config.num_coda_layers > 0 and self.config.coda_input == "raw"
        return Readout(state, raw if raw_coda else normed, self.early_exit_gate(normed).squeeze(-1))

    def run_coda(
        self, hidden: Float[Tensor, "B S D"], loop_idx: LoopIndex, context: AttentionContext
    ) -> Float[Tensor, "B S D"]:
        """The coda layers and their norm; without a coda, `hidden` itself. `loop_idx` keeps the cached keys apart."""
        for layer in self.coda:
            hidden = layer(hidden, context, loop_idx, {})
        return self.coda_norm(hidden)

    def loops(
        self,
        embeds: Float[Tensor, "B S D"],
        num_loops: int,
        context: AttentionContext,
        backprop_loops: int | None = None,
    ) -> Iterator[Readout]:
        """Applies the core `num_loops` times to a whole sequence, yielding what each loop leaves behind.

        backprop_loops: as in :meth:`forward`.
        """
        first = 0 if backprop_loops is None else num_loops - backprop_loops  # the first loop that carries gradient
        state = embeds
        for loop_idx in range(num_loops):
            with torch.set_grad_enabled(torch.is_grad_enabled() and loop_idx >= first):
                raw = self.run_core(state, loop_idx, embeds, context)
            result = self.readout(raw)
            # The readout of an early loop still teaches norm and gate; the next loop must not reach them through it.
            state = result.state if loop_idx >= first else result.state.detach()
            yield result

    def forward(
        self,
        input_ids: Int[Tensor, "B S"],
        attention_mask: Integer[Tensor, "B M"] | Bool[Tensor, "B M"] | None = None,
        position_ids: Int[Tensor, "#B S"] | None = None,
        document_ids: Int[Tensor, "B S"] | None = None,
        num_loops: int | None = None,
        cache: SequenceCache | None = None,
        backprop_loops: int | None = None,
    ) -> LoopedOutput:
        """Runs all loops over a batch, and the coda after each.

        attention_mask: 1 at real tokens, 0 at padding on either side; with a cache it covers the cached
        positions too. document_ids: packed documents, which do not see each other; an id must not come back
        after another one; not with a cache.
        position_ids: rotary positions; by default they count real tokens, or restart at each document.
        num_loops: depth of this call, R when None; may exceed R. Raises UserError below 1.
        backprop_loops: truncated back-propagation (Huginn, arXiv 2502.05171): only the last so many applications
            of the core carry gradient, and the state that enters the first of them is detached. Norm, gate and
            coda learn at every loop. Embeddings and prelude then learn through the input injection and a tied head
            alone, and not at all without either. None, or as many as there are loops: the full gradient. Raises
            UserError below 1.
        """
        num_loops = check_num_loops(self.config.num_loops if num_loops is None else num_loops)
        if backprop_loops is not None and backprop_loops < 1:
            raise UserError(f"backprop_loops is {backprop_loops}; at least the last loop must carry gradient.")
        context = self.context(input_ids, attention_mask, position_ids, document_ids, cache)
        results = list(self.loops(self.encode(input_ids, context), num_loops, context, backprop_loops))
        return LoopedOutput(
            loop_hidden_states=tuple(self.run_coda(r.hidden, i, context) for i, r in enumerate(results)),
            gate_logits=torch.stack([r.gate_logits for r in results]),
        )

    def context(
        self,
        input_ids: Int[Tensor, "B S"],
        attention_mask: Integer[Tensor, "B M"] | Bool[Tensor, "B M"] | None = None,
        position_ids: Int[Tensor, "#B S"] | None = None,
        document_ids: Int[Tensor, "B S"] | None = None,
        cache: SequenceCache | None = None,
    ) -> AttentionContext:
        """The mask, rotary tables and cache that all layers of a pass over `input_ids` share. See `forward`."""
        past = cache.seq_len if cache is not None else 0
        if document_ids is not None and past:
            raise UserError("document_ids mark packed training rows; they cannot be combined with a filled cache.")
        seq_len, device = input_ids.shape[1], input_ids.device
        if attention_mask is not None and attention_mask.shape[1] != past + seq_len:
            raise UserError(
                f"attention_mask covers {attention_mask.shape[1]} positions; it must cover the {past} cached and the "
                f"{seq_len} new ones."
            )
        index = torch.arange(past, past + seq_len, device=device)[None]  # (1, S)
        mask, dtype = None, self.embed_tokens.weight.dtype
        if document_ids is not None and attention_mask is None and packs_in_blocks(document_ids, dtype):
            mask = document_block_mask(document_ids)
        # A single new token may read everything cached; only padding or packing then needs a mask.
        elif attention_mask is not None or document_ids is not None or (past and seq_len > 1):
            mask = causal_mask(index, past + seq_len, attention_mask, document_ids)
        if position_ids is None and document_ids is not None:
            position_ids = positions_from_documents(document_ids)
        elif position_ids is None and attention_mask is not None:
            position_ids = positions_from_mask(attention_mask)[:, past:]
        positions = index if position_ids is None else position_ids
        config = self.config
        cos, sin = rope_cos_sin(positions, config.head_dim, config.rope_theta, dtype, config.position_scaling)
        return AttentionContext(cos, sin, mask, cache)


def check_num_loops(num_loops: int) -> int:
    """Returns `num_loops`; raises UserError unless it is an integer that counts at least one loop."""
    if not isinstance(num_loops, int) or isinstance(num_loops, bool):
        raise UserError(f"num_loops is {num_loops!r}; it must be an integer, the number of loops to run.")
    if num_loops < 1:
        raise UserError(f"num_loops is {num_loops}; depth counts loops from 1 (the trained depth may be exceeded).")
    return num_loops


def initialize(module: nn.Module, std: float) -> None:
    """Starting values of one module's own parameters: matrices normal(0, std), norms 1, biases and LoRA b 0.

    A concat injection starts at [I, 0], `concat_random` apart, and the scalar injection's norm at `std`, the root mean
    square of freshly drawn embeddings. Call it through `Module.apply`, which reaches children before parents.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, RMSNorm) and module.weight is not None:
        nn.init.ones_(module.weight)
    elif isinstance(module, LoraBank):
        nn.init.normal_(module.a, std=std)
        nn.init.zeros_(module.b)
    elif isinstance(module, ScalarInjection):
        nn.init.constant_(module.logit, SCALAR_START)
        nn.init.constant_(module.norm.weight, std)  # pyright: ignore[reportArgumentType]
    elif isinstance(module, ConcatInjection) and module.starts_neutral:
        nn.init.zeros_(module.proj.weight)
        nn.init.eye_(module.proj.weight[:, : module.proj.out_features])
