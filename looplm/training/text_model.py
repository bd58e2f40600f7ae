"""A small LoopLM of text, from documents to checkpoint: tokenizer, Stage I, Stage II.

The quickstart trains one of these on the standard library's own text, and so was the checkpoint that ships
with the package; both are this file with other numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from looplm.data.documents import Document, DocumentSplit
from looplm.data.evaluation_windows import EvaluationWindows, evaluation_windows
from looplm.data.packing import TokenStream, tokenize_documents
from looplm.data.rows import RowStream
from looplm.data.tokenizer import train_tokenizer
from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.strict import Strict
from looplm.training.checkpoint import list_checkpoints
from looplm.training.distributed import cpu_has_bf16
from looplm.training.recipe import CheckpointsRecipe, StartingScales
from looplm.training.rows import LoadedRows
from looplm.training.stage_model import apply_scales
from looplm.training.stage_recipe import (
    ExpectedLossRecipe,
    GateLossRecipe,
    OptimizerRecipe,
    ScheduleRecipe,
    StageRecipe,
)
from looplm.training.telemetry import Telemetry
from looplm.training.trainer import Trainer

CHECKPOINTS = CheckpointsRecipe(every=1000, keep_last=1)
"""Where there is a run directory."""


class TextRecipe(Strict):
    """Shape and schedule of a small text model. Embeddings are tied; head size is hidden_size / num_heads."""

    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_loops: int = Field(default=4, gt=0)
    seq_len: int = Field(default=256, gt=1)
    batch_size: int = Field(default=8, gt=0)
    """Windows of seq_len tokens in one step."""
    embedding_start: float = Field(default=0.12, gt=0)
    branch_norm_start: float = Field(default=0.12, gt=0)
    final_norm_start: float = Field(default=0.3, gt=0)
    """Sizes at the start: of embeddings (standard deviation), of each residual branch, of the state after a loop.
    They decide what depth is worth to so small a model. At the usual 0.02, 1 and 1 a branch drowns the token; at
    0.05, 0.1 and 1 later loops hardly move the state and gain 1 %; of one size all loops count (docs/log.md)."""
    lr: float = Field(gt=0)
    beta: float = Field(ge=0)
    smoothing: float = Field(default=0.0, ge=0, lt=1)
    warmup_steps: int = Field(default=200, ge=0)
    num_steps: int = Field(gt=0)
    """Of Stage I."""
    gate_lr: float = Field(default=1e-2, gt=0)
    num_gate_steps: int = Field(gt=0)
    """Of Stage II."""
    compile: bool = False
    seed: int = 0

    def model_config_for(self, tokenizer: PreTrainedTokenizerBase, num_loops: int) -> LoopLMConfig:
        """The architecture, with `num_loops` loops: Ouro's norms and wiring, tied embeddings."""
        return LoopLMConfig(
            vocab_size=len(tokenizer),
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            head_dim=self.hidden_size // self.num_heads,
            num_loops=num_loops,
            tie_word_embeddings=True,
            max_position_embeddings=4 * self.seq_len,
            beta=self.beta,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )

    def stage_one(self, num_loops: int, name: str) -> StageRecipe:
        """The expected loss over model and gate."""
        return StageRecipe(
            name=name,
            num_steps=self.num_steps,
            seq_len=self.seq_len,
            batch_tokens=self.batch_size * self.seq_len,
            num_loops=num_loops,
            objective=ExpectedLossRecipe(beta=self.beta, smoothing=self.smoothing),
            optimizer=OptimizerRecipe(lr=self.lr),
            schedule=ScheduleRecipe(warmup_steps=min(self.warmup_steps, self.num_steps // 4)),
            precision="bf16" if cpu_has_bf16() else "fp32",
            compile=self.compile,
        )

    def stage_two(self, name: str) -> StageRecipe:
        """The gate alone."""
        return StageRecipe(
            name=name,
            num_steps=self.num_gate_steps,
            seq_len=self.seq_len,
            batch_tokens=self.batch_size * self.seq_len,
            num_loops=self.num_loops,
            objective=GateLossRecipe(),
            optimizer=OptimizerRecipe(lr=self.gate_lr, weight_decay=0.0),
            schedule=ScheduleRecipe(warmup_steps=min(20, self.num_gate_steps // 4)),
            precision="bf16" if cpu_has_bf16() else "fp32",
        )


@dataclass(frozen=True)
class Corpus:
    """Tokenised text, ready to train on and to measure on."""

    tokenizer: PreTrainedTokenizerBase
    train: TokenStream
    held_out: EvaluationWindows
    held_out_documents: Sequence[Document]


def prepare_corpus(
    split: DocumentSplit, vocab_size: int, seq_len: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> Corpus:
    """Trains a tokenizer on the training part (unless one is given) and tokenises both parts."""
    if tokenizer is None:
        tokenizer = train_tokenizer((document.text for document in split.train), vocab_size)
    return Corpus(
        tokenizer=tokenizer,
        train=tokenize_documents(split.train, tokenizer),
        held_out=evaluation_windows(split.held_out, tokenizer, seq_len),
        held_out_documents=split.held_out,
    )


@dataclass(frozen=True)
class StageResult:
    """One finished stage."""

    tokens: int
    """Tokens trained on, rows times their length."""
    seconds: float


def new_model(recipe: TextRecipe, corpus: Corpus, num_loops: int) -> LoopLMForCausalLM:
    """A freshly initialised model; the same seed gives the looped model and its one-loop twin the same weights."""
    torch.manual_seed(recipe.seed)
    model = LoopLMForCausalLM(recipe.model_config_for(corpus.tokenizer, num_loops))
    apply_scales(
        model,
        StartingScales(
            embedding=recipe.embedding_start, branch_norm=recipe.branch_norm_start, final_norm=recipe.final_norm_start
        ),
    )
    return model


def training_rows(recipe: TextRecipe, corpus: Corpus) -> LoadedRows:
    """The corpus's training part in rows, from the start."""
    return LoadedRows(RowStream.of_tokens(corpus.train, seq_len=recipe.seq_len, seed=recipe.seed))


def train_stage(
    model: LoopLMForCausalLM,
    stage: StageRecipe,
    recipe: TextRecipe,
    corpus: Corpus,
    telemetry: Telemetry,
    run_dir: Path | None = None,
    resume: bool = False,
    *,
    stage_index: int = 0,
    checkpoints: CheckpointsRecipe = CHECKPOINTS,
) -> StageResult:
    """Runs one stage over the corpus's training part, from its last checkpoint in `run_dir` if asked to resume.

    Without a `run_dir` no checkpoints are written.
    """
    trainer = Trainer(
        model, stage, training_rows(recipe, corpus), telemetry, run_dir,
        seed=recipe.seed, checkpoints=checkpoints if run_dir is not None else None, stage_index=stage_index,
    )  # fmt: skip
    if resume and run_dir is not None:
        own = [c for c in list_checkpoints(run_dir / "checkpoints") if c.stage_index == stage_index]
        if own:
            trainer.resume(own[-1].directory)
    trainer.run()
    return StageResult(tokens=trainer.tokens, seconds=trainer.seconds)
