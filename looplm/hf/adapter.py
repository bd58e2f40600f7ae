"""LoRA (Hu et al., 2106.09685) on the projections of a looped model: shared by all loops, kept apart or merged.

The file format is PEFT's, so that an adapter trained here loads there, and the other way round. The module is our own:
PEFT renames what it wraps, while a run's plans, checkpoints and shards go by the names of parameters, which stay
(`q_proj.weight`) with `q_proj.lora_a` and `q_proj.lora_b` beside them.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from looplm.errors import UserError
from looplm.hf.checkpoint import local_path, read_header, read_json, tensor_mismatch
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.hf.save import new_target, writing
from looplm.model.lora import PROJECTIONS

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
_NAMES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
_NEUTRAL = {
    "use_dora": False, "use_rslora": False, "bias": "none", "fan_in_fan_out": False, "lora_bias": False,
    "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None, "trainable_token_indices": None,
}  # fmt: skip
"""Settings of PEFT that change what an adapter computes, and the value at which they do not."""


class AdaptedLinear(nn.Linear):
    """W x + alpha / rank * B A x: a linear layer whose weight is left alone, and the low-rank correction beside it.

    lora_a is (rank, in), lora_b (out, rank) and zero at first, so that nothing changes until it is trained.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would draw weights
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.rank, self.alpha = rank, alpha
        where = {"device": base.weight.device, "dtype": torch.promote_types(base.weight.dtype, torch.float32)}
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features, **where))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, **where))

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        low = nn.functional.linear(input, self.lora_a)
        return super().forward(input) + self.alpha / self.rank * nn.functional.linear(low, self.lora_b)

    def merged(self) -> nn.Linear:
        """One matrix that computes the same, in the correction's dtype."""
        plain = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        weight = self.weight.detach().to(self.lora_a.dtype) + self.alpha / self.rank * (self.lora_b @ self.lora_a)
        plain.weight, plain.bias = nn.Parameter(weight.detach()), self.bias
        return plain


# --- On a model -----------------------------------------------------------------------------------------------------


def projections(model: LoopLMForCausalLM, targets: Sequence[str]) -> Iterator[tuple[str, nn.Module, str, nn.Linear]]:
    """(name, parent, name within the parent, module) of the target projections of prelude, core and coda."""
    for path, parent in model.named_modules():
        for target, child in list(parent.named_children()):
            if target in targets and isinstance(child, nn.Linear):
                yield f"{path}.{target}", parent, target, child


def add_adapter(
    model: LoopLMForCausalLM, rank: int, alpha: float = 32.0, targets: Sequence[str] = PROJECTIONS, seed: int = 0
) -> None:
    """Puts a correction beside every target projection, in place; A is drawn as PEFT does, B is zero.

    targets: of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj. All loops share it; it trains with
    whatever else requires gradients. Raises UserError for other targets, a rank below 1, and a model that has one.
    """
    unknown = sorted(set(targets) - set(PROJECTIONS))
    if unknown or not targets or rank < 1:
        raise UserError(
            f"An adapter of rank {rank} on {', '.join(targets) or 'nothing'} cannot be made: the rank is 1 or more, "
            f"and targets are {', '.join(PROJECTIONS)}."
        )
    if has_adapter(model):
        raise UserError("The model has an adapter already; merge it before another one is added.")
    generator = torch.Generator().manual_seed(seed)
    for _, parent, target, linear in projections(model, targets):
        adapted = AdaptedLinear(linear, rank, alpha)
        if adapted.lora_a.device.type != "meta":
            bound = linear.in_features**-0.5  # kaiming_uniform with a = sqrt(5)
            drawn = torch.empty(adapted.lora_a.shape).uniform_(-bound, bound, generator=generator)
            with torch.no_grad():
                adapted.lora_a.copy_(drawn)
        setattr(parent, target, adapted)


def has_adapter(model: LoopLMForCausalLM) -> bool:
    """Whether corrections stand beside the projections."""
    return any(isinstance(module, AdaptedLinear) for module in model.modules())


def adapt_alike(model: LoopLMForCausalLM, other: LoopLMForCausalLM) -> None:
    """Gives `other` the modules of `model`'s adapter, if it has one; their values are left to the caller."""
    for name, module in model.named_modules():
        if isinstance(module, AdaptedLinear):
            parent, _, target = name.rpartition(".")
            linear = other.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            setattr(other.get_submodule(parent), target, AdaptedLinear(linear, module.rank, module.alpha))


def hold_projections(model: LoopLMForCausalLM, targets: Sequence[str], dtype: torch.dtype) -> None:
    """Casts the target projections' own weights, which are frozen, in place; corrections stay as they are."""
    for *_, linear in projections(model, targets):
        linear.weight = nn.Parameter(linear.weight.detach().to(dtype), requires_grad=False)


