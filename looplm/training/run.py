"""A whole run: the stages of a recipe one after another, in one process or many, and from wherever it was left.

    run_dir/.looplm-run        says that a run was begun here, and that what else lies here may be its own
    run_dir/recipe.yaml        the recipe with every default
    run_dir/tokenizer/         the tokenizer, trained or loaded once
    run_dir/tokens/            the data, tokenised once (unless the recipe names a data_cache)
    run_dir/checkpoints/       resumable states
    run_dir/telemetry.jsonl    and tensorboard/: what the run told
    run_dir/<stage>/           a finished stage's model, for `looplm.load`, with the tokenizer and the recipe
    run_dir/dense/             with `baseline: dense`, the run directory of the twin
    run_dir/comparison.json    and what the two have come to

What a checkpoint in the middle of a stage holds, :mod:`looplm.training.checkpoint` says.
"""

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from filelock import FileLock
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from looplm.conversion.dense_source import any_tokenizer
from looplm.data.corpus import evaluation_documents, held_out_documents, open_rows, prepare, tokenizer_documents
from looplm.data.documents import Document, hash_fraction
from looplm.data.evaluation_windows import evaluation_windows
from looplm.data.recipe import DataRecipe, FilesSource, GeneratorSource
from looplm.data.sources import expand_paths, import_function
from looplm.data.tokenizer import encode_plain, train_tokenizer
from looplm.errors import UserError
from looplm.hf.adapter import ADAPTER_CONFIG, save_adapter
from looplm.hf.checkpoint import CONFIG
from looplm.hf.load import load, load_tokenizer
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.hf.save import save_checkpoint, save_tokenizer
from looplm.model.flops import count_parameters
from looplm.training.architectures import check_stage, stage_configs, starting_config
from looplm.training.baseline import COMPARISON, DENSE, compare_twins, dense_twin
from looplm.training.checkpoint import Checkpoint, remove_stages_before
from looplm.training.distributed import Ranks, process_group
from looplm.training.held_out import HeldOut
from looplm.training.optimizer import OptimizerState, optimizer_state
from looplm.training.recipe import CheckpointModel, RunRecipe, TrainTokenizer
from looplm.training.recipe_changes import check_changes, recipe_changes
from looplm.training.recipe_file import dump_recipe, load_recipe
from looplm.training.rows import LoadedRows
from looplm.training.run_directory import RECIPE, claim, look_into
from looplm.training.stage_model import (
    adapter_directory,
    build_model,
    change_for_stage,
    gathered,
    merged_after,
    stage_directory,
    trained_besides,
)
from looplm.training.stage_recipe import StageRecipe
from looplm.training.steps import StepPlan
from looplm.training.telemetry import Telemetry
from looplm.training.trainer import Trainer

Result = TypeVar("Result")


def run(recipe: RunRecipe, run_dir: Path, resume: bool = False, console: Console | None = None) -> None:
    """Trains every stage of `recipe`, in the process group that torchrun set up, if it did; and those of its dense
    twin after it, where it asks for one.

    Without `resume` the run directory must be empty or not there. With it, a run that was begun there goes on from its
    last checkpoint, bit for bit; where none was begun, one is. Rank 0 alone writes and shows progress.

    Raises UserError for what is wrong with recipe, data or directory, for a recipe changed in what a running stage
    computes, and for a full disk; :class:`~looplm.training.interrupt.Interrupted` when it was asked to stop and has
    saved.
    """
    try:
        with process_group() as ranks:
            looped = _Run(recipe, run_dir, ranks, console if ranks.is_main else None)
            looped.go(resume)
            if recipe.baseline is not None:
                looped.run_twin()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        raise UserError(
            f"{error.filename or run_dir} could not be written: {error.strerror}. What was saved before is kept: make "
            "room, or make it writable, and resume."
        ) from error


