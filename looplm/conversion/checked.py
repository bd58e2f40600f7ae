"""Convert, upcycle and export as whole jobs: make it, write it, read it back, compare, and only then give it its name.

When anything goes wrong, the comparison included, nothing is left behind.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from looplm.conversion.dense_source import (
    DenseSource,
    check_weights,
    dense_tokenizer,
    open_dense,
    reference_model,
    source_dtype,
)
from looplm.conversion.dense_to_looped import Looping, build_looped, looped_config, start_gate_bias
from looplm.conversion.exporting import Format, exported
from looplm.conversion.parity import TOLERANCE, Comparison, compare, difference, loop_losses
from looplm.conversion.parity_text import MAX_TOKENS, parity_ids
from looplm.conversion.trace import Layers, Place, Trace, trace_dense, trace_looped
from looplm.conversion.upcycling import LayerOrder, duplicated_layers, source_name, upcycle
from looplm.errors import UserError
from looplm.hf.adapter import load_adapter, merge_adapter
from looplm.hf.checkpoint import find_checkpoint, read_tensors
from looplm.hf.load import TOKENIZER_FILES, check_device, check_dtype, load, load_tokenizer
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.hf.save import check_shard_size, new_target, write_model, writing
from looplm.model.config import LoopedConfig


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`convert_checkpoint` has made, and how it compares to the dense model."""

    target: Path
    config: LoopedConfig
    dtype: torch.dtype
    num_tokens: int
    """Positions compared."""
    on_text: bool
    """False where there was no tokenizer, and random ids were compared; their losses say little."""
    comparison: Comparison
    """transformers' dense model against the converted one at one loop; at all loops, where layers were tied."""
    is_exact: bool
    """Whether the two should agree but for rounding; tied layers need not."""
    losses: list[float]
    """Next-token loss in nats at loops 1 .. R, before any training."""


@dataclass(frozen=True)
class UpcyclingReport:
    """What :func:`upcycle_checkpoint` has made."""

    target: Path
    num_layers: tuple[int, int]
    """Layers of the core before and after."""
    num_tensors: int
    """Tensors read back from the target, each found identical to the one it copies."""
    num_tokens: int
    on_text: bool
    losses_before: list[float]
    losses_after: list[float]
    """Next-token loss in nats at loops 1 .. R."""
    equivalent: list[tuple[int, int, float]] | None
    """(loops after, loops before, largest difference of the logits) where the two must agree; None where the final
    norm or an injection stands between the loops, or the order is interleaved."""


@dataclass(frozen=True)
class ExportReport:
    """What :func:`export_checkpoint` has made."""

    target: Path
    files: list[str]
    """Of the weights."""
    num_tensors: int
    """Tensors read back from the target, each found identical to the exported one."""
    comparison: Comparison
    """The checkpoint against the re-imported export, over random ids; to the last bit."""


# --- Convert --------------------------------------------------------------------------------------------------------


def convert_checkpoint(
    source: str | Path | DenseSource,
    out: str | Path,
    looping: Looping,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    text: Path | None = None,
    max_tokens: int = MAX_TOKENS,
    max_shard_size: str | int | None = None,
    seed: int = 0,
) -> ConversionReport:
    """Converts a dense model to a new looped checkpoint directory, tokenizer included; see
    :func:`~looplm.conversion.dense_to_looped.dense_to_looped`.

    The directory gets its name only when the model read back from it has given what transformers' dense model does
    with the same rounded weights, on `text` (a UTF-8 file; None: a passage that ships) or on random ids where there is
    no tokenizer. They are compared in float32, float64 if the weights are. Raises UserError when anything is wrong;
    nothing is left behind then.
    """
    target, kept, place = new_target(out), check_dtype(dtype), check_device(device)
    if max_shard_size is not None:
        check_shard_size(max_shard_size)
    dense = open_dense(source)
    check_weights(dense)  # before transformers, which would fill in what is missing
    config = looped_config(dense.shape, looping)
    start_gate_bias(config.num_loops, looping.start_depth)
    tokenizer = dense_tokenizer(dense)
    ids = parity_ids(dense.shape, tokenizer, text, max_tokens)
    written = kept or source_dtype(dense)
    computed = torch.float64 if written == torch.float64 else torch.float32
    tied = looping.lora_from == "svd"

    reference = reference_model(dense, written, computed).to(place)  # pyright: ignore[reportCallIssue, reportArgumentType]
    expected = trace_dense(reference, ids, Layers.of(config), config.num_loops if tied else 1)
    del reference
    gc.collect()
    with writing(target) as partial:
        model = build_looped(dense, looping, written, place, ids, seed)
        write_model(partial, model, tokenizer, max_shard_size=max_shard_size)
        del model
        gc.collect()
        found = trace_looped(load(partial, computed, place), ids, name="the converted model")
        comparison = compare(expected, found)
        if not tied:
            refuse_parting(comparison)
    return ConversionReport(
        target, config, written, ids.shape[1], tokenizer is not None, comparison, not tied, loop_losses(found)
    )


def refuse_parting(comparison: Comparison) -> None:
    """Raises UserError that names the first place where two models part that should not."""
    if parting := comparison.first_parting:
        raise UserError(
            f"The parity check failed: {comparison.names[1]} parts from {comparison.names[0]} at {parting.place}, by "
            f"{parting.largest:.2g} ({parting.relative:.1e} of the largest entry). Nothing was written. Either "
            "the weights hold numbers that are not finite or overflow in this dtype, or this is a defect of looplm: "
            "please report it."
        )


# --- Upcycle --------------------------------------------------------------------------------------------------------