@torch.no_grad()
def merge_adapter(model: LoopLMForCausalLM) -> None:
    """Adds the corrections to the weights, in place; the model is then one like any other."""
    for _, parent, target, linear in projections(model, PROJECTIONS):
        if isinstance(linear, AdaptedLinear):
            setattr(parent, target, linear.merged())


# --- On disk --------------------------------------------------------------------------------------------------------


def save_adapter(model: LoopLMForCausalLM, directory: str | Path, base: str, also: Sequence[str] = ()) -> Path:
    """Writes the adapter alone to a new directory, as PEFT does; returns the path.

    base: the checkpoint it belongs to. also: names of other parameters that were trained and go along, the gate's say.
    Raises UserError where the directory is in use or cannot be written; nothing is left behind then.
    """
    target = new_target(directory)
    adapted = [(name, module) for name, module in model.named_modules() if isinstance(module, AdaptedLinear)]
    if not adapted:
        raise UserError("The model has no adapter that could be saved; save_checkpoint saves the model.")
    modules = sorted({name.rpartition(".")[0] for name in also})
    first = adapted[0][1]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name, _ in adapted}),
        "modules_to_save": modules or None,
        **_NEUTRAL,
    }
    weights = {_stored_name(name): tensor for name, tensor in model.state_dict().items() if _is_kept(name, also)}
    with writing(target) as partial:
        (partial / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()},
                  partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})  # fmt: skip
    return target


def load_adapter(model: LoopLMForCausalLM, directory: str | Path) -> None:
    """Adds the adapter of a directory, written here or by PEFT, to the model in place.

    Raises UserError when there is none, for settings that a plain LoRA does not have, and for tensors that are
    missing, unexpected or mis-shaped; all are named, and the model is as it was.
    """
    source = local_path(directory)
    if not (source / ADAPTER_CONFIG).is_file() or not (source / ADAPTER_WEIGHTS).is_file():
        raise UserError(f"{directory} holds no adapter: it lacks {ADAPTER_CONFIG} or {ADAPTER_WEIGHTS}.")
    config = read_json(source / ADAPTER_CONFIG)
    strange = {name: config[name] for name, plain in _NEUTRAL.items() if config.get(name, plain) not in (plain, None)}
    if config.get("peft_type") != "LORA" or strange:
        raise UserError(
            f"The adapter in {directory} is {config.get('peft_type')} with {strange or 'no further settings'}; looplm "
            "reads plain LoRA. Merge it with PEFT, into a checkpoint of its own."
        )
    if has_adapter(model):
        raise UserError("The model has an adapter already; merge it before another one is added.")
    targets, rank, alpha = _read_targets(config, directory)
    shapes = {name: tensor.shape for name, tensor in read_header(source / ADAPTER_WEIGHTS).items()}
    wanted: dict[str, tuple[int, ...]] = {}
    for name, _, _, linear in projections(model, targets):
        wanted[_stored_name(f"{name}.lora_a")] = (rank, linear.in_features)
        wanted[_stored_name(f"{name}.lora_b")] = (linear.out_features, rank)
    others = {_stored_name(name): tuple(weight.shape) for name, weight in model.named_parameters()}
    wanted |= {name: shape for name, shape in others.items() if name in shapes}
    if mismatch := tensor_mismatch(wanted, shapes):
        raise UserError(f"The adapter in {directory} does not belong to this model. Tensors {mismatch}.")
    add_adapter(model, rank, alpha, targets)
    weights, device = load_file(source / ADAPTER_WEIGHTS), model.lm_head.weight.device
    state = {name: weights[_stored_name(name)].to(device) for name, _ in model.named_parameters()
             if _stored_name(name) in weights}  # fmt: skip
    model.load_state_dict(state, strict=False)


def _read_targets(config: dict[str, Any], directory: str | Path) -> tuple[list[str], int, float]:
    targets, rank, alpha = config.get("target_modules"), config.get("r"), config.get("lora_alpha")
    if not isinstance(targets, list) or not isinstance(rank, int) or not isinstance(alpha, int | float):
        raise UserError(
            f"{Path(directory) / ADAPTER_CONFIG} must name target_modules as a list, and r and lora_alpha as numbers."
        )
    return [str(target) for target in targets], rank, float(alpha)


def _stored_name(name: str) -> str:
    """A parameter's name in PEFT's files."""
    path, _, last = name.rpartition(".")
    return f"{_PREFIX}{path}.{_NAMES.get(last, last)}"


def _is_kept(name: str, also: Sequence[str]) -> bool:
    return name.rpartition(".")[2] in _NAMES or name in also
