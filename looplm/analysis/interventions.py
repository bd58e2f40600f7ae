"""Passes with edited states: what a state causes, and not only what it predicts.

A probe that reads an answer from a state does not say that the model uses it. Here the state at one loop and one
position is replaced by that of another prompt (or loop), blended with it or drowned in noise, and what counts is how
far the final answer moves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looplm.analysis.intervals import standard_error
from looplm.analysis.readout import Labels, label_logits
from looplm.errors import UserError
from looplm.inference.exit_policy import QuantileExit, exit_loops
from looplm.model.language_model import LoopLM
from looplm.model.looped import check_num_loops


@dataclass(frozen=True)
class Pass:
    """One prompt, application by application of the core."""

    raw: Float[Tensor, "R S D"]
    """What the core returned, after any edit."""
    hidden: Float[Tensor, "R S D"]
    """What the LM head reads."""
    gate_logits: Float[Tensor, "R S"]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """An edit of the state that the core returns at one loop: w * source + (1 - w) * state, plus noise."""

    loop: int
    """From 1: the application of the core whose result is edited."""
    positions: tuple[int, ...]
    """From 0."""
    source: Float[Tensor, "P D"] | None = None
    """States to put there, one for each position; None: noise alone."""
    weight: float = 1.0
    """w; 1 replaces, less blends."""
    noise: float = 0.0
    """Standard deviation of normal noise over the root mean square of the state it is added to."""
    seed: int = 0

    def apply(self, raw: Float[Tensor, "1 S D"]) -> Float[Tensor, "1 S D"]:
        """The edited state; what is passed in stays as it was."""
        raw = raw.clone()
        at = list(self.positions)
        state = raw[0, at]
        if self.source is not None:
            state = torch.lerp(state, self.source.to(state), self.weight)
        if self.noise:
            generator = torch.Generator().manual_seed(self.seed)
            drawn = torch.randn(state.shape, generator=generator, dtype=torch.float32).to(state)
            state = state + self.noise * state.square().mean(-1, keepdim=True).sqrt() * drawn
        raw[0, at] = state
        return raw


@torch.inference_mode()
def run_pass(
    model: LoopLM,
    token_ids: Sequence[int],
    num_loops: int | None = None,
    *,
    patches: Sequence[Patch] = (),
    schedule: Sequence[int] | None = None,
) -> Pass:
    """Runs one prompt, with states edited on the way.

    schedule: the loop, from 1, that each application of the core takes itself for: (1, 3) skips the second of three,
        (1, 2, 2, 3) repeats it. 1 to `num_loops` when None. What differs between loops (LoRA slices, injection)
        follows it; a core that knows no loops feels only their number.

    Raises UserError for a prompt without a token and for a patch outside of the pass.
    """
    if not len(token_ids):
        raise UserError("A prompt needs at least one token.")
    core = model.model
    loops = check_num_loops(core.config.num_loops if num_loops is None else num_loops)
    order = list(range(1, loops + 1)) if schedule is None else list(schedule)
    for patch in patches:
        if not 1 <= patch.loop <= len(order) or not all(0 <= at < len(token_ids) for at in patch.positions):
            raise UserError(
                f"A patch at loop {patch.loop}, positions {patch.positions}, lies outside of {len(order)} loops of "
                f"{len(token_ids)} tokens."
            )
    if not order or min(order) < 1:
        raise UserError("A schedule needs at least one loop, counted from 1.")
    input_ids = torch.tensor([list(token_ids)], device=model.lm_head.weight.device)
    context = core.context(input_ids)
    embeds = core.encode(input_ids, context)
    state, raws, hidden, gates = embeds, [], [], []
    for step, loop in enumerate(order, start=1):
        raw = core.run_core(state, loop - 1, embeds, context)
        for patch in patches:
            if patch.loop == step:
                raw = patch.apply(raw)
        result = core.readout(raw)
        raws.append(raw[0])
        hidden.append(core.run_coda(result.hidden, loop - 1, context)[0])
        gates.append(result.gate_logits[0])
        state = result.state
    return Pass(torch.stack(raws), torch.stack(hidden), torch.stack(gates))


# --- How far the answer moves --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PatchEffect:
    """Patches at one loop and position, over all pairs of prompts."""

    loop: int
    position: int
    """As given: negative from the end."""
    moved: float | None
    """Mean share of the way from the own answer to the source's, in log odds of the two: 0 nothing, 1 all of it. None
    for noise and states of the prompt's own, which have no source."""
    moved_stderr: float | None
    """Standard error over pairs."""
    flipped: float
    """Share of prompts that now give the source's answer; without a source, another than before."""
    flipped_stderr: float
    spliced: float | None
    """Share of prompts that now answer as the source's tokens up to this position, followed by their own, are
    answered; among those whose own answer is another. 1: this state is all that is kept of what stands before it.
    None without a source, and where no answer is another."""
    shift: float
    """Mean total variation distance between the answers' distributions before and after."""


