"""What a training run is: a model, a tokenizer, and stages that follow one another, as one YAML file says it."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import Field, create_model, field_validator, model_validator

from looplm.data.recipe import DataRecipe, RecordSource, ShardsSource, source_label
from looplm.data.tokenizer import MIN_VOCAB_SIZE
from looplm.model.config import LoopedConfig
from looplm.strict import Strict
from looplm.training.stage_recipe import Name, StageRecipe, trains_gate_alone

_TYPES = get_type_hints(LoopedConfig)


_LARGEST = {
    "vocab_size": 2**24, "hidden_size": 2**20, "intermediate_size": 2**22, "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16, "head_dim": 2**16, "lora_rank": 2**16, "max_position_embeddings": 2**30,
}  # fmt: skip
"""Far beyond any model, so that a slip of the keyboard is told before memory is asked for."""


def _can_be_built(recipe: Any) -> Any:
    for name, largest in _LARGEST.items():
        value = getattr(recipe, name)
        if value is not None and value > largest:
            raise ValueError(f"{name} is {value:.3g}; looplm builds models with up to {largest:,}.")
    # The sizes left open are those of the tokenizer and the stages; they cannot make a shape impossible.
    fields = {name: value for name, value in recipe if value is not None}
    LoopedConfig(**{"vocab_size": 1, **fields})
    return recipe


if TYPE_CHECKING:
    ArchitectureRecipe = Any  # made below from the fields of another class
else:
    ArchitectureRecipe = create_model(
        "ArchitectureRecipe",
        __base__=Strict,
        __doc__="The fields of `LoopedConfig`; vocab_size may be left to the tokenizer, the context to the stages.",
        **{
            field.name: (_TYPES[field.name], ... if field.default is dataclasses.MISSING else field.default)
            for field in dataclasses.fields(LoopedConfig)
            if field.name not in ("vocab_size", "max_position_embeddings")
        },
        vocab_size=(int | None, None),
        max_position_embeddings=(int | None, None),
        __validators__={"can_be_built": model_validator(mode="after")(_can_be_built)},
    )


class StartingScales(Strict):
    """Sizes at the start, for models so small that the usual ones leave depth nothing to do (docs/log.md)."""

    embedding: float | None = Field(default=None, gt=0)
    """Standard deviation of the embeddings; None for initializer_range."""
    branch_norm: float = Field(default=1.0, gt=0)
    """Weight of the norm at the end of every residual branch (norm_placement: ouro)."""
    final_norm: float = Field(default=1.0, gt=0)


class NewModel(Strict):
    """A freshly initialised model."""

    kind: Literal["new"] = "new"
    architecture: ArchitectureRecipe
    scales: StartingScales = StartingScales()


class CheckpointModel(Strict):
    """A looped checkpoint to go on from."""

    kind: Literal["checkpoint"] = "checkpoint"
    path: str
    """A directory or a hub name."""
    architecture: ArchitectureRecipe | None = None
    """What it is known to be, so that a plan needs no checkpoint; checked against it when the run starts."""


class ConvertedModel(Strict):
    """A dense checkpoint, looped at the start of the run (`looplm convert` as part of the recipe)."""

    kind: Literal["convert"] = "convert"
    source: str
    """A directory, hub name or GGUF file of a Llama-type, Qwen2 or Qwen3 model."""
    architecture: ArchitectureRecipe
    """What the conversion must give: its loops, injection and LoRA rank, and the source's shape, so that a plan
    needs no weights."""
    core: Annotated[str, Field(pattern=r"^\d+:\d+$")] | None = None
    """Layers of the source that loop, "4:20"; None for all."""
    lora_from: Literal["zero", "svd"] = "zero"
    """Where LoRA banks start: at no change, or at what tying the source's layers loses."""
    start_depth: float | None = Field(default=None, ge=1)
    """Mean depth of the exit distribution at the start; None for the middle, (1 + R) / 2."""


