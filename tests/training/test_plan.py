"""Plans of the shipped recipes come out at the papers' totals; plans of wrong recipes say what is wrong."""

from pathlib import Path
from typing import Any

import pytest

from looplm.errors import UserError
from looplm.training.plan import RunPlan, parse_bytes, plan_run
from looplm.training.recipe_file import load_recipe

RECIPES = Path(__file__).parents[2] / "looplm" / "recipes"


def plan(name: str, *overrides: str, **options: Any) -> RunPlan:
    return plan_run(load_recipe(RECIPES / f"{name}.yaml", overrides), **options)


@pytest.mark.parametrize(
    ("name", "flops", "tokens"),
    [
        # Closing the Loop, Appendix I: 9.9e21 from scratch, 3.4e23 on Ouro's schedule, 1.9e21 for the conversion.
        ("two_stage_1p4b", 9.916e21, 309.716e9),
        ("ouro_1p4b", 3.432e23, 7.72e12),
        ("convert_qwen3_1p7b", 1.858e21, 60.002e9),
        # A quarter of the first: one loop instead of four. And 1 / 1.404 of it (D.5).
        ("dense_1p4b", 9.916e21 / 4, 309.716e9),
        ("dense_3p9b", 9.916e21 / 1.4040, 309.716e9),
    ],
)
def test_totals_are_those_of_the_papers(name: str, flops: float, tokens: float) -> None:
    found = plan(name)
    assert found.flops == pytest.approx(flops, rel=2e-4)
    assert found.num_tokens == pytest.approx(tokens, rel=1e-5)
    assert found.flops_with_attention is not None and found.flops_with_attention > found.flops


def test_parameters_are_those_of_the_papers() -> None:
    assert [stage.num_parameters for stage in plan("ouro_1p4b").stages] == [1_434_652_673] * 5
    assert [stage.num_parameters for stage in plan("ouro_2p6b").stages] == [1_434_652_673] + [2_667_974_657] * 4
    assert {stage.num_parameters_without_gate for stage in plan("dense_1p4b").stages} == {1_434_650_624}
    assert {stage.num_parameters_without_gate for stage in plan("dense_3p9b").stages} == {3_901_294_592}
    (converted,) = plan("convert_qwen3_1p7b").stages
    assert converted.num_parameters_separate_head == 2_031_739_904 + 4_098
    (with_lora,) = plan("convert_qwen3_1p7b", "model.architecture.lora_rank=32").stages
    assert with_lora.num_parameters_separate_head == 2_136_339_458  # Closing the Loop, F.3


def test_the_two_stages() -> None:
    pretrain, mid_train = plan("two_stage_1p4b").stages
    assert pretrain.length is not None and mid_train.length is not None
    assert (pretrain.length.num_steps, mid_train.length.num_steps) == (100_000, 47_684)
    assert (pretrain.batch_tokens, pretrain.num_loops) == ([2_097_152], "4")
    assert pretrain.length.lr_first == pytest.approx(3e-4 / 2000)
    assert (pretrain.length.lr_peak, pretrain.length.lr_last) == (3e-4, pytest.approx(3e-5))


def test_ouro_s_stages() -> None:
    stages = plan("ouro_1p4b").stages
    assert [stage.seq_len for stage in stages] == [4096, 4096, 16_384, 65_536, 32_768]
    assert [stage.num_loops for stage in stages] == ["8", "4", "4", "4", "4"]
    assert (stages[0].batch_tokens[0], stages[0].batch_tokens[-1]) == (4_194_304, 8_388_608)
    lasts = [stage.length.lr_last for stage in stages if stage.length is not None]
    assert lasts == pytest.approx([3e-4, 3e-4, 3e-5, 3e-5, 1e-5], rel=1e-3)  # table 1
    assert [stage.objective.beta for stage in load_recipe(RECIPES / "ouro_1p4b.yaml").stages] == [0.1] + [0.05] * 4  # pyright: ignore


def test_epochs_are_unknown_until_the_data_are_tokenised() -> None:
    unknown = plan("ouro_sft")
    assert unknown.stages[0].length is None and unknown.num_tokens is None and unknown.flops is None
    known = plan("ouro_sft", rows_per_epoch={"sft": 6400})
    assert known.stages[0].length is not None and known.stages[0].length.num_steps == 200


