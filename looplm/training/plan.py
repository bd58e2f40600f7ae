"""What a recipe will take, worked out without running it: parameters, tokens, FLOPs, memory, steps.

Nothing is read but the recipe: no data, no tokenizer, no weights, unless it leaves a size open that only they know.
FLOPs are counted as in "Closing the Loop" (Appendix I): 6 a token, loop and parameter, the head read at every loop;
attention scores come on top, in a figure of their own.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from looplm.errors import UserError
from looplm.model.config import LoopedConfig
from looplm.model.flops import count_parameters, inference_flops, parameter_shapes, training_flops
from looplm.training.architectures import check_stage, stage_configs, starting_config
from looplm.training.depth import active_loops, head_passes
from looplm.training.lora import lora_shapes
from looplm.training.memory import (
    MemoryEstimate,
    deepest,
    estimate_memory,
    fit_micro_batch_rows,
    is_trained,
    mean_loops,
)
from looplm.training.recipe import RunRecipe
from looplm.training.schedule import learning_rate_share
from looplm.training.stage_recipe import RoutingRecipe, StageRecipe, trains_gate_alone
from looplm.training.steps import StepPlan


@dataclass(kw_only=True, frozen=True)
class LengthPlan:
    """How long a stage is and what it costs; unknown for a stage in epochs before its data are tokenised."""

    num_steps: int
    num_tokens: int
    flops: float
    """By the papers' convention, without attention scores."""
    flops_with_attention: float
    lr_first: float
    """Of the first step, the peak, and the last step."""
    lr_peak: float
    lr_last: float


@dataclass(kw_only=True, frozen=True)
class StagePlan:
    """One stage."""

    name: str
    num_parameters: int
    """Stored."""
    num_parameters_without_gate: int
    """What a dense model of one loop would store."""
    num_parameters_separate_head: int
    """With a head of its own, tied or not."""
    num_trained: int
    num_loops: str
    """Of a step: "4", or how they are drawn."""
    seq_len: int
    batch_tokens: list[int]
    """Sizes of a step, in their order."""
    length: LengthPlan | None
    micro_batch_rows: int
    """Rows of one forward on one device."""
    micro_batches: int
    """Forwards of a step, at its largest batch."""
    memory: MemoryEstimate
    """Of one device."""
    fits: bool | None
    """Whether the memory suffices; None if the device's was not given."""


@dataclass(kw_only=True, frozen=True)
class RunPlan:
    """The whole run."""

    name: str
    num_devices: int
    device_bytes: int | None
    stages: list[StagePlan]
    num_steps: int | None
    """Sums over the stages; None where one of them is unknown."""
    num_tokens: int | None
    flops: float | None
    flops_with_attention: float | None


def plan_run(
    recipe: RunRecipe,
    num_devices: int = 1,
    device_bytes: int | None = None,
    rows_per_epoch: dict[str, int] | None = None,
) -> RunPlan:
    """Works a recipe out for `num_devices` devices of `device_bytes` each.

    rows_per_epoch: by stage name, for stages in epochs whose data are tokenised. Raises UserError for combinations
    that cannot run: a batch the devices cannot share, a warmup longer than its stage, an upcycling that does not fit.
    """
    if num_devices < 1:
        raise UserError(f"A run needs at least one device, not {num_devices}.")
    configs = stage_configs(recipe, starting_config(recipe))
    stages = [
        plan_stage(config, stage, num_devices, device_bytes, (rows_per_epoch or {}).get(stage.name))
        for config, stage in zip(configs, recipe.stages, strict=True)
    ]
    lengths = [stage.length for stage in stages]
    known = [length for length in lengths if length is not None]
    whole = len(known) == len(lengths)
    return RunPlan(
        name=recipe.name,
        num_devices=num_devices,
        device_bytes=device_bytes,
        stages=stages,
        num_steps=sum(length.num_steps for length in known) if whole else None,
        num_tokens=sum(length.num_tokens for length in known) if whole else None,
        flops=math.fsum(length.flops for length in known) if whole else None,
        flops_with_attention=math.fsum(length.flops_with_attention for length in known) if whole else None,
    )