@dataclass(frozen=True)
class PatchGrid:
    """Effects on the answer of the last loop, at the last position."""

    kind: str
    num_loops: int
    num_pairs: int
    effects: tuple[PatchEffect, ...]


Make = Callable[[int, int, Pass, Pass, int], Patch]
"""(loop, position, own pass, source's pass, source's position) -> the patch."""


def replacing(weight: float = 1.0) -> Make:
    """The source's state at the same loop; below a weight of 1 blended with the own one."""
    return lambda loop, at, own, other, there: Patch(
        loop=loop, positions=(at,), source=other.raw[loop - 1, [there]], weight=weight
    )


def from_loop(source_loop: int, weight: float = 1.0) -> Make:
    """The own state at another loop, whatever the source; below a weight of 1 blended with the one there."""
    return lambda loop, at, own, other, there: Patch(
        loop=loop, positions=(at,), source=own.raw[source_loop - 1, [at]], weight=weight
    )


def noising(scale: float, seed: int = 0) -> Make:
    """Noise of `scale` times the state's size."""
    return lambda loop, at, own, other, there: Patch(loop=loop, positions=(at,), noise=scale, seed=seed)


@torch.inference_mode()
def patch_grid(
    model: LoopLM,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    labels: Labels | None,
    make: Make,
    kind: str,
    *,
    positions: Sequence[int] = (-1,),
    loops: Sequence[int] | None = None,
    num_loops: int | None = None,
    has_source: bool = True,
) -> PatchGrid:
    """Patches every loop and position of each prompt in turn, with states of its partner.

    pairs: (prompt, source). positions: of both, negative ones from each one's own end. labels: the answers that count;
    None: all tokens. loops: to patch at; all when None.

    Raises UserError without a pair, a position or a loop, and for a position outside of a prompt.
    """
    depth = check_num_loops(model.model.config.num_loops if num_loops is None else num_loops)
    at_loops = list(range(1, depth + 1)) if loops is None else list(loops)
    places = [(loop, position) for position in positions for loop in at_loops]
    if not pairs or not places:
        raise UserError("Patching needs at least one pair of prompts, one position and one loop.")
    found: dict[tuple[int, int], list[tuple[float, float, float]]] = {place: [] for place in places}
    spliced: dict[tuple[int, int], list[float]] = {place: [] for place in places}
    for own_ids, source_ids in pairs:
        own, source = run_pass(model, own_ids, depth), run_pass(model, source_ids, depth)
        before, goal = answer_logits(model, own, labels), answer_logits(model, source, labels)
        for position in positions:
            at, there = _place(position, own_ids), _place(position, source_ids)
            wanted = int(before.argmax())
            if has_source:
                joined = [*source_ids[: there + 1], *own_ids[at + 1 :]]
                wanted = int(answer_logits(model, run_pass(model, joined, depth), labels).argmax())
            for loop in at_loops:
                patched = run_pass(model, own_ids, depth, patches=[make(loop, at, own, source, there)])
                after = answer_logits(model, patched, labels)
                found[loop, position].append(effect(before, goal, after, has_source))
                if wanted != int(before.argmax()):
                    spliced[loop, position].append(float(int(after.argmax()) == wanted))
    return PatchGrid(
        kind=kind,
        num_loops=depth,
        num_pairs=len(pairs),
        effects=tuple(_effect(*place, found[place], spliced[place], has_source) for place in places),
    )


def _effect(
    loop: int,
    position: int,
    values: Sequence[tuple[float, float, float]],
    spliced: Sequence[float],
    has_source: bool,
) -> PatchEffect:
    """Means over pairs."""
    moved, flipped, shift = zip(*values, strict=True)
    return PatchEffect(
        loop=loop,
        position=position,
        moved=mean(moved) if has_source else None,
        moved_stderr=standard_error(moved) if has_source else None,
        flipped=mean(flipped),
        flipped_stderr=standard_error(flipped),
        spliced=mean(spliced) if spliced else None,
        shift=mean(shift),
    )


@torch.inference_mode()
def answer_logits(model: LoopLM, run: Pass, labels: Labels | None) -> Float[Tensor, " C"]:
    """Of the last loop, at the last position: of each label, or of every token."""
    hidden = run.hidden[-1, -1]
    if labels is None:
        return model.lm_head(hidden).double().cpu()
    return label_logits(model.lm_head, hidden, labels).double()


