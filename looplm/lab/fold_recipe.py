"""A small model of fold and the two stages that train it, some two minutes on one thread (figures: docs/log.md)."""

from collections.abc import Sequence
from pathlib import Path

import torch

from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.lab.fold import PAD, VOCAB_SIZE, FoldTask
from looplm.lab.task import TaskStream
from looplm.model.config import LoopedConfig
from looplm.training.stage_recipe import (
    ExpectedLossRecipe,
    GateLossRecipe,
    OptimizerRecipe,
    ScheduleRecipe,
    StageRecipe,
)
from looplm.training.telemetry import Telemetry
from looplm.training.trainer import Trainer

BATCH_SIZE = 256
"""Expressions a batch."""


def fold_config(task: FoldTask, num_loops: int = 4) -> LoopLMConfig:
    """One layer of width 64, applied `num_loops` times; the length of a context fits expressions twice as long.

    Pre-norm needs fewer steps here than Ouro's placement, and weights that start at 0.1 fewer than at 0.02.
    """
    shape = LoopedConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        num_loops=num_loops,
        norm_placement="pre",
        initializer_range=0.1,
        max_position_embeddings=2 * (task.max_k + 2),
    )
    return LoopLMConfig.from_model_config(shape, pad_token_id=PAD)


def fold_stages(
    num_loops: int = 4, num_steps: int = 1500, gate_steps: int = 200, *, max_k: int = 4
) -> tuple[StageRecipe, ...]:
    """Stage I for `num_steps` with the expected loss, then Stage II for `gate_steps`; a single loop has no Stage II.

    beta is four times the usual: with 0.05 the depths of the ks end closer together. Stage II labels the hazard that
    decides whether a loop runs with what that loop gained ("next"). The paper's label goes to the hazard one loop
    later and leaves the first hazard without any; the depth then hardly follows k. max_k is that of the task.
    """
    seq_len = max_k + 2
    learn = StageRecipe(
        name="fold" if num_loops > 1 else "fold one-loop twin",
        num_steps=num_steps,
        seq_len=seq_len,
        batch_tokens=BATCH_SIZE * seq_len,
        objective=ExpectedLossRecipe(beta=0.2),
        optimizer=OptimizerRecipe(lr=8e-3),
        schedule=ScheduleRecipe(warmup_steps=min(100, num_steps // 10), final_share=0.05),
        num_loops=num_loops,
    )
    if num_loops == 1:
        return (learn,)
    gate = StageRecipe(
        name="fold-gate",
        num_steps=gate_steps,
        seq_len=seq_len,
        batch_tokens=BATCH_SIZE * seq_len,
        objective=GateLossRecipe(label_shift="next"),
        optimizer=OptimizerRecipe(lr=2e-2, weight_decay=0.0),
        schedule=ScheduleRecipe(warmup_steps=min(10, gate_steps // 10)),
        num_loops=num_loops,
    )
    return learn, gate


def train_fold(
    task: FoldTask,
    config: LoopLMConfig,
    stages: Sequence[StageRecipe],
    telemetry: Telemetry,
    *,
    seed: int = 0,
    run_dir: Path | None = None,
) -> LoopLMForCausalLM:
    """Builds a model from `seed` and trains it through `stages` on one stream; returns it in eval mode, not frozen.

    Telemetry shows each stage as it runs. The global random state is left as it was.
    Raises UserError when a stage diverges.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LoopLMForCausalLM(config)
    batches = TaskStream(task, BATCH_SIZE, seed)
    for stage_index, stage in enumerate(stages):
        Trainer(model, stage, batches, telemetry, run_dir, seed=seed, stage_index=stage_index).run()
    return model.requires_grad_(True)
