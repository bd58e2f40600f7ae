"""The looped transformer as a Hugging Face causal language model: forward, loss, `generate`, tied embeddings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from looplm.errors import UserError
from looplm.hf.cache import SlottedCache, growing_cache
from looplm.hf.config import LoopLMConfig, OuroConfig
from looplm.model.looped import LoopedOutput, LoopedTransformer, check_num_loops, initialize
from looplm.objectives import expected_loss
from looplm.objectives.cross_entropy import HasLoopStates

Result = TypeVar("Result")

CACHE_FIELD = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"
"""What this release of transformers calls the cache: `past_key_values` in 5.0, `cache` later."""


@dataclass
class LoopLMOutput(CausalLMOutputWithPast):
    """What a forward returns.

    loss: scalar, with labels. logits: (B, S, V), of the last loop. past_key_values: the cache, if one is in use.
    hidden_states: the loop states again, if `output_hidden_states` asks for them under that name.
    """

    loop_hidden_states: tuple[Tensor, ...] | None = None
    """R states (B, S, D), normed: `lm_head(loop_hidden_states[r - 1])` are the logits of loop r."""
    gate_logits: Tensor | None = None
    """(R, B, S), logits of the hazard of leaving after each loop."""


class PackingArguments(TypedDict, total=False):
    """Where documents start, in the terms of other kernels. TRL sends it along with restarting position_ids."""

    seq_idx: Tensor
    cu_seq_lens_q: Tensor
    cu_seq_lens_k: Tensor
    max_length_q: int
    max_length_k: int


class LoopLMForCausalLM(PreTrainedModel, GenerationMixin):
    """A LoopLM with its LM head, usable wherever transformers takes a causal language model.

    `forward` runs every loop; work is really skipped in :class:`looplm.Engine`. transformers' own `generate`
    always uses one depth: `config.num_loops`, or `generate(..., num_loops=2)`. It stops at the ids of
    `generation_config.eos_token_id`; released base Ouro configs do not list <|im_end|> there (the Engine adds it).
    """

    config_class: ClassVar[type] = LoopLMConfig
    config: LoopLMConfig | OuroConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    accepts_loss_kwargs = True
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Block"]
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LoopLMConfig | OuroConfig) -> None:
        super().__init__(config)
        model_config = config.to_model_config()
        self.model = LoopedTransformer(model_config)
        self.lm_head = nn.Linear(model_config.hidden_size, model_config.vocab_size, bias=False)
        initialize(self.lm_head, model_config.initializer_range)
        self.gradient_checkpointing = False
        self.post_init()

    # --- Weights ------------------------------------------------------------------------------------------------

    def init_weights(self) -> None:
        """Ties the head if the config says so. Starting values are drawn where the modules are built."""
        if self.lm_head.weight.device.type != "meta":
            self.tie_weights(recompute_mapping=False)

    def _init_weights(self, module: nn.Module) -> None:
        """Starting values for what transformers finds missing in a checkpoint (`looplm.load` refuses it instead)."""
        # The flag is transformers' own. A module whose weights were all loaded must not be touched, and
        # initialising the concat injection would reach into its child.
        if not all(parameter.__dict__.get("_is_hf_initialized", False) for parameter in module.parameters()):
            initialize(module, self.config.initializer_range)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, (V, D)."""
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the embedding; transformers uses it to resize the vocabulary."""
        self.model.embed_tokens = value  # pyright: ignore[reportAttributeAccessIssue]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As in transformers; the model's own config follows the new vocabulary size."""
        embedding = super().resize_token_embeddings(*args, **kwargs)
        self.model.config = self.config.to_model_config()
        return embedding

    def apply_head(self, function: Callable[..., Result], *args: Any) -> Result:
        """`function(lm_head.weight, *args)`: the one place where an objective gets the head's weight, (V, D)."""
        return function(self.lm_head.weight, *args)

    def within(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """`function(self, *args, **kwargs)`: the verb through which everything is run on a model that may be sharded.

        It is the one registered forward method under FSDP2. What happens inside, the bare model's forward and the
        head under an objective, meets whole weights, gathered once; outside are only shards.
        """
        return function(self, *args, **kwargs)

    # --- Forward ------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_loops: int | None = None,
        document_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        inputs_embeds: Tensor | None = None,
        cache_position: Tensor | None = None,
        **packing: Unpack[PackingArguments],
    ) -> LoopLMOutput | tuple[Any, ...]:
        """Runs all loops over token ids (B, S) and reads the last one out.

        attention_mask: (B, M), 1 at real tokens, M the cached positions and the new ones together.
        position_ids: (1 or B, S). Without a mask, a position that does not increase starts a new document
            (packed rows, as TRL's padding-free collator makes them), and documents do not see each other.
        document_ids: (B, S), the same said directly.
        num_loops: depth of this call, `config.num_loops` when None; may exceed the trained depth.
        past_key_values, cache: two names of one argument, see :class:`~looplm.hf.cache.SlottedCache`.
        use_cache: True makes a cache where none is given. None does not, unlike in dense models: R times the
            memory should not be taken by accident.
        labels: (B, S), unshifted, -100 where ignored. The loss is :meth:`expected_loss`, over `num_items_in_batch`
            tokens. It never holds the logits of all loops, but `logits` are those of the last one all the same,
            since trainers take metrics from them; `logits_to_keep=1` saves their memory and the loss stays.
        logits_to_keep: logits of the last n positions only, or of the positions in a tensor; 0 for all.
        return_dict: False gives a tuple. cache_position, packing: not needed, taken from callers that send them.

        Raises UserError for embeddings instead of ids, attention weights (the fused kernel does not return
        them), a mask of the wrong shape, a depth below 1 or a cache that does not fit.
        """
        del cache_position
        check_packing(packing, position_ids if document_ids is None else document_ids)
        if inputs_embeds is not None or input_ids is None:
            raise UserError("A LoopLM reads input_ids; inputs_embeds are not supported.")
        if output_attentions:
            raise UserError("Attention weights are not available: attention runs in a fused kernel.")
        held = self._pick_cache(past_key_values, cache, use_cache)
        output = self._run(input_ids, attention_mask, position_ids, document_ids, num_loops, held)
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        result = LoopLMOutput(
            loss=None if labels is None else self.expected_loss(output, labels, num_items_in_batch),
            logits=self.lm_head(keep_positions(output.loop_hidden_states[-1], logits_to_keep)),
            hidden_states=output.loop_hidden_states if wants_states else None,
            loop_hidden_states=output.loop_hidden_states,
            gate_logits=output.gate_logits,
        )
        if held is not None:
            result[CACHE_FIELD] = held
        return result.to_tuple() if return_dict is False else result

    def _run(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        document_ids: Tensor | None,
        num_loops: int | None,
        held: Cache | None,
    ) -> LoopedOutput:
        """The bare model's forward, after the arguments have been brought into its terms."""
        depth = check_num_loops(self.config.num_loops if num_loops is None else num_loops)
        slotted = SlottedCache(self.model.config, held, depth) if held is not None else None
        past = slotted.seq_len if slotted is not None else 0
        if attention_mask is None and document_ids is None and position_ids is not None and not past:
            document_ids = documents_from_positions(position_ids.expand_as(input_ids))
        return self.model(
            input_ids,
            attention_mask=check_mask(attention_mask, past + input_ids.shape[1]),
            position_ids=position_ids,
            document_ids=document_ids,
            num_loops=depth,
            cache=slotted,
        )

    def expected_loss(
        self, output: HasLoopStates, labels: Tensor, num_items_in_batch: int | Tensor | None = None
    ) -> Tensor:
        """The Stage I loss of a forward's output, with `config.beta`; what `forward` returns when labels are given.

        For trainers that take the loss into their own hands: `SFTTrainer(..., compute_loss_func=model.expected_loss)`.
        """
        labels = labels.to(output.gate_logits.device)
        loss, _ = expected_loss(self, output, labels, beta=self.config.beta, num_tokens=num_items_in_batch)
        return loss

    def hidden_of_last_loop(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        num_loops: int | None = None,
        use_cache: bool | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **packing: Unpack[PackingArguments],
    ) -> BaseModelOutputWithPast:
        """A forward without the head: `last_hidden_state` is (B, S, D), of the last loop. Never makes a cache.

        PEFT sends the other arguments along unset; what a LoopLM does not take or return is refused when it is set.
        """
        check_packing(packing, position_ids if document_ids is None else document_ids)
        if inputs_embeds is not None or output_attentions or output_hidden_states or return_dict is False:
            raise UserError("A forward without the head reads input_ids and returns the last loop's states alone.")
        if use_cache:
            raise UserError("A forward without the head fills no cache; call the model itself with use_cache=True.")
        output = self._run(input_ids, attention_mask, position_ids, document_ids, num_loops, None)
        return BaseModelOutputWithPast(last_hidden_state=output.loop_hidden_states[-1])  # pyright: ignore[reportArgumentType]

    @property
    def base_model(self) -> Callable[..., BaseModelOutputWithPast]:
        """What TRL's trainers call to put a fused head of their own on: :meth:`hidden_of_last_loop`."""
        return self.hidden_of_last_loop

    def _pick_cache(self, old: Cache | None, new: Cache | None, use_cache: bool | None) -> Cache | None:
        """The one cache of a call, under whichever name it came; a fresh one if `use_cache` asks for it."""
        if old is not None and new is not None and old is not new:
            raise UserError("past_key_values and cache are two names of one argument; pass one of them.")
        held = old if new is None else new
        if held is None and not use_cache:
            return None
        if held is not None and use_cache is False:
            raise UserError("use_cache=False contradicts the cache that is passed; leave one of them out.")
        if held is not None and not isinstance(held, Cache):
            raise UserError(f"The cache is a {type(held).__name__}; it must be a transformers Cache.")
        if self.gradient_checkpointing and torch.is_grad_enabled():
            raise UserError(
                "A cache cannot be filled under activation checkpointing, which runs each layer twice: pass "
                "use_cache=False, or call the model under torch.no_grad()."
            )
        return growing_cache() if held is None else held

    # --- What transformers calls --------------------------------------------------------------------------------

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Gives `generate` a cache that grows with the slots in use; transformers would size it for L layers."""
        if model_kwargs.get(CACHE_FIELD) is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
            return
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic", "offloaded"):
            raise UserError(
                f"cache_implementation is {kind!r}; a looped model generates with 'dynamic' or 'offloaded', since "
                "the others size the cache for one loop."
            )
        model_kwargs[CACHE_FIELD] = growing_cache(offloading=kind == "offloaded")

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Recomputes every n-th layer, at every loop, in the backward pass instead of keeping its activations."""
        self.gradient_checkpointing = enable
        for i, layer in enumerate([*self.model.prelude, *self.model.layers, *self.model.coda]):
            # Set on the instance, so that hooks of the layer (FSDP2's) stay outside of what is run twice.
            layer.__dict__.pop("forward", None)
            if enable and i % every_n_layers == 0:
                layer.forward = partial(run_checkpointed, gradient_checkpointing_func, layer)