def plan_stage(
    config: LoopedConfig, stage: StageRecipe, num_devices: int, device_bytes: int | None, rows_per_epoch: int | None
) -> StagePlan:
    """One stage of :func:`plan_run`; `config` is the model it trains."""
    count = count_parameters(config)
    is_known = stage.epochs is None or rows_per_epoch is not None
    steps = StepPlan(stage, rows_per_epoch=rows_per_epoch) if is_known else None
    check_stage(config, stage, steps, num_devices)
    levels = batch_sizes(stage, steps)
    rows = max(1, max(levels) // stage.seq_len // num_devices)
    micro_batch_rows, fits = choose_rows(config, stage, rows, num_devices, device_bytes)
    return StagePlan(
        name=stage.name,
        num_parameters=count.total,
        num_parameters_without_gate=count.total_without_gate,
        num_parameters_separate_head=count.total_separate_head,
        # After a single loop nothing is decided, and the gate gets no gradient.
        num_trained=trained_parameters(config, stage) - (count.gate if deepest(config, stage) == 1 else 0),
        num_loops=describe_depth(config, stage),
        seq_len=stage.seq_len,
        batch_tokens=levels,
        length=None if steps is None else plan_length(config, stage, steps),
        micro_batch_rows=micro_batch_rows,
        micro_batches=math.ceil(rows / micro_batch_rows),
        memory=estimate_memory(config, stage, micro_batch_rows, num_devices, accumulates=rows > micro_batch_rows),
        fits=fits,
    )


def batch_sizes(stage: StageRecipe, steps: StepPlan | None) -> list[int]:
    """Tokens of a step, each size that occurs once."""
    if steps is not None:
        return [tokens for _, tokens in steps.levels]
    batch = stage.batch_tokens
    return [batch] if isinstance(batch, int) else [batch.start, batch.end]


def choose_rows(
    config: LoopedConfig, stage: StageRecipe, rows: int, num_devices: int, device_bytes: int | None
) -> tuple[int, bool | None]:
    """Rows of a forward, and whether they fit: the recipe's, or as many as fit, or one where nothing is known."""
    if device_bytes is None:
        return min(rows, stage.micro_batch_rows or 1), None
    if stage.micro_batch_rows is not None:
        given = min(rows, stage.micro_batch_rows)
        try:
            return given, fit_micro_batch_rows(config, stage, given, device_bytes, num_devices) == given
        except UserError:
            return given, False
    try:
        return fit_micro_batch_rows(config, stage, rows, device_bytes, num_devices), True
    except UserError:
        return 1, False


def trained_parameters(config: LoopedConfig, stage: StageRecipe) -> int:
    """Parameters that the stage changes."""
    shapes = parameter_shapes(config) | lora_shapes(config, stage)
    return sum(math.prod(shape) for name, shape in shapes.items() if is_trained(name, stage))


def describe_depth(config: LoopedConfig, stage: StageRecipe) -> str:
    """The loops of a step in a few words."""
    if stage.num_loops is None or isinstance(stage.num_loops, int):
        text = str(deepest(config, stage))
    else:
        text = f"{stage.num_loops.kind} to {stage.num_loops.max}, mean {mean_loops(config, stage):g}"
    return text if stage.backprop_loops is None else f"{text}, gradient through {stage.backprop_loops}"


def plan_length(config: LoopedConfig, stage: StageRecipe, steps: StepPlan) -> LengthPlan:
    """Tokens, FLOPs and learning rates of a stage of known length."""
    peak, last = stage.optimizer.lr, steps.num_steps - 1
    return LengthPlan(
        num_steps=steps.num_steps,
        num_tokens=steps.num_tokens,
        flops=stage_flops(config, stage, steps),
        flops_with_attention=stage_flops(config, stage, steps, attention=True),
        lr_first=peak * learning_rate_share(stage.schedule, 0, steps.num_steps),
        lr_peak=peak,
        lr_last=peak * learning_rate_share(stage.schedule, last, steps.num_steps),
    )


def stage_flops(config: LoopedConfig, stage: StageRecipe, steps: StepPlan, *, attention: bool = False) -> float:
    """FLOPs of the whole stage, linear in the mean depth. Stage II has no backward pass worth counting."""
    seq_len = stage.seq_len if attention else None

    def at(depth: int, num_tokens: int) -> float:
        flops = training_flops(config, num_tokens, depth, seq_len=seq_len)
        if trains_gate_alone(stage.objective):
            return flops / 3
        head = 2 * num_tokens * config.vocab_size * config.hidden_size
        flops -= head * (3 * depth - head_passes(stage.objective, depth))
        truncated = max(0, depth - stage.backprop_loops) if stage.backprop_loops is not None else 0
        context = (stage.seq_len + 1) / 2 if attention else 0
        loop = inference_flops(config, 2, context=context) - inference_flops(config, 1, context=context)
        passed = flops - 2 * num_tokens * truncated * loop if truncated else flops
        # A frozen weight has no gradient of its own, which is half of the backward pass.
        return passed if stage.lora is None else (passed + flops / 3) / 2

    if isinstance(stage.objective, RoutingRecipe):
        return _curriculum_flops(config, stage, stage.objective, steps, at)
    mean = mean_loops(config, stage)
    below = math.floor(mean)
    share = mean - below
    total = at(below, steps.num_tokens)
    return total if not share else (1 - share) * total + share * at(below + 1, steps.num_tokens)


def _curriculum_flops(
    config: LoopedConfig, stage: StageRecipe, recipe: RoutingRecipe, steps: StepPlan, at: Callable[[int, int], float]
) -> float:
    """Phase by phase, each a loop deeper."""
    depth, total, first = deepest(config, stage), 0.0, 0
    for phase in range(depth):
        last = steps.num_steps if phase == depth - 1 else min(steps.num_steps, first + recipe.phase_steps)
        total += at(active_loops(recipe, depth, first), steps.tokens_before(last) - steps.tokens_before(first))
        first = last
    return total


_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
          "TIB": 2**40, "G": 1e9, "M": 1e6, "GI": 2**30, "MI": 2**20}  # fmt: skip


def parse_bytes(text: str) -> int:
    """Bytes of "80GB", "141e9" or "24 GiB". Raises UserError for anything else."""
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*(?:[eE][0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise UserError(f"{text!r} is no amount of memory; write it as 80GB or 24GiB.")
    return int(float(match[1]) * _UNITS[match[2].upper()])
