"""What the model would say if it stopped here: the next-token distribution at every loop and layer of one prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor

from looplm.analysis.intervals import standard_error
from looplm.analysis.trace import layer_outputs
from looplm.errors import UserError
from looplm.model.language_model import LoopLM
from looplm.model.looped import check_num_loops


@dataclass(frozen=True)
class Reading:
    """The distribution after one layer of one loop, at every position S of the prompt."""

    loop: int
    layer: int
    """From 1; the last is what the loop's own readout says."""
    top_ids: tuple[tuple[int, ...], ...]
    """(S, k), the most probable tokens."""
    top_probabilities: tuple[tuple[float, ...], ...]
    """(S, k)."""
    entropy: tuple[float, ...]
    """(S,) nats."""
    kl_from_last: tuple[float, ...]
    """(S,) KL(p_last || p_here) in nats: what is still to come until the last loop's readout."""
    next_nats: tuple[float, ...]
    """(S - 1,) cross entropy of the token that really follows."""


@dataclass(frozen=True)
class Lens:
    """All readings of one prompt, loop by loop and layer by layer."""

    token_ids: tuple[int, ...]
    trained_loops: int
    readings: tuple[Reading, ...]

    @property
    def num_loops(self) -> int:
        return self.readings[-1].loop

    def settled_at(self, position: int) -> int:
        """The first loop from which on no later loop's most probable token differs."""
        last_layer = max(reading.layer for reading in self.readings)
        tokens = [reading.top_ids[position][0] for reading in self.readings if reading.layer == last_layer]
        settled = len(tokens)
        while settled > 1 and tokens[settled - 2] == tokens[-1]:
            settled -= 1
        return settled


@torch.inference_mode()
def lens(model: LoopLM, token_ids: Sequence[int], num_loops: int | None = None, *, top: int = 5) -> Lens:
    """Reads every layer of every loop with the model's own final norm, coda and LM head.

    At layer l of loop r the rest of that loop is left out: its state goes straight to what reads a finished loop. The
    last layer's reading is therefore the model's real output at that loop. Raises UserError for an empty prompt.
    """
    if not token_ids:
        raise UserError("The prompt is empty; the lens needs at least one token to look at.")
    core = model.model
    loops = check_num_loops(core.config.num_loops if num_loops is None else num_loops)
    input_ids = torch.tensor([list(token_ids)], device=model.lm_head.weight.device)
    context = core.context(input_ids)
    embeds = core.encode(input_ids, context)

    def log_probabilities(raw: Tensor, loop_idx: int) -> Tensor:
        hidden = core.run_coda(core.readout(core.core_exit_norm(raw)).hidden, loop_idx, context)
        logits = model.lm_head(hidden)[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)  # (S, V)

    # The last loop first, since every reading is compared with it: states of a prompt are small, logits are not.
    raw: list[list[Tensor]] = []
    with layer_outputs(core, lambda output: output) as of_layers:
        for _ in core.loops(embeds, loops, context):
            raw.append(list(of_layers))
            of_layers.clear()
    last = log_probabilities(raw[-1][-1], loops - 1)
    readings = tuple(
        _reading(log_probabilities(state, loop_idx), last, input_ids[0], loop_idx + 1, layer, top)
        for loop_idx, states in enumerate(raw)
        for layer, state in enumerate(states, start=1)
    )
    return Lens(tuple(token_ids), core.config.num_loops, readings)


@dataclass(frozen=True)
class LevelReading:
    """Means over the prompts of one level, read at their last token, after one layer of one loop."""

    level: int | None
    """How hard the prompts are; None where they do not say."""
    loop: int
    layer: int
    num_prompts: int
    right: float
    """Share whose most probable token is the right answer's first."""
    right_stderr: float
    nats: float
    """Cross entropy of the right answer's first token."""
    nats_stderr: float
    final: float
    """Share whose most probable token is that of the last reading."""


def readings_by_level(
    model: LoopLM,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[int],
    levels: Sequence[int | None],
    num_loops: int | None = None,
) -> tuple[LevelReading, ...]:
    """:func:`lens` at the last token of many prompts: where do answers appear, by level?

    answers: the token that is right for each prompt. levels: of each prompt. Sorted by level, loop and layer.
    """
    of_level: dict[int | None, list[Lens]] = {}
    answer_of: dict[int | None, list[int]] = {}
    for prompt, answer, level in zip(prompts, answers, levels, strict=True):
        # With the answer behind it, the prompt's own last token is read like any other: nothing before sees it.
        of_level.setdefault(level, []).append(lens(model, [*prompt, answer], num_loops, top=1))
        answer_of.setdefault(level, []).append(answer)
    found = []
    for level in sorted(of_level, key=lambda one: (one is not None, one or 0)):
        looks, wanted = of_level[level], answer_of[level]
        last = [look.readings[-1].top_ids[-2][0] for look in looks]
        for number, reading in enumerate(looks[0].readings):
            said = [look.readings[number].top_ids[-2][0] for look in looks]
            nats = [look.readings[number].next_nats[-1] for look in looks]
            right = [float(one == answer) for one, answer in zip(said, wanted, strict=True)]
            found.append(
                LevelReading(
                    level=level,
                    loop=reading.loop,
                    layer=reading.layer,
                    num_prompts=len(looks),
                    right=mean(right),
                    right_stderr=standard_error(right),
                    nats=mean(nats),
                    nats_stderr=standard_error(nats),
                    final=mean(float(one == end) for one, end in zip(said, last, strict=True)),
                )
            )
    return tuple(found)


def _reading(here: Tensor, last: Tensor, input_ids: Tensor, loop: int, layer: int, top: int) -> Reading:
    best = here.exp().topk(min(top, here.shape[-1]), dim=-1)
    return Reading(
        loop=loop,
        layer=layer,
        top_ids=tuple(map(tuple, best.indices.tolist())),
        top_probabilities=tuple(map(tuple, best.values.tolist())),
        entropy=tuple((-(here.exp() * here).sum(-1)).tolist()),
        kl_from_last=tuple((last.exp() * (last - here)).sum(-1).clamp(min=0).tolist()),
        next_nats=tuple((-here[:-1].gather(-1, input_ids[1:, None])[:, 0]).tolist()),
    )