def test_the_micro_batch_is_made_to_fit() -> None:
    (large, _), (small, _) = (
        plan("two_stage_1p4b", num_devices=32, device_bytes=size * 10**9).stages for size in (80, 40)
    )
    for stage, size in ((large, 80), (small, 40)):
        assert stage.fits and stage.memory.total <= 0.9 * size * 10**9
        assert stage.micro_batch_rows * stage.micro_batches >= 512 / 32
    assert small.micro_batch_rows < large.micro_batch_rows
    (tiny, _) = plan("two_stage_1p4b", num_devices=32, device_bytes=10**9).stages
    assert tiny.fits is False and tiny.micro_batch_rows == 1


@pytest.mark.parametrize(("name", "num_devices"), [("ouro_1p4b", 64), ("ouro_2p6b", 128)])
def test_every_stage_of_ouro_fits_80_gb(name: str, num_devices: int) -> None:
    """At 64K tokens because of both kinds of recomputing."""
    found = plan(name, num_devices=num_devices, device_bytes=80 * 10**9)
    assert all(stage.fits for stage in found.stages) and found.stages[3].seq_len == 65_536
    for less in ("layer", "loop"):
        override = f"stages.3-long.activation_checkpointing={less}"
        assert plan(name, override, num_devices=num_devices, device_bytes=80 * 10**9).stages[3].fits is False


def test_stage_two_costs_its_forward_alone() -> None:
    overrides = ["stages.0.objective={kind: gate_loss}"]
    gate, full = plan("two_stage_1p4b", *overrides).stages[0], plan("two_stage_1p4b").stages[0]
    assert gate.num_trained == 2049 and full.num_trained == 1_434_652_673
    assert gate.length is not None and full.length is not None
    assert gate.length.flops == pytest.approx(full.length.flops / 3)
    other = plan("two_stage_1p4b", "stages.0.objective={kind: expected_loss, beta: 0.1, gate_only: true}").stages[0]
    assert (other.num_trained, other.length) == (gate.num_trained, gate.length)
    last = plan("two_stage_1p4b", "stages.0.objective={kind: last_loop}").stages[0]
    assert last.num_trained == full.num_trained - gate.num_trained


def test_drawn_truncated_and_growing_depths() -> None:
    def flops(*overrides: str) -> float:
        length = plan("small/two_stage_1p4b", "stages.0.num_steps=300", *overrides).stages[0].length
        assert length is not None
        return length.flops

    at = {depth: flops(f"stages.0.num_loops={depth}") for depth in (1, 2, 3, 4)}
    assert flops("stages.0.num_loops={kind: uniform, min: 1, max: 4}") == pytest.approx(sum(at.values()) / 4)
    assert at[1] < flops("stages.0.backprop_loops=1") < at[4]


def test_objectives_that_train_one_loop_read_the_head_less() -> None:
    """A pass of the head over all tokens costs what two tied embeddings of width D do; Stage I has three a loop."""

    def flops(*overrides: str) -> float:
        length = plan("small/two_stage_1p4b", "stages.0.num_steps=300", *overrides).stages[0].length
        assert length is not None
        return length.flops

    at = {depth: flops(f"stages.0.num_loops={depth}") for depth in (1, 2, 3)}
    recipe = load_recipe(RECIPES / "small/two_stage_1p4b.yaml")
    architecture = recipe.model.architecture  # pyright: ignore
    length = plan("small/two_stage_1p4b", "stages.0.num_steps=300").stages[0].length
    assert length is not None
    head = 2 * length.num_tokens * 1024 * architecture.hidden_size
    last = flops("stages.0.objective={kind: last_loop}", "stages.0.num_loops=3")
    assert at[3] - last == pytest.approx((3 * 3 - (3 + 2)) * head)
    # 100 steps at one loop, 100 at two, 100 at three; every loop is read, one trained.
    routing = flops("stages.0.objective={kind: routing, phase_steps: 100}", "stages.0.num_loops=3")
    read = sum(at[depth] - (3 * depth - (depth + 3)) * head for depth in at)
    assert routing == pytest.approx(read / 3)


UNTIED = "model.architecture.tie_word_embeddings=false"