@dataclass
class _Run:
    recipe: RunRecipe
    run_dir: Path
    ranks: Ranks
    console: Console | None
    tokenizer_dir: Path | None = None
    """Where the tokenizer comes from instead, as for a twin."""
    _documents: dict[str, list[Document]] = field(default_factory=dict)
    """Held-out documents by what they are drawn from; stages mostly share them."""
    _lock: FileLock | None = None
    """Of the run directory, on rank 0."""

    def go(self, resume: bool) -> None:
        """All stages that are left, with other processes kept out of the run directory."""
        try:
            self.train_what_is_left(resume)
        finally:
            if self._lock is not None:
                self._lock.release()

    def train_what_is_left(self, resume: bool) -> None:
        """Goes from stage to stage, from where the run was left."""
        latest = self.on_main(lambda: self.open_directory(resume))
        tokenizer = self.open_tokenizer()
        begin = 0 if latest is None else latest.stage_index
        if self.on_main(lambda: self.is_finished(latest)):
            self.say(f"{self.recipe.name} is finished, in {self.run_dir}.")
            return
        telemetry = self.telemetry()
        self.say(f"{self.recipe.name}: {_counted(len(self.recipe.stages), 'stage')}, in {self.run_dir}.")
        model: LoopLMForCausalLM | None = None
        moments: OptimizerState | None = None
        for index, stage in list(enumerate(self.recipe.stages))[begin:]:
            if model is None:
                model = self.first_model(index, tokenizer)
            model = change_for_stage(model, stage, self.recipe.seed + index)
            checkpoint = latest if latest is not None and latest.stage_index == index else None
            model = model.to(self.ranks.device)  # pyright: ignore[reportArgumentType]
            model, moments = self.train_stage(index, model, tokenizer, telemetry, moments, checkpoint)
        telemetry.close()
        last = self.recipe.stages[-1]
        merged = last.lora is None or last.lora.merge
        where = stage_directory(self.run_dir, last) if merged else adapter_directory(self.run_dir, last)
        self.say(f"Done. The {'model' if merged else 'adapter'} is in {where}.")

    def run_twin(self) -> None:
        """Trains the dense twin as far as it has not been yet, and compares."""
        twin = dense_twin(self.recipe, self.run_dir)
        _Run(twin, self.run_dir / DENSE, self.ranks, self.console, self.run_dir / "tokenizer").go(resume=True)
        twins = self.on_main(lambda: compare_twins(self.recipe, self.run_dir))
        if self.console is not None:
            self.console.print(twins.table())
            self.say(f"All figures are in {self.run_dir / COMPARISON}.")

    # --- Before the first step --------------------------------------------------------------------------------------

    def open_directory(self, resume: bool) -> Checkpoint | None:
        """Finds in the run directory where to go on, checks recipe and data, and only then writes; on rank 0."""
        begun = look_into(self.run_dir, resume)
        latest = begun.latest
        next_stage = 0 if latest is None else latest.stage_index
        if begun.trained:
            self.accept_changes(next_stage)
        if not self.is_finished(latest):
            self.check_stages(next_stage, self.tokenizer_before(begun=begun.trained))
        self._lock = claim(self.run_dir, self.recipe, begun)
        return latest

    def accept_changes(self, stage_index: int) -> None:
        """Compares the recipe with the one the run was started with; raises UserError for what may not differ."""
        changes = recipe_changes(load_recipe(self.run_dir / RECIPE), self.recipe, stage_index)
        check_changes(changes, str(self.run_dir))
        for change in changes:
            self.say(f"Changed: {change}")

    def is_finished(self, latest: Checkpoint | None) -> bool:
        """Whether the last stage's model has been saved; then nothing is left to do."""
        last = len(self.recipe.stages) - 1
        return latest is not None and latest.stage_index == last and self.is_saved(self.recipe.stages[last])

    def is_saved(self, stage: StageRecipe) -> bool:
        """Whether the stage has left what it should: its model, or its adapter where that is not merged."""
        if stage.lora is None or stage.lora.merge:
            return (stage_directory(self.run_dir, stage) / CONFIG).is_file()
        return (adapter_directory(self.run_dir, stage) / ADAPTER_CONFIG).is_file()

    def open_tokenizer(self) -> PreTrainedTokenizerBase:
        """The run's tokenizer, trained on the first stage's text or loaded, and kept with the run."""
        directory = self.run_dir / "tokenizer"
        self.on_main(lambda: None if directory.is_dir() else self.make_tokenizer(directory))
        return load_tokenizer(directory)

    def make_tokenizer(self, directory: Path) -> None:
        """Trains or loads the tokenizer, and writes it; on rank 0."""
        recipe = self.recipe.tokenizer
        if self.tokenizer_dir is not None:
            tokenizer = load_tokenizer(self.tokenizer_dir)
        elif isinstance(recipe, TrainTokenizer):
            self.say(
                f"Training a tokenizer of {recipe.vocab_size:,} tokens on up to {recipe.max_bytes:,} bytes of text "
                "(tokenizer.max_bytes)."
            )
            data = self.recipe.stages[0].data
            assert data is not None  # the schema asks for it
            texts = (document.text for document in tokenizer_documents(data, recipe.max_bytes))
            tokenizer = train_tokenizer(texts, recipe.vocab_size)
        else:
            tokenizer = any_tokenizer(recipe.path)
        fresh = directory.with_name(".tokenizer.new")
        save_tokenizer(tokenizer, fresh)
        fresh.rename(directory)

    def tokenizer_before(self, *, begun: bool) -> PreTrainedTokenizerBase | None:
        """The tokenizer as it is there before anything is written; None where it is still to be trained."""
        kept, recipe = self.run_dir / "tokenizer", self.recipe.tokenizer
        if begun and kept.is_dir():
            return load_tokenizer(kept)
        if self.tokenizer_dir is not None:
            return load_tokenizer(self.tokenizer_dir)
        return None if isinstance(recipe, TrainTokenizer) else any_tokenizer(recipe.path)

    def check_stages(self, begin: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Looks for what any stage would stumble over, before anything is written; on rank 0.

        Raises UserError for impossible combinations, and for files and functions of the data that are not there.
        """
        configs = stage_configs(self.recipe, starting_config(self.recipe, tokenizer))
        for config, stage in list(zip(configs, self.recipe.stages, strict=True))[begin:]:
            check_stage(config, stage, StepPlan(stage) if stage.epochs is None else None, self.ranks.world_size)
            assert stage.data is not None  # the schema asks for it
            evaluation = self.recipe.evaluation
            held_out = evaluation.data if evaluation is not None else None
            for source in (*stage.data.sources, *(held_out.sources if held_out is not None else ())):
                if isinstance(source, FilesSource):
                    expand_paths(source.paths)
                elif isinstance(source, GeneratorSource):
                    import_function(source)

    def telemetry(self) -> Telemetry:
        """Silent on all ranks but the first."""
        if not self.ranks.is_main:
            return Telemetry()
        recipe = self.recipe.telemetry
        return Telemetry(
            self.run_dir,
            self.console,
            tensorboard=recipe.tensorboard,
            wandb=recipe.wandb,
            run_config=self.recipe.model_dump(mode="json"),
        )

    def first_model(self, index: int, tokenizer: PreTrainedTokenizerBase) -> LoopLMForCausalLM:
        """What stage `index` begins with, when it is the first of this process."""
        if index == 0:
            return build_model(self.recipe, starting_config(self.recipe, tokenizer), tokenizer)
        return load(stage_directory(self.run_dir, self.recipe.stages[index - 1]), dtype=torch.float32)

    # --- One stage --------------------------------------------------------------------------------------------------

    def train_stage(
        self,
        index: int,
        model: LoopLMForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        telemetry: Telemetry,
        moments: OptimizerState | None,
        checkpoint: Checkpoint | None,
    ) -> tuple[LoopLMForCausalLM, OptimizerState]:
        """One stage from its start or its checkpoint to its end, with its model saved; returns what the next needs."""
        stage = self.recipe.stages[index]
        rows, num_steps = self.open_data(index, model, tokenizer)
        evaluation = self.recipe.evaluation
        trainer = Trainer(
            model, stage, rows, telemetry, self.run_dir,
            seed=self.recipe.seed, num_steps=num_steps, checkpoints=self.recipe.checkpoints,
            held_out=self.held_out(stage, model, tokenizer),
            held_out_every=evaluation.every if evaluation is not None else None,
            state_gradients_every=self.recipe.telemetry.state_gradients_every,
            optimizer_state=moments, stage_index=index,
        )  # fmt: skip
        if checkpoint is not None:
            trainer.resume(checkpoint.directory)
            self.say(f"Resuming at step {trainer.step} from {checkpoint.directory.name}.")
        else:
            telemetry.rewind(stage.name, 0)
        self.say(self.headline(stage, model, num_steps))
        trainer.run()
        moments = {} if stage.lora is not None else optimizer_state(model, trainer.optimizer)
        model = self.save_model(index, model, tokenizer)
        self.on_main(lambda: remove_stages_before(self.run_dir, index))
        return model, moments

    def open_data(
        self, index: int, model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[LoadedRows, int]:
        """The rows of a stage, tokenised on rank 0 where they are not yet, and the stage's number of steps."""
        stage, data = self.recipe.stages[index], self.recipe.stages[index].data
        assert data is not None  # the schema asks for it
        cache = Path(self.recipe.data_cache) if self.recipe.data_cache is not None else self.run_dir / "tokens"
        vocab_size = model.model.config.vocab_size
        self.on_main(lambda: prepare(data, tokenizer, cache, vocab_size=vocab_size, say=self.say) and None)
        stream = open_rows(
            data, tokenizer,
            seq_len=stage.seq_len, seed=self.recipe.seed + index, cache_dir=cache,
            rank=self.ranks.rank, world_size=self.ranks.world_size, vocab_size=vocab_size, say=self.say,
        )  # fmt: skip
        steps = StepPlan(stage, rows_per_epoch=stream.rows_per_epoch)
        check_stage(model.model.config, stage, steps, self.ranks.world_size)
        return LoadedRows(stream, self.recipe.data_workers), steps.num_steps

    def held_out(
        self, stage: StageRecipe, model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase
    ) -> HeldOut | None:
        """What is measured during the stage, if the recipe asks for it."""
        recipe = self.recipe.evaluation
        if recipe is None:
            return None
        assert stage.data is not None  # the schema asks for it
        key = (recipe.data or stage.data).model_dump_json()
        if key not in self._documents:
            self._documents[key] = sample_documents(recipe.data, stage.data, tokenizer, recipe.max_tokens)
        windows = evaluation_windows(self._documents[key], tokenizer, recipe.seq_len or stage.seq_len)
        return HeldOut(windows, recipe.max_loops or model.model.config.num_loops + 2, recipe.batch_rows)

    def headline(self, stage: StageRecipe, model: LoopLMForCausalLM, num_steps: int) -> str:
        """A stage in one line."""
        config, num_tokens = model.model.config, StepPlan(stage, num_steps).num_tokens
        loops, steps = _counted(config.num_loops, "loop"), _counted(num_steps, "step")
        return (
            f"Stage {stage.name}: {count_parameters(config).total:,} parameters, {loops}, {steps}, {num_tokens:,} "
            f"tokens in rows of {stage.seq_len:,}, on {self.ranks.world_size} x {self.ranks.device.type}."
        )

    def save_model(
        self, index: int, model: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase
    ) -> LoopLMForCausalLM:
        """Writes the stage's model, unless an earlier process has, and returns it as the next stage finds it."""
        stage = self.recipe.stages[index]
        saved = self.on_main(lambda: self.is_saved(stage))
        if saved and stage.lora is None:
            return model
        whole = gathered(model)  # a matter of all ranks
        if stage.lora is not None:
            if not saved and not stage.lora.per_loop:
                self.on_main(lambda: self.write_adapter(index, whole))
            whole = merged_after(whole, stage.lora)
        if not saved and (stage.lora is None or stage.lora.merge):
            self.on_main(lambda: self.write_model(stage, whole, tokenizer))
        return model if stage.lora is None else whole

    def write_model(self, stage: StageRecipe, whole: LoopLMForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
        """The stage's checkpoint directory; on rank 0."""
        directory = stage_directory(self.run_dir, stage)
        save_checkpoint(whole, directory, tokenizer)
        (directory / RECIPE).write_text(dump_recipe(self.recipe), encoding="utf-8")
        self.say(f"Stage {stage.name} is done; its model is in {directory}.")

    def write_adapter(self, index: int, whole: LoopLMForCausalLM) -> None:
        """The adapter of a stage alone; on rank 0."""
        stage, model = self.recipe.stages[index], self.recipe.model
        assert stage.lora is not None
        directory = adapter_directory(self.run_dir, stage)
        base = str(stage_directory(self.run_dir, self.recipe.stages[index - 1])) if index else ""
        if not index and isinstance(model, CheckpointModel):
            base = model.path
        if (directory / ADAPTER_CONFIG).is_file():  # killed before the merged model was written
            return
        save_adapter(whole, directory, base, trained_besides(whole, stage.lora))
        self.say(f"Stage {stage.name}: its adapter is in {directory}.")

    # --- Ranks ------------------------------------------------------------------------------------------------------

    def say(self, line: str) -> None:
        """Shows a line, on rank 0."""
        if self.console is not None:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def on_main(self, function: Callable[[], Result]) -> Result:
        """What `function` returns on rank 0, on all ranks; a UserError there is raised everywhere."""
        if self.ranks.world_size == 1:
            return function()
        found: list[tuple[Result | None, str | None] | None] = [None]
        if self.ranks.is_main:
            try:
                found = [(function(), None)]
            except UserError as error:
                found = [(None, str(error))]
        dist.broadcast_object_list(found, src=0)
        assert found[0] is not None
        result, complaint = found[0]
        if complaint is not None:
            raise UserError(complaint)
        return result  # pyright: ignore[reportReturnType]


def _counted(number: int, noun: str) -> str:
    """ "1 step", "2,000 steps"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def sample_documents(
    evaluation: DataRecipe | None, training: DataRecipe, tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> list[Document]:
    """Held-out documents of about `max_tokens` tokens, drawn by the hash of their names: the same in every process."""
    documents = held_out_documents(training) if evaluation is None else evaluation_documents(evaluation)
    drawn: list[Document] = []
    num_tokens = 0
    for document in sorted(documents, key=lambda document: hash_fraction(document.name, salt="evaluation")):
        if num_tokens >= max_tokens:
            break
        drawn.append(document)
        num_tokens += len(encode_plain([document.text], tokenizer)[0])
    return drawn
