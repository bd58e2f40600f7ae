"""One recorded pass over prompts: the states of every loop and layer at chosen positions."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from looplm.errors import UserError
from looplm.model.language_model import LoopLM
from looplm.model.looped import LoopedTransformer, check_num_loops

MAX_BYTES = 4 * 2**30


@dataclass(kw_only=True, frozen=True)
class Trace:
    """N points, each a position of a prompt, on the CPU. Floats are float32 (float64 of a float64 model)."""

    layer_states: Float[Tensor, "R L N D"] | None
    """What each core layer returns, before any final norm; None where they were not asked for."""
    states: Float[Tensor, "R N D"]
    """What the next loop reads."""
    hidden: Float[Tensor, "R N D"]
    """What the LM head reads, past a coda; `states` itself for Ouro."""
    gate_logits: Float[Tensor, "R N"]
    prompt_ids: Int[Tensor, " N"]
    positions: Int[Tensor, " N"]
    """From 0, within the prompt."""
    trained_loops: int

    @property
    def num_loops(self) -> int:
        """Loops recorded."""
        return self.states.shape[0]

    @property
    def num_points(self) -> int:
        return self.states.shape[1]

    def points(self, kept: Sequence[int]) -> "Trace":
        """The trace of some of its points."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        index = torch.tensor(kept, dtype=torch.long)
        return replace(self, **{name: value.index_select(_POINT_DIM[name], index) for name, value in tensors.items()})


@torch.inference_mode()
def record_trace(
    model: LoopLM,
    prompts: Sequence[Sequence[int]],
    num_loops: int | None = None,
    *,
    positions: Sequence[Sequence[int]] | None = None,
    layers: bool = True,
    batch_size: int = 16,
    max_bytes: int = MAX_BYTES,
) -> Trace:
    """Runs `model` once over `prompts` and keeps its states.

    positions: of each prompt, from 0 or, negative, from its end; the last token of each when None.
    num_loops: depth of the pass, the trained depth when None; it may be larger.
    layers: whether to keep the states inside a loop, too.
    max_bytes: of what is kept.

    Raises UserError for an empty prompt, a position outside of one, and states that would need more memory.
    """
    config = model.model.config
    loops = check_num_loops(config.num_loops if num_loops is None else num_loops)
    chosen = _check_positions(prompts, positions)
    width = torch.promote_types(model.lm_head.weight.dtype, torch.float32)
    num_points, vectors = sum(map(len, chosen)), loops * (2 + (config.num_hidden_layers if layers else 0))
    needed = vectors * num_points * config.hidden_size * width.itemsize
    if needed > max_bytes:
        raise UserError(
            f"The states of {num_points} points at {loops} loops need {needed / 2**30:.1f} GiB, more than "
            f"{max_bytes / 2**30:.1f}. Take fewer prompts, or leave out the layers."
        )
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))  # little padding, the largest batch first
    parts = [
        _record_batch(model, rows, prompts, chosen, loops, layers, width)
        for first in range(0, len(order), batch_size)
        if (rows := order[first : first + batch_size])
    ]
    joined = {name: torch.cat([part[name] for part in parts], dim=_POINT_DIM[name]) for name in parts[0]}
    # Points in the order of the prompts, whatever the batches were.
    sorted_points = torch.argsort(joined["prompt_ids"], stable=True)
    kept = {name: value.index_select(_POINT_DIM[name], sorted_points) for name, value in joined.items()}
    absent = {field.name: None for field in fields(Trace) if field.name not in kept and field.name != "trained_loops"}
    return Trace(**(absent | kept), trained_loops=config.num_loops)  # pyright: ignore[reportArgumentType]


_POINT_DIM = {"layer_states": 2, "states": 1, "hidden": 1, "gate_logits": 1, "prompt_ids": 0, "positions": 0}


def _check_positions(prompts: Sequence[Sequence[int]], positions: Sequence[Sequence[int]] | None) -> list[list[int]]:
    """Positions of each prompt, from 0."""
    if not prompts:
        raise UserError("There is no prompt to record.")
    chosen = [[-1]] * len(prompts) if positions is None else positions
    if len(chosen) != len(prompts):
        raise UserError(f"There are positions for {len(chosen)} prompts, and {len(prompts)} prompts.")
    found = []
    for i, (prompt, wanted) in enumerate(zip(prompts, chosen, strict=True)):
        outside = [position for position in wanted if not -len(prompt) <= position < len(prompt)]
        if not prompt or outside:
            what = f"position {outside[0]} is outside of it" if prompt else "it is empty"
            raise UserError(f"Prompt {i + 1} has {len(prompt)} tokens: {what}.")
        found.append([position % len(prompt) for position in wanted])
    return found


def _record_batch(
    model: LoopLM,
    rows: Sequence[int],
    prompts: Sequence[Sequence[int]],
    chosen: list[list[int]],
    num_loops: int,
    layers: bool,
    width: torch.dtype,
) -> dict[str, Tensor]:
    """The fields of a trace that the prompts `rows` give."""
    core, device = model.model, model.lm_head.weight.device
    input_ids, mask = pad_right([prompts[row] for row in rows], device)
    row_of = torch.tensor([i for i, row in enumerate(rows) for _ in chosen[row]], device=device)
    position_of = torch.tensor([position for row in rows for position in chosen[row]], device=device)
    found: dict[str, list[Tensor]] = {"states": [], "hidden": [], "gate_logits": []}
    if layers:
        found["layer_states"] = []

    def kept(values: Tensor) -> Tensor:
        return values[row_of, position_of].to("cpu", width)

    context = core.context(input_ids, None if mask.all() else mask)
    with layer_outputs(core, kept if layers else None) as of_layers:
        for loop_idx, result in enumerate(core.loops(core.encode(input_ids, context), num_loops, context)):
            found["states"].append(kept(result.state))
            found["hidden"].append(kept(core.run_coda(result.hidden, loop_idx, context)))
            found["gate_logits"].append(kept(result.gate_logits))
            if layers:
                found["layer_states"].append(torch.stack(of_layers))
                of_layers.clear()
    return {name: torch.stack(values) for name, values in found.items()} | {
        "prompt_ids": torch.tensor([row for row in rows for _ in chosen[row]]),
        "positions": position_of.cpu(),
    }


@contextmanager
def layer_outputs(core: LoopedTransformer, keep: Callable[[Tensor], Tensor] | None) -> Iterator[list[Tensor]]:
    """Fills a list with `keep(output)` of every core layer, in the order in which they run; `keep` None: leaves it."""
    kept: list[Tensor] = []
    handles = []
    if keep is not None:

        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            kept.append(keep(output))

        handles = [layer.register_forward_hook(hook) for layer in core.layers]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Int[Tensor, "B S"], Int[Tensor, "B S"]]:
    """Token ids padded with 0 on the right, and a mask with 1 at the real ones."""
    longest = max(map(len, rows))
    input_ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
    return input_ids, mask