@pytest.mark.parametrize(
    "overrides",
    [
        ["stages.0.backprop_loops=4", UNTIED],  # the whole depth
        ["stages.0.backprop_loops=1"],  # the head is the embedding
        ["stages.0.backprop_loops=1", UNTIED, "model.architecture.injection=add"],
        ["stages.0.backprop_loops=2", UNTIED, "stages.0.num_loops={kind: uniform, min: 2, max: 4}"],  # some steps do
        ["stages.0.backprop_loops=1", UNTIED, "stages.0.freeze=[embed_tokens.*]"],
        ["stages.0.backprop_loops=1", UNTIED, "stages.0.objective={kind: gate_loss}"],
    ],
)
def test_truncation_that_leaves_nothing_behind(overrides: list[str]) -> None:
    assert plan("small/two_stage_1p4b", *overrides).num_steps == 260


@pytest.mark.parametrize(
    ("overrides", "options", "said"),
    [
        (["stages.0.schedule.warmup_steps=9000"], {}, "warmup_steps 9000"),
        ([], {"num_devices": 3}, "which 3 processes cannot share evenly"),
        ([], {"num_devices": 0}, "at least one device"),
        (["stages.0.upcycle.num_layers=3"], {}, "num_layers is 3, and the core has 2 layers"),
        (["stages.0.objective={kind: routing, phase_steps: 100}"], {}, "the routing curriculum needs 3 phases of 100"),
        (["stages.0.objective={kind: gate_loss}", "stages.0.num_loops=", "model.architecture.num_loops=1"], {},
         "gate_loss needs a model of 2 loops"),
        (["stages.0.objective={kind: expected_loss, beta: 0.1, gate_only: true}", "stages.0.num_loops=1"], {},
         "gate_only needs a model of 2 loops"),
        (["stages.0.freeze=['*']"], {}, "Stage pretrain trains nothing: freeze covers all that it would train"),
        (["stages.0.backprop_loops=5"], {}, "backprop_loops is 5, and the stage runs 4 loops at most"),
        (["stages.0.micro_batch_rows=1000"], {}, "micro_batch_rows is 1000, and a step has"),
        (["stages.0.num_steps=null", "stages.0.tokens=null", "stages.0.epochs=1"], {"num_devices": 3},
         "3 processes cannot share evenly"),
        (["model.architecture.max_position_embeddings=100"], {}, "longer than model.architecture.max_position"),
        (["model.architecture.hidden_size=1e15"], {}, "hidden_size is 1e.15; looplm builds models with up to"),
        (["tokenizer={kind: train, vocab_size: 1e15}"], {}, "tokenizer.vocab_size .*it must be at most 16777216"),
        (["tokenizer.vocab_size=10"], {}, "tokenizer.vocab_size .*it must be at least 259"),
        (["model.architecture.vocab_size=512"], {}, "1,024, and the model has room for 512 tokens"),
        (["model={kind: checkpoint, path: stdlib-small}"], {}, "embeddings other meanings; load .*path: stdlib-small"),
        (["stages.0.backprop_loops=3", UNTIED], {}, "no gradient would ever reach model.embed_tokens.weight: the"),
        (["stages.0.backprop_loops=3", "model.architecture.num_prelude_layers=1"], {},
         "no gradient would ever reach model.prelude.0.*and others.*Give the model an injection"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_said(overrides: list[str], options: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        plan("small/two_stage_1p4b", *overrides, **options)


def test_sizes_that_only_a_missing_tokenizer_knows() -> None:
    overrides = ["tokenizer={kind: load, path: nowhere/at-all}"]
    with pytest.raises(UserError, match=r"vocabulary's size is not known.*model\.architecture\.vocab_size"):
        plan("small/two_stage_1p4b", *overrides)
    assert plan("small/two_stage_1p4b", *overrides, "model.architecture.vocab_size=1024").num_steps == 260


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80 * 10**9), ("24 GiB", 24 * 2**30), ("1e9", 10**9), ("1.5tb", 15 * 10**11), ("7", 7)]
)
def test_amounts_of_memory(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "80 apples", "-1GB", "0", "1e", "nan"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(UserError, match="no amount of memory"):
        parse_bytes(text)
