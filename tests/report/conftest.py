"""A report of synthetic but plausible numbers, made by the code that makes real ones."""

import pytest
import torch

from looplm.evaluation.exit_curve import gate_statistics
from looplm.evaluation.groups import accuracy_by_group
from looplm.evaluation.record import DepthRecord
from looplm.lab.task_evaluation import TaskExit
from looplm.model.config import LoopedConfig
from looplm.report.assemble import text_model, twin_model
from looplm.report.schema import (
    Command,
    FoldModel,
    Machine,
    Phase,
    QuickstartReport,
    Sample,
    SampleToken,
    TextModel,
    TrainingPoint,
)

CONFIG = LoopedConfig(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)


def synthetic_record(loop_loss: tuple[float, ...], trained_loops: int, skill: float, seed: int = 0) -> DepthRecord:
    """Tokens that differ in difficulty; hard ones gain from depth, and the gate sees it as far as `skill` goes."""
    generator = torch.Generator().manual_seed(seed)
    num_documents, per_document = 18, 300
    num_tokens, num_loops = num_documents * per_document, len(loop_loss)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    document_ids = torch.arange(num_documents).repeat_interleave(per_document)
    hard = torch.rand(num_tokens, generator=generator) < 0.4
    level = 1 + 0.15 * noise(num_documents)[document_ids]
    change = torch.tensor(loop_loss)[:, None] - loop_loss[0]
    loss = (loop_loss[0] + change * torch.where(hard, 2.4, 0.06)) * level + 0.2 * noise(num_loops, num_tokens).abs()
    targets = torch.randint(1024, (num_tokens,), generator=generator)
    right = torch.rand(num_loops, num_tokens, generator=generator) < 0.5 - 0.1 * change.clamp(-1, 1)
    return DepthRecord(
        cross_entropy=loss,
        predictions=torch.where(right, targets, (targets + 1) % 1024),
        gate_logits=-0.6 + skill * torch.where(hard, -1.0, 1.0) + 0.7 * noise(num_loops, num_tokens),
        targets=targets,
        document_ids=document_ids,
        sequence_ids=torch.arange(num_tokens // 100).repeat_interleave(100),
        document_bytes=torch.full((num_documents,), round(per_document * 2.78)),
        trained_loops=trained_loops,
    )


def synthetic_training(num_loops: int, num_points: int = 400) -> tuple[TrainingPoint, ...]:
    """Losses that fall from ln V, an exit distribution that drifts from early to late."""
    points = []
    for i in range(num_points):
        progress = 1 - torch.exp(torch.tensor(-3.0 * i / num_points)).item()
        wobble = 0.05 * torch.sin(torch.tensor(i * 1.7)).item()
        loss = tuple(6.9 - progress * (3.2 + 0.06 * loop) + wobble for loop in range(num_loops))
        pdf = torch.softmax(torch.arange(num_loops) * (progress - 0.6), 0).tolist()
        points.append(TrainingPoint(step=10 * i, loss_nats=loss, exit_pdf=tuple(pdf)))
    return tuple(points)


SAMPLE_TEXT = (
    "\n",
    "    ",
    '"""',
    "Return",
    " a",
    " <",
    "b",
    ">",
    " & ",
    "x",
    ".",
    '"""',
    "\n",
    "    ",
    "if",
    " x",
    "\u00e9",
)


def synthetic_model(name: str, skill: float, with_twin: bool) -> TextModel:
    record = synthetic_record((3.70, 3.55, 3.50, 3.51, 3.56, 3.66, 3.80, 3.98), 4, skill)
    twin = None
    if with_twin:
        twin = twin_model(
            config=CONFIG,
            record=synthetic_record((3.52,), 1, 0.0),
            looped_record=record,
            training_tokens=1_600_000,
            training_seconds=60.0,
        )
    loops = [4, 1, 2, 3, 1, 1, 2, 2, 3, 4, 1, 2, 3, 1, 4, 2, 3]
    tokens = tuple(
        SampleToken(text=text, exit_loops=loop, token_loops=4) for text, loop in zip(SAMPLE_TEXT, loops, strict=True)
    )
    return text_model(
        name=name,
        description="A model of the standard library's text.",
        config=CONFIG,
        record=record,
        stage_one_gate=gate_statistics(synthetic_record((3.7, 3.55, 3.5, 3.51), 4, 0.1)),
        training_tokens=1_600_000,
        training_seconds=215.0,
        training=synthetic_training(4) if with_twin else (),
        twin=twin,
        sample=Sample(
            prompt="def load(path: str) -> dict[str, <T>]:",
            exit_threshold=0.5,
            tokens=tokens,
            weight_passes=sum(loops),
        ),
    )


@pytest.fixture(scope="session")
def report() -> QuickstartReport:
    """A whole report; session-wide, since it is immutable."""
    fold_record = synthetic_record((0.9, 0.5, 0.2, 0.1, 0.1, 0.15), 4, 0.5)
    fold = FoldModel(
        description="One layer, four loops.",
        num_parameters=54_321,
        training_steps=2600,
        training_seconds=110.0,
        trained_loops=4,
        groups=accuracy_by_group(fold_record, torch.arange(fold_record.num_tokens) % 4 + 1),
        gate=gate_statistics(fold_record),
        exits=(
            TaskExit(threshold=0.5, accuracy=(1.0, 0.98, 0.97, 0.91), mean_loops=(1.9, 2.1, 3.0, 4.0)),
            TaskExit(threshold=0.9, accuracy=(1.0, 0.99, 0.98, 0.95), mean_loops=(3.9, 4.0, 4.0, 4.0)),
        ),
        twin_accuracy=(1.0, 0.28, 0.32, 0.34),
        training=synthetic_training(4),
    )
    return QuickstartReport(
        shipped=synthetic_model("Shipped checkpoint", 1.2, with_twin=False),
        trained=synthetic_model("Model trained just now", 0.4, with_twin=True),
        fold=fold,
        machine=Machine(
            looplm_version="0.1.0",
            torch_version="2.13.0",
            python_version="3.11.7",
            platform="Linux x86_64",
            num_threads=2,
        ),
        phases=(Phase(name="Text and tokenizer", seconds=11.0), Phase(name="Stage I", seconds=215.0)),
        next_commands=(
            Command(command="looplm generate runs/quickstart --prompt 'def '", explanation="Write more & faster."),
            Command(command="looplm info runs/quickstart", explanation="Its cost."),
            Command(command="looplm quickstart --out other", explanation="Again."),
        ),
    )