Model = Annotated[NewModel | CheckpointModel | ConvertedModel, Field(discriminator="kind")]


class TrainTokenizer(Strict):
    """A byte-level BPE trained on the text of the first stage."""

    kind: Literal["train"] = "train"
    vocab_size: int = Field(ge=MIN_VOCAB_SIZE, le=_LARGEST["vocab_size"])
    max_bytes: int = Field(default=50_000_000, gt=0)
    """Of text read for it, from the sources in turn, a document counting as 100 at least; the rest of a larger corpus,
    or an endless one, is left out."""


class LoadTokenizer(Strict):
    """The tokenizer of a checkpoint directory or hub name."""

    kind: Literal["load"] = "load"
    path: str


Tokenizer = Annotated[TrainTokenizer | LoadTokenizer, Field(discriminator="kind")]


class EvaluationRecipe(Strict):
    """Held-out loss at every depth during the run, also beyond the trained one."""

    every: int = Field(gt=0)
    """Steps; the last step of a stage is evaluated too."""
    max_loops: int | None = Field(default=None, gt=0)
    """Deepest loop measured; None for two beyond the model's."""
    max_tokens: int = Field(default=100_000, gt=0)
    seq_len: int | None = Field(default=None, gt=1)
    """Longest window; None for the stage's."""
    batch_rows: int = Field(default=8, gt=0)
    data: DataRecipe | None = None
    """What is measured on; None for what the stage's own data leave out (sources with `part: train`)."""


class CheckpointsRecipe(Strict):
    """When the whole state is saved for resuming, and what is kept of it."""

    every: int | None = Field(default=None, gt=0)
    """Steps; the end of a stage and an interruption save too. None for only these."""
    keep_last: int = Field(default=2, gt=0)
    keep_best: bool = True
    """Keep, beside the last ones, the one with the lowest held-out loss at the model's depth."""
    asynchronous: bool = True
    """Copy to memory and write while training goes on."""


class WandbRecipe(Strict):
    """Weights & Biases as a tracker (pip install 'looplm[wandb]')."""

    project: str
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"


class TelemetryRecipe(Strict):
    """Where a run's figures go beside telemetry.jsonl."""

    tensorboard: bool = True
    wandb: WandbRecipe | None = None
    state_gradients_every: int | None = Field(default=None, gt=0)
    """Steps between measurements of the gradient norm entering each (loop, layer); None for never."""


RUN_DIRECTORY = (
    "recipe.yaml", "telemetry.jsonl", "tensorboard", "wandb", "checkpoints", "tokenizer", "tokens",
    "dense", "comparison.json",
)  # fmt: skip
"""What a run directory holds beside one checkpoint directory a stage."""


