"""`baseline: dense`: the dense twin of a run, and what the two have come to on the same held-out text.

The twin is the same recipe with one loop: the source itself where the model is converted, the same architecture where
it is new. Data, order, batch, steps, optimizer and schedule are those of the looped run, as in "Closing the Loop"
(section 4), where each is trained on the same tokens.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from looplm.errors import UserError
from looplm.hf.checkpoint import CONFIG, read_config
from looplm.model.flops import count_parameters, inference_flops
from looplm.training.recipe import ConvertedModel, NewModel, RunRecipe
from looplm.training.stage_recipe import ExpectedLossRecipe, StageRecipe, trains_gate_alone

DENSE = "dense"
"""The twin's run directory within that of the looped run."""

COMPARISON = "comparison.json"


def dense_twin(recipe: RunRecipe, run_dir: Path) -> RunRecipe:
    """The recipe of the dense twin; it shares the tokenised data of the run in `run_dir`.

    Stages that train the gate alone are left out: with one loop there is nothing to decide.
    """
    stages = tuple(_dense_stage(stage) for stage in language_stages(recipe))
    evaluation = recipe.evaluation
    assert evaluation is not None  # the schema asks for it
    return recipe.model_copy(
        update={
            "name": f"{recipe.name}-dense",
            "model": _dense_model(recipe.model),
            "stages": stages,
            "evaluation": evaluation.model_copy(update={"max_loops": 1}),
            "data_cache": recipe.data_cache or str(run_dir / "tokens"),
            "baseline": None,
            "compare_loops": None,
        }
    )


def language_stages(recipe: RunRecipe) -> list[StageRecipe]:
    """The stages that train the language model."""
    return [stage for stage in recipe.stages if not trains_gate_alone(stage.objective)]


def _dense_model(model: Any) -> NewModel | ConvertedModel:
    assert isinstance(model, NewModel | ConvertedModel)  # the schema allows no other
    looped = dict(model.architecture)
    tied = looped["num_loops"] if isinstance(model, ConvertedModel) and model.lora_from == "svd" else 1
    one_loop: dict[str, Any] = {"num_loops": 1, "injection": "none", "lora_rank": 0}
    if isinstance(model, NewModel):
        return model.model_copy(update={"architecture": type(model.architecture)(**looped | one_loop)})
    # The source as it is: a core among other layers was a way of looping it, and so were layers tied into one.
    layers = looped["num_prelude_layers"] + tied * looped["num_hidden_layers"] + looped["num_coda_layers"]
    one_loop |= {"num_hidden_layers": layers, "num_prelude_layers": 0, "num_coda_layers": 0}
    one_loop |= {"coda_input": "normed", "loop_state": "normed"}
    architecture = type(model.architecture)(**looped | one_loop)
    changes = {"architecture": architecture, "core": None, "lora_from": "zero", "start_depth": None}
    return model.model_copy(update=changes)


def _dense_stage(stage: StageRecipe) -> StageRecipe:
    """At one loop the expected loss is the cross entropy, whatever its beta, smoothing and prior."""
    loops_only = ("injection", "lora")
    return stage.model_copy(
        update={
            "num_loops": 1,
            "backprop_loops": None,
            "objective": ExpectedLossRecipe(beta=0.0),
            "freeze": tuple(name for name in stage.freeze if not name.removeprefix("model.").startswith(loops_only)),
        }
    )


# --- The comparison -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the twins after the last stage that trains the language model."""

    num_parameters: int
    """Stored; a dense model's without the gate."""
    inference_flops: list[float]
    """Of a token, read out after loops 1, 2, ..."""
    loop_losses: list[float]
    """Held-out nats a token after loops 1, 2, ..."""
    bits_per_byte: list[float]
    steps: dict[int, list[float]]
    """Step -> its held-out losses, wherever they were measured."""


