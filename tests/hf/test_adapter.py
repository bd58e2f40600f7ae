"""LoRA adapters: nothing at first, merged = unmerged, in PEFT's format on disk, and one for all loops."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from looplm.conversion.exporting import exported
from looplm.conversion.lora_banks import with_banks
from looplm.errors import UserError
from looplm.hf.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    add_adapter,
    has_adapter,
    hold_projections,
    load_adapter,
    merge_adapter,
    save_adapter,
)
from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.model.lora import PROJECTIONS

IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


@pytest.fixture
def make() -> Callable[..., LoopLMForCausalLM]:
    def build(**fields: Any) -> LoopLMForCausalLM:
        tiny: dict[str, Any] = {
            "vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "num_loops": 3, "initializer_range": 0.3,
        }  # fmt: skip
        torch.manual_seed(0)
        return LoopLMForCausalLM(LoopLMConfig(**(tiny | fields))).double().eval()

    return build


def trained(model: LoopLMForCausalLM, **options: Any) -> LoopLMForCausalLM:
    """The model with an adapter that does something."""
    add_adapter(model, **({"rank": 3, "alpha": 5.0} | options))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("lora_b"):
                weight.copy_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return model


def states(model: LoopLMForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack(model(IDS).loop_hidden_states)


ARCHITECTURES = [
    {},
    {"num_prelude_layers": 1, "num_coda_layers": 1, "attention_bias": True, "mlp_bias": True},
    {"lora_rank": 2, "injection": "scalar", "norm_placement": "pre", "tie_word_embeddings": True},
]


@pytest.mark.parametrize("fields", ARCHITECTURES)
def test_merged_is_unmerged(make: Callable[..., LoopLMForCausalLM], fields: dict[str, Any]) -> None:
    model = make(**fields)
    names, before = list(model.state_dict()), states(model)
    add_adapter(model, 3)
    assert torch.equal(states(model), before)  # B is zero
    merge_adapter(model)
    adapted = states(trained(model))
    assert (adapted - before).abs().amax(dim=(1, 2, 3)).min() > 0.1  # in every loop
    merge_adapter(model)
    torch.testing.assert_close(states(model), adapted, rtol=0, atol=1e-10)
    assert not has_adapter(model) and list(model.state_dict()) == names


def test_names_and_shapes(make: Callable[..., LoopLMForCausalLM]) -> None:
    model = make(num_prelude_layers=1)
    names = set(model.state_dict())
    add_adapter(model, 3, targets=["k_proj", "down_proj"])
    new = {name: tuple(p.shape) for name, p in model.named_parameters() if name not in names}
    assert names < set(model.state_dict()) and len(new) == 2 * 2 * 3
    assert new["model.layers.1.self_attn.k_proj.lora_a"] == (3, 16)
    assert new["model.prelude.0.mlp.down_proj.lora_b"] == (16, 3)


def test_the_start_is_drawn_from_the_seed_as_peft_does(make: Callable[..., LoopLMForCausalLM]) -> None:
    def start(seed: int) -> torch.Tensor:
        model = make()
        add_adapter(model, 8, seed=seed)
        return model.get_parameter("model.layers.0.mlp.down_proj.lora_a").detach()

    assert torch.equal(start(1), start(1)) and not torch.equal(start(1), start(2))
    assert 0.9 * 24**-0.5 < start(1).abs().max() <= 24**-0.5


def test_on_disk_and_back(make: Callable[..., LoopLMForCausalLM], tmp_path: Path) -> None:
    model = trained(make(), targets=["q_proj", "up_proj"])
    with torch.no_grad():
        model.model.early_exit_gate.bias.fill_(0.7)
    also = ["model.early_exit_gate.weight", "model.early_exit_gate.bias"]
    save_adapter(model, tmp_path / "adapter", "somewhere/base", also)
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
    config = json.loads((tmp_path / "adapter" / ADAPTER_CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 5.0, ["q_proj", "up_proj"])
    assert config["modules_to_save"] == ["model.early_exit_gate"]
    stored = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    assert stored["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"].shape == (24, 3)
    assert len(stored) == 2 * 2 * 2 + 2
    other = make()
    load_adapter(other, tmp_path / "adapter")
    assert torch.equal(states(other), states(model))
    assert other.model.early_exit_gate.bias.item() == pytest.approx(0.7)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], list(PROJECTIONS)])
@pytest.mark.filterwarnings("default")  # PEFT calls what transformers has renamed
def test_peft_reads_it_and_we_read_peft_s(
    make: Callable[..., LoopLMForCausalLM], tmp_path: Path, targets: list[str]
) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    model = trained(make(), targets=targets)
    save_adapter(model, tmp_path / "ours", "base", ["model.early_exit_gate.weight", "model.early_exit_gate.bias"])
    theirs = peft.PeftModel.from_pretrained(make(), tmp_path / "ours")
    found = torch.stack(theirs(input_ids=IDS).loop_hidden_states)
    torch.testing.assert_close(found, states(model), rtol=0, atol=1e-6)  # PEFT keeps adapters in float32
    made = peft.get_peft_model(make(), peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    for name, weight in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    made.save_pretrained(tmp_path / "theirs")
    other = make()
    load_adapter(other, tmp_path / "theirs")
    torch.testing.assert_close(states(other), torch.stack(made(input_ids=IDS).loop_hidden_states), rtol=0, atol=1e-6)


def test_a_base_in_bfloat16(make: Callable[..., LoopLMForCausalLM]) -> None:
    """Autocast rounds the weights all the same: nothing computed under it changes."""
    name = "model.layers.0.mlp.up_proj"
    model = trained(make().float())
    plain = model.get_parameter(f"{name}.weight").detach().clone()
    with torch.autocast("cpu", torch.bfloat16):
        expected = states(model)
        hold_projections(model, PROJECTIONS, torch.bfloat16)
        assert torch.equal(states(model), expected)
    held = {name.rpartition(".")[2]: weight.dtype for name, weight in model.get_submodule(name).named_parameters()}
    assert held == {"weight": torch.bfloat16, "lora_a": torch.float32, "lora_b": torch.float32}
    a, b = (model.get_parameter(f"{name}.lora_{which}").detach() for which in "ab")
    merge_adapter(model)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    torch.testing.assert_close(model.get_parameter(f"{name}.weight"), plain.bfloat16().float() + 5 / 3 * b @ a)


def test_ouro_keeps_a_merged_adapter_and_refuses_banks(make: Callable[..., LoopLMForCausalLM]) -> None:
    model = exported(make(), "ouro")
    adapted = states(trained(model))
    merge_adapter(model)
    torch.testing.assert_close(states(exported(model, "ouro")), adapted, rtol=0, atol=1e-10)
    banks = with_banks(model, 2)
    torch.testing.assert_close(states(banks), adapted, rtol=0, atol=1e-10)
    with pytest.raises(UserError, match="cannot carry LoRA banks of rank 2"):
        exported(banks, "ouro")
    assert (banks.model.config.lora_rank, banks.model.config.num_loops) == (2, 3)
    with pytest.raises(UserError, match="banks of rank 2 already"):
        with_banks(banks, 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"rank": 0}, "rank is 1"), ({"targets": ["lm_head"]}, "targets are q_proj"), ({"targets": []}, "on nothing")],
)  # fmt: skip
def test_impossible(make: Callable[..., LoopLMForCausalLM], options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        add_adapter(make(), **({"rank": 2} | options))


def test_a_second_adapter_is_refused(make: Callable[..., LoopLMForCausalLM], tmp_path: Path) -> None:
    model = trained(make())
    save_adapter(model, tmp_path / "adapter", "base")
    with pytest.raises(UserError, match="has an adapter already"):
        add_adapter(model, 2)
    with pytest.raises(UserError, match="has an adapter already"):
        load_adapter(model, tmp_path / "adapter")
    with pytest.raises(UserError, match="not an empty directory"):
        save_adapter(model, tmp_path / "adapter", "base")
    with pytest.raises(UserError, match="no adapter that could be saved"):
        save_adapter(make(), tmp_path / "none", "base")


@pytest.mark.parametrize(
    ("config", "said"),
    [({"use_dora": True}, "use_dora"), ({"peft_type": "IA3"}, "IA3"), ({"rank_pattern": {"q": 4}}, "rank_pattern"),
     ({"target_modules": "all-linear"}, "as a list"), ({"r": 4}, "of another shape"),
     ({"target_modules": ["q_proj"]}, "unexpected"), ({"target_modules": [*PROJECTIONS, "lm_head"]}, "missing")],
)  # fmt: skip
def test_adapters_that_are_not_ours(
    make: Callable[..., LoopLMForCausalLM], tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    save_adapter(trained(make()), tmp_path / "adapter", "base")
    path = tmp_path / "adapter" / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    model = make()
    before = list(model.state_dict())
    with pytest.raises(UserError, match=said):
        load_adapter(model, tmp_path / "adapter")
    assert list(model.state_dict()) == before


def test_damaged_or_absent(make: Callable[..., LoopLMForCausalLM], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no adapter"):
        load_adapter(make(), tmp_path)
    save_adapter(trained(make()), tmp_path / "adapter", "base")
    weights = tmp_path / "adapter" / ADAPTER_WEIGHTS
    stored = load_file(weights)
    save_file({name: tensor for name, tensor in stored.items() if "layers.0.mlp.up_proj" not in name}, weights)
    with pytest.raises(
        UserError, match=r"missing: base_model.model.model.layers.0.mlp.up_proj.lora_A.weight \[3, 16\]"
    ):
        load_adapter(make(), tmp_path / "adapter")
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        load_adapter(make(), tmp_path / "adapter")
