"""Texts at several depths: those of the engine, whatever was interrupted."""

import pytest
import torch

from looplm.errors import UserError
from looplm.evaluation.kept_lines import KeptLines
from looplm.evaluation.sampled_texts import KEY, AskedText, check_samples, generate_missing, mean_loops
from looplm.inference import Engine, FixedDepth, QuantileExit, SamplingParams
from looplm.model.config import LoopedConfig
from looplm.model.looped import LoopedTransformer

EXITS = {"loops 1": FixedDepth(1), "loops 3": FixedDepth(3), "threshold 0.5": QuantileExit(0.5)}
GREEDY, SAMPLED = SamplingParams(max_tokens=5), SamplingParams(max_tokens=5, temperature=30.0)


@pytest.fixture(scope="module")
def engine():
    config = LoopedConfig(
        vocab_size=20, hidden_size=12, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=6, num_loops=2, max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    lm = torch.nn.Module()
    lm.model, lm.lm_head = LoopedTransformer(config), torch.nn.Linear(12, 20, bias=False)
    for parameter in lm.parameters():
        torch.nn.init.normal_(parameter)
    return Engine(lm.double(), native_kernels=False, pack_weights=False)


def asked(sampling):
    return [AskedText("a", [1, 2, 3], sampling), AskedText("b", [4], sampling)]


def quiet(_):
    pass


def test_texts_are_the_engines(engine, tmp_path):
    kept = KeptLines(tmp_path / "a.jsonl", KEY)
    generate_missing(engine, EXITS, asked(GREEDY), kept, say=quiet)
    assert len(kept.records) == 6
    for name, exit in EXITS.items():
        for one in asked(GREEDY):
            (result,) = engine.generate([one.token_ids], GREEDY, exit)
            record = kept.records[name, one.name, 0]
            assert record["num_tokens"] == len(result.loops)
            assert record["mean_loops"] == sum(result.loops) / len(result.loops)
    assert mean_loops([kept.records["loops 3", "a", 0], kept.records["loops 1", "a", 0]]) == 2
    assert mean_loops([]) is None


def test_an_interrupted_run_ends_as_a_straight_one(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "looplm.evaluation.sampled_texts.text_record",
        lambda result: {"text": result.token_ids, "num_tokens": 1, "mean_loops": 1.0},
    )
    straight, parts = KeptLines(tmp_path / "a.jsonl", KEY), KeptLines(tmp_path / "b.jsonl", KEY)
    generate_missing(engine, EXITS, asked(SAMPLED), straight, num_samples=3, seed=5, say=quiet)
    generate_missing(engine, {"loops 3": FixedDepth(3)}, asked(SAMPLED)[:1], parts, num_samples=2, seed=5, say=quiet)
    (tmp_path / "b.jsonl").write_bytes((tmp_path / "b.jsonl").read_bytes()[:-7])
    parts = KeptLines(tmp_path / "b.jsonl", KEY)
    assert len(parts.records) == 1
    generate_missing(engine, EXITS, asked(SAMPLED), parts, num_samples=3, seed=5, say=quiet)
    assert parts.records == straight.records
    assert len({str(straight.records["loops 3", "a", sample]["text"]) for sample in range(3)}) == 3
    calls: list[str] = []
    generate_missing(engine, EXITS, asked(SAMPLED), parts, num_samples=3, seed=5, say=calls.append)
    assert all("0 to write" in line for line in calls)


def test_a_prompt_that_does_not_fit_is_said_before_anything_is_written(engine, tmp_path):
    kept = KeptLines(tmp_path / "a.jsonl", KEY)
    several = [AskedText("a", [1] * 11, GREEDY), AskedText("b", [1] * 12, GREEDY)]
    with pytest.raises(UserError, match="b has 12 tokens"):
        generate_missing(engine, EXITS, several, kept, say=quiet)
    assert not kept.records
    generate_missing(engine, EXITS, several[:1], kept, say=quiet)


def test_a_prompt_that_breaks_the_model_has_no_text(engine, tmp_path):
    weight = engine.model.lm_head.weight
    kept, before = KeptLines(tmp_path / "a.jsonl", KEY), weight.data.clone()
    weight.data[0] = torch.nan
    try:
        generate_missing(engine, EXITS, asked(GREEDY), kept, say=quiet)
    finally:
        weight.data.copy_(before)
    record = kept.records["loops 1", "a", 0]
    assert record["text"] is None and record["error"] and mean_loops([record]) is None


def test_samples_that_would_be_the_same():
    check_samples(1, 0)
    check_samples(2, 0.5)
    with pytest.raises(UserError):
        check_samples(2, 0)