def upcycle_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    num_layers: int,
    order: LayerOrder = "stacked",
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    text: Path | None = None,
    max_tokens: int = MAX_TOKENS,
    max_shard_size: str | int | None = None,
) -> UpcyclingReport:
    """Duplicates the core's layers into a new checkpoint directory; see :func:`~looplm.conversion.upcycling.upcycle`.

    The directory gets its name only when every tensor read back is the one it should copy and, where nothing stands
    between two loops, r loops give what r * k did. Raises UserError when anything is wrong; nothing is left behind.
    """
    target = new_target(out)
    model = load(checkpoint, dtype, device)
    config = model.model.config
    layer_of = duplicated_layers(config.num_hidden_layers, num_layers, order)
    tokenizer = own_tokenizer(checkpoint)
    ids = parity_ids(config, tokenizer, text, max_tokens)
    before = trace_looped(model, ids, name="the model before")
    with writing(target) as partial:
        grown = upcycle(model, num_layers, order)
        write_model(partial, grown, tokenizer, max_shard_size=max_shard_size)
        del grown
        weights = model.state_dict()
        num_tensors = check_identical(partial, weights, lambda name: source_name(name, layer_of))
        after = trace_looped(load(partial, device=device), ids, name="the upcycled model")
        equivalent = None
        if config.final_norm == "none" and config.injection == "none" and not config.lora_rank and order == "stacked":
            equivalent = equivalent_depths(before, after, num_layers // config.num_hidden_layers)
    return UpcyclingReport(
        target,
        (config.num_hidden_layers, num_layers),
        num_tensors,
        ids.shape[1],
        tokenizer is not None,
        loop_losses(before),
        loop_losses(after),
        equivalent,
    )


def equivalent_depths(before: Trace, after: Trace, copies: int) -> list[tuple[int, int, float]]:
    """Logits at r loops after and r * `copies` before, as deep as was traced. Raises UserError where they differ."""
    found: list[tuple[int, int, float]] = []
    for loops in range(1, before.num_loops // copies + 1):
        logits = [t.values[Place(r, "logits")] for t, r in ((before, loops * copies), (after, loops))]
        apart = difference(Place(loops, "logits"), *logits)
        if not apart.relative <= TOLERANCE:
            raise UserError(
                f"The parity check failed: the upcycled model at {loops} loops differs from the one before at "
                f"{loops * copies} by {apart.largest:.2g}. Nothing was written; please report it."
            )
        found.append((loops, loops * copies, apart.largest))
    return found


# --- Export ---------------------------------------------------------------------------------------------------------


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    format: Format,
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: str | int | None = None,
    adapter: str | Path | None = None,
) -> ExportReport:
    """Writes a checkpoint in the Ouro format or in ours, to a new directory; see :func:`exported`.

    adapter: a directory whose LoRA adapter is merged into the weights first, in float32 or wider; the result is in the
    checkpoint's dtype, or in `dtype`.

    The directory gets its name only when every tensor read back is the one exported and the model read back computes
    the same to the last bit. Raises UserError when the format cannot carry the model, or anything else is wrong;
    nothing is left behind.
    """
    target = new_target(out)
    model = load(checkpoint, dtype) if adapter is None else merged_checkpoint(checkpoint, adapter, dtype)
    other = exported(model, format)
    tokenizer = own_tokenizer(checkpoint)
    ids = parity_ids(model.model.config, None, max_tokens=32)
    with writing(target) as partial:
        write_model(partial, other, tokenizer, max_shard_size=max_shard_size)
        num_tensors = check_identical(partial, model.state_dict(), str)
        expected = trace_looped(model, ids, name="the checkpoint")
        comparison = compare(expected, trace_looped(load(partial), ids, name="the export"), tolerance=0.0)
        refuse_parting(comparison)
        files = sorted(path.name for path in partial.glob("*.safetensors"))
    return ExportReport(target, files, num_tensors, comparison)


def merged_checkpoint(
    checkpoint: str | Path, adapter: str | Path, dtype: torch.dtype | str | None = None
) -> LoopLMForCausalLM:
    """A checkpoint with an adapter merged into it; see :func:`~looplm.hf.adapter.load_adapter` for what it raises."""
    wanted = check_dtype(dtype)
    model = load(checkpoint)
    kept = wanted or model.dtype
    model = model.to(dtype=torch.promote_types(kept, torch.float32))  # pyright: ignore[reportCallIssue]
    load_adapter(model, adapter)
    merge_adapter(model)
    return model.to(dtype=kept)


# --- What was written -----------------------------------------------------------------------------------------------


def own_tokenizer(checkpoint: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies with a looped checkpoint, or None. Raises UserError for one that cannot be read."""
    directory = find_checkpoint(checkpoint)
    return load_tokenizer(directory) if any((directory / name).is_file() for name in TOKENIZER_FILES) else None


def check_identical(directory: Path, weights: Mapping[str, Tensor], source_of: Callable[[str], str]) -> int:
    """The number of tensors in `directory`, each of which is bit for bit the one in `weights` named by `source_of`.

    Raises UserError naming those that are not.
    """
    stored = read_tensors(directory)
    changed: list[str] = []
    for file in {tensor.file for tensor in stored.values()}:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                found, expected = opened.get_tensor(name), weights[source_of(name)].cpu()
                same_kind = found.dtype == expected.dtype and found.shape == expected.shape
                # As bytes: a NaN is not equal to itself.
                if not same_kind or not torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8)):
                    changed.append(name)
    if changed:
        raise UserError(f"Read back from {directory}, these tensors are not those written: {', '.join(changed)}.")
    return len(stored)