@dataclass(frozen=True, kw_only=True)
class Twins:
    """A looped run beside its dense twin."""

    name: str
    stage: str
    num_tokens: int
    """Held-out tokens predicted, the same for both."""
    compare_loops: int
    """The fixed exit at which they are compared."""
    dense: Side
    looped: Side

    @property
    def difference(self) -> float:
        """Looped less dense, nats a token; below 0 the loops have paid."""
        return self.looped.loop_losses[self.compare_loops - 1] - self.dense.loop_losses[0]

    def as_json(self) -> dict[str, Any]:
        """All figures, for comparison.json."""
        return {
            "name": self.name,
            "stage": self.stage,
            "num_tokens": self.num_tokens,
            "compare_loops": self.compare_loops,
            "difference": self.difference,
            "dense": vars(self.dense),
            "looped": vars(self.looped),
        }

    def table(self) -> Table:
        """The losses after the last step, one row a depth."""
        table = Table(title=f"{self.name}: held-out loss after {self.stage}, {self.num_tokens:,} tokens",
                      title_justify="left")  # fmt: skip
        for column in ("", "nats a token", "against dense", "bits a byte", "FLOPs a token"):
            table.add_column(column, justify="left" if not column else "right")
        dense = self.dense
        table.add_row("dense", f"{dense.loop_losses[0]:.4f}", "", f"{dense.bits_per_byte[0]:.4f}",
                      f"{dense.inference_flops[0]:.3g}")  # fmt: skip
        looped = self.looped
        for i, loss in enumerate(looped.loop_losses):
            chosen = i + 1 == self.compare_loops
            table.add_row(
                f"looped, loop {i + 1}" + (" (fixed exit)" if chosen else ""),
                f"{loss:.4f}", f"{loss - dense.loop_losses[0]:+.4f}", f"{looped.bits_per_byte[i]:.4f}",
                f"{looped.inference_flops[i]:.3g}", style="bold" if chosen else "",
            )  # fmt: skip
        return table


def compare_twins(recipe: RunRecipe, run_dir: Path) -> Twins:
    """Reads what both runs measured last and writes run_dir/comparison.json.

    Raises UserError where the two were not measured on the same tokens, as after an evaluation changed in between.
    """
    stage = language_stages(recipe)[-1].name
    told = [list(_held_out(directory, stage)) for directory in (run_dir / DENSE, run_dir)]
    if not all(told) or told[0][-1]["num_tokens"] != told[1][-1]["num_tokens"]:
        raise UserError(
            f"The twins in {run_dir} cannot be compared: their last held-out losses of stage {stage} are missing or "
            "of different text. Run both anew with one evaluation section."
        )
    sides = [_side(directory / stage, entries)
             for directory, entries in zip((run_dir / DENSE, run_dir), told, strict=True)]  # fmt: skip
    config = read_config(run_dir / stage / CONFIG).to_model_config()
    twins = Twins(
        name=recipe.name,
        stage=stage,
        num_tokens=told[0][-1]["num_tokens"],
        compare_loops=recipe.compare_loops or min(config.num_loops, len(sides[1].loop_losses)),
        dense=sides[0],
        looped=sides[1],
    )
    (run_dir / COMPARISON).write_text(json.dumps(twins.as_json(), indent=1) + "\n", encoding="utf-8")
    return twins


def _held_out(run_dir: Path, stage: str) -> Iterator[dict[str, Any]]:
    """What telemetry holds of held-out losses, in the order of steps."""
    for line in (run_dir / "telemetry.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if entry["stage"] == stage and "held_out" in entry:
            yield {"step": entry["step"], **entry["held_out"]}


def _side(directory: Path, told: list[dict[str, Any]]) -> Side:
    config = read_config(directory / CONFIG).to_model_config()
    count, last = count_parameters(config), told[-1]
    depths = range(1, len(last["loop_losses"]) + 1)
    return Side(
        num_parameters=count.total_without_gate if config.num_loops == 1 else count.total,
        inference_flops=[inference_flops(config, depth) for depth in depths],
        loop_losses=last["loop_losses"],
        bits_per_byte=last["bits_per_byte"],
        steps={entry["step"]: entry["loop_losses"] for entry in told},
    )
