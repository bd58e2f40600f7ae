"""Small records with random contents, and a tiny model to record."""

from collections.abc import Callable

import pytest
import torch

from looplm.evaluation.record import DepthRecord


@pytest.fixture
def random_record() -> Callable[..., DepthRecord]:
    """Builds a record of `num_documents` documents of a few windows each, all contents random."""

    def build(num_loops: int = 4, num_documents: int = 5, num_tokens: int = 80, **changes: object) -> DepthRecord:
        document_ids = torch.randint(num_documents, (num_tokens // 4,)).repeat_interleave(4)
        values: dict[str, object] = {
            "cross_entropy": torch.rand(num_loops, num_tokens) * 5,
            "predictions": torch.randint(3, (num_loops, num_tokens)),
            "gate_logits": torch.randn(num_loops, num_tokens),
            "targets": torch.randint(3, (num_tokens,)),
            "document_ids": document_ids,
            "sequence_ids": torch.arange(num_tokens // 4).repeat_interleave(4),
            "document_bytes": torch.randint(30, 60, (num_documents,)),
            "trained_loops": num_loops,
        }
        return DepthRecord(**(values | changes))  # type: ignore[arg-type]

    return build