class OuroForCausalLM(LoopLMForCausalLM):
    """A LoopLM that was read from an Ouro directory, and is written as one."""

    config_class: ClassVar[type] = OuroConfig


def run_checkpointed(function: Callable[..., Any], layer: nn.Module, *args: Any) -> Any:
    """A layer's forward through a checkpointing function; as it is where no backward pass can follow."""
    forward = type(layer).forward
    return function(forward, layer, *args) if torch.is_grad_enabled() else forward(layer, *args)


def documents_from_positions(position_ids: Tensor) -> Tensor | None:
    """Document numbers (B, S) of packed rows, where a position that does not increase starts the next document.

    None when no row holds more than one document.
    """
    starts = position_ids[:, 1:] <= position_ids[:, :-1]  # (B, S - 1)
    if not starts.any():
        return None
    return nn.functional.pad(starts.long().cumsum(-1), (1, 0))


def keep_positions(hidden: Tensor, kept: int | Tensor) -> Tensor:
    """The last `kept` positions of hidden states (B, S, D), those a tensor lists, or all for 0."""
    if isinstance(kept, Tensor):
        return hidden[:, kept]
    return hidden[:, -kept:] if kept else hidden


def check_packing(packing: Mapping[str, Any], documents: Tensor | None) -> None:
    """Raises TypeError for arguments nobody takes, UserError where nothing else says where documents start.

    `packing` repeats what restarting positions say, and is read from them.
    """
    unknown = packing.keys() - PackingArguments.__annotations__.keys()
    if unknown:
        raise TypeError(f"A LoopLM's forward takes no argument named {', '.join(sorted(unknown))}.")
    if packing and documents is None:
        raise UserError("Packed rows need position_ids that restart at every document, or document_ids.")


def check_mask(attention_mask: Tensor | None, num_keys: int) -> Tensor | None:
    """Returns a padding mask (B, M) as integers. Raises UserError unless it covers cached and new positions."""
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2 or attention_mask.shape[1] != num_keys:
        raise UserError(
            f"attention_mask has the shape {tuple(attention_mask.shape)}; it must be (batch, {num_keys}): one column "
            "for every cached and every new position."
        )
    return attention_mask.long()
