"""What the lab's tests of studies share: a study of its own, with a tiny base recipe of text."""

from pathlib import Path

import pytest

BASE = """\
name: tiny
model:
  kind: new
  architecture: {hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2,
                 num_key_value_heads: 2, head_dim: 8, num_loops: 2, tie_word_embeddings: true}
tokenizer: {kind: train, vocab_size: 280}
stages:
  - name: train
    num_steps: 4
    seq_len: 16
    batch_tokens: 32
    objective: {kind: expected_loss, beta: 0.1}
    optimizer: {lr: 1e-2}
    log_every: 1
    data: {sources: [{kind: files, paths: [text.txt]}]}
telemetry: {tensorboard: false}
"""

STUDY = """\
title: A study
question: Does it run?
grid:
  lr: {key: stages.0.optimizer.lr, values: [1e-2, 1e-3]}
  depth:
    shallow: model.architecture.num_loops=1
    deep: [model.architecture.num_loops=4, stages.0.objective.beta=0.2]
table: [train_loss]
plot: [{figure: train_loss, against: lr}]
presets:
  small: {base: base.yaml, overrides: [stages.0.num_steps=3], seeds: 2, time: seconds}
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The file of a study with two learning rates and two depths."""
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "own.yaml").write_text(STUDY)
    return tmp_path / "own.yaml"


@pytest.fixture
def study(own: Path) -> Path:
    """The same with one learning rate, text to train on and something to measure."""
    base, text = own.with_name("base.yaml"), own.with_name("text.txt")
    text.write_text("\n".join(f"one word and {i % 7} more, {i % 3}" for i in range(300)))
    base.write_text(
        base.read_text().replace("text.txt", str(text))
        + "checkpoints: {every: 1, asynchronous: false}\n"
        + f"evaluation: {{every: 2, max_tokens: 300, data: {{sources: [{{kind: files, paths: [{text}]}}]}}}}\n"
    )
    own.write_text(own.read_text().replace("values: [1e-2, 1e-3]", "values: [1e-2]"))
    return own