class RunRecipe(Strict):
    """A whole run, as a recipe file holds it."""

    name: Name
    seed: int = Field(default=0, ge=0, lt=2**63)
    model: Model
    tokenizer: Tokenizer
    stages: tuple[StageRecipe, ...] = Field(min_length=1)
    baseline: Literal["dense"] | None = None
    """Train the dense twin as well, the same in everything but the loops, and compare (looplm.training.baseline)."""
    compare_loops: int | None = Field(default=None, gt=0)
    """The fixed exit at which the twins are compared; None for the model's own depth."""
    evaluation: EvaluationRecipe | None = None
    checkpoints: CheckpointsRecipe = CheckpointsRecipe()
    telemetry: TelemetryRecipe = TelemetryRecipe()
    data_workers: Literal[0, 1] = 0
    """Processes beside the trainer that read and tokenise."""
    data_cache: str | None = None
    """Directory of tokenised data, for several runs to share; None for the run directory's own."""

    @field_validator("stages")
    @classmethod
    def _names_differ(cls, stages: tuple[StageRecipe, ...]) -> tuple[StageRecipe, ...]:
        names = [stage.name for stage in stages]
        if len(set(names)) != len(names):
            raise ValueError(f"two stages have the same name ({', '.join(names)}).")
        if taken := set(names) & set(RUN_DIRECTORY):
            raise ValueError(f"a stage cannot be called {taken.pop()}: the run directory uses that name itself.")
        if taken := {f"{stage.name}-adapter" for stage in stages if stage.lora is not None} & set(names):
            raise ValueError(f"a stage cannot be called {taken.pop()}: the adapter of another one is kept there.")
        if unmerged := [stage.name for stage in stages[:-1] if stage.lora is not None and not stage.lora.merge]:
            raise ValueError(f"stage {unmerged[0]} must merge its adapter: the next one begins with the merged model.")
        for stage in stages:
            if stage.data is None:
                raise ValueError(f"stage {stage.name} has no data.")
        return stages

    @model_validator(mode="after")
    def _context_is_long_enough(self) -> "RunRecipe":
        # What a checkpoint or a source has may be lengthened; a new model is what its recipe says.
        given = self.model.architecture.max_position_embeddings if isinstance(self.model, NewModel) else None
        for stage in self.stages:
            if given is not None and stage.seq_len > given:
                raise ValueError(
                    f"stage {stage.name} has rows of seq_len {stage.seq_len}, longer than "
                    f"model.architecture.max_position_embeddings ({given}); raise that, or leave it out."
                )
        return self

    @model_validator(mode="after")
    def _tokenizer_has_text(self) -> "RunRecipe":
        data = self.stages[0].data
        if not isinstance(self.tokenizer, TrainTokenizer) or data is None:
            return self
        for source in data.sources:
            if isinstance(source, ShardsSource) or (isinstance(source, RecordSource) and source.format == "tokens"):
                raise ValueError(
                    f"the tokenizer is to be trained on the text of stage {self.stages[0].name}, and "
                    f"{source_label(source)} holds tokens; load the tokenizer that made them (tokenizer.kind: load)."
                )
        return self

    @model_validator(mode="after")
    def _tokenizer_is_the_models(self) -> "RunRecipe":
        if not isinstance(self.tokenizer, TrainTokenizer):
            return self
        if not isinstance(self.model, NewModel):
            path = self.model.path if isinstance(self.model, CheckpointModel) else self.model.source
            raise ValueError(
                "a new tokenizer would give the model's trained embeddings other meanings; load the one it has "
                f"(tokenizer: {{kind: load, path: {path}}})."
            )
        vocab_size = self.model.architecture.vocab_size
        if vocab_size is not None and self.tokenizer.vocab_size > vocab_size:
            raise ValueError(
                f"tokenizer.vocab_size is {self.tokenizer.vocab_size:,}, and the model has room for {vocab_size:,} "
                "tokens (model.architecture.vocab_size)."
            )
        return self

    @model_validator(mode="after")
    def _has_a_twin(self) -> "RunRecipe":
        if self.baseline is None:
            if self.compare_loops is not None:
                raise ValueError(
                    "compare_loops is the exit at which a baseline is compared; give baseline: dense too."
                )
            return self
        if isinstance(self.model, CheckpointModel):
            raise ValueError("a looped checkpoint has no dense twin; baseline: dense wants model.kind new or convert.")
        if self.evaluation is None:
            raise ValueError("baseline: dense compares held-out losses, and so needs an evaluation section.")
        gate_only = [trains_gate_alone(stage.objective) for stage in self.stages]
        if gate_only[0] or gate_only != sorted(gate_only):
            raise ValueError(
                "the dense twin has no gate: with baseline: dense, stages that train it alone stand behind all others."
            )
        depth = self.stages[gate_only.index(True) - 1 if any(gate_only) else -1].num_loops
        measured = self.evaluation.max_loops or 2 + (
            depth if isinstance(depth, int) else self.model.architecture.num_loops
        )
        if self.compare_loops is not None and self.compare_loops > measured:
            raise ValueError(f"compare_loops is {self.compare_loops}, and evaluation measures {measured} loops.")
        return self