def effect(
    before: Float[Tensor, " C"], goal: Float[Tensor, " C"], after: Float[Tensor, " C"], has_source: bool
) -> tuple[float, float, float]:
    """(moved, flipped, shift) of one patch; see :class:`PatchEffect`. Moved is 0 where both answer alike."""
    own, theirs = int(before.argmax()), int(goal.argmax())
    distance = float((before.softmax(-1) - after.softmax(-1)).abs().sum() / 2)
    if not has_source:
        return 0.0, float(int(after.argmax()) != own), distance
    odds = [float(logits[theirs] - logits[own]) for logits in (before, goal, after)]
    way = odds[1] - odds[0]
    moved = (odds[2] - odds[0]) / way if own != theirs and way else 0.0
    return moved, float(own != theirs and int(after.argmax()) == theirs), distance


def _place(position: int, token_ids: Sequence[int]) -> int:
    if not -len(token_ids) <= position < len(token_ids):
        raise UserError(f"Position {position} lies outside of a prompt of {len(token_ids)} tokens.")
    return position % len(token_ids)


# --- Loops and gates -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScheduleEffect:
    """All prompts under another order of loops."""

    change: str
    """"skip 2", "repeat 2"."""
    schedule: tuple[int, ...]
    changed: float
    """Share of prompts whose answer is another than under the plain order."""
    shift: float
    """Mean total variation distance of the answers' distributions."""


@torch.inference_mode()
def schedule_effects(
    model: LoopLM, prompts: Sequence[Sequence[int]], labels: Labels | None, num_loops: int | None = None
) -> tuple[ScheduleEffect, ...]:
    """Skips, and repeats, each loop in turn."""
    depth = check_num_loops(model.model.config.num_loops if num_loops is None else num_loops)
    plain = list(range(1, depth + 1))
    schedules = {f"skip {loop}": [other for other in plain if other != loop] for loop in plain if depth > 1}
    schedules |= {f"repeat {loop}": sorted([*plain, loop]) for loop in plain}
    before = [answer_logits(model, run_pass(model, ids, depth), labels) for ids in prompts]
    found = []
    for change, schedule in schedules.items():
        effects = []
        for ids, logits in zip(prompts, before, strict=True):
            after = answer_logits(model, run_pass(model, ids, depth, schedule=schedule), labels)
            effects.append(effect(logits, logits, after, has_source=False))
        found.append(
            ScheduleEffect(
                change,
                tuple(schedule),
                mean(one[1] for one in effects),
                mean(one[2] for one in effects),
            )
        )
    return tuple(found)


@dataclass(frozen=True)
class GateEffect:
    """The gate's decision at one loop taken over from other prompts; states stay as they are."""

    loop: int
    mean_loops_before: float
    mean_loops_after: float
    changed_depth: float
    """Share of prompts that leave at another loop."""
    changed_answer: float
    """Share of prompts that give another answer for it."""


def gate_effects(
    gate_logits: Float[Tensor, "R N"],
    answers: Int[Tensor, "R N"],
    partners: Sequence[int],
    threshold: float,
) -> tuple[GateEffect, ...]:
    """Patches the gate alone, one loop at a time: prompt i gets the gate logit of prompt `partners[i]`.

    What changes is when a prompt leaves, and so which loop's answer it gives; this tells the gate's part from the
    states' part. Raises UserError for an impossible threshold.
    """
    num_loops, policy = len(gate_logits), QuantileExit(threshold)
    before = exit_loops(policy, gate_logits, num_loops)  # (N,)
    found = []
    for loop in range(1, num_loops):  # the last loop's gate is not used
        patched = gate_logits.clone()
        patched[loop - 1] = gate_logits[loop - 1, list(partners)]
        after = exit_loops(policy, patched, num_loops)
        own, new = answers.gather(0, before[None] - 1)[0], answers.gather(0, after[None] - 1)[0]
        found.append(
            GateEffect(
                loop,
                before.double().mean().item(),
                after.double().mean().item(),
                (before != after).double().mean().item(),
                (own != new).double().mean().item(),
            )
        )
    return tuple(found)


def partners_of(answers: Sequence[int], seed: int = 0) -> list[int]:
    """A partner for every prompt, drawn among those with another answer; itself where all answer alike."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i, answer in enumerate(answers):
        others = [j for j, theirs in enumerate(answers) if theirs != answer]
        found.append(others[int(torch.randint(len(others), (1,), generator=generator))] if others else i)
    return found
