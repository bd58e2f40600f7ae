"""`looplm analyze` from files to pages."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from looplm.analysis.runs import RunPoint, write_runs
from looplm.cli.analyze import app
from looplm.errors import UserError
from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.hf.save import save_checkpoint
from looplm.model.config import LoopedConfig
from looplm.quickstart.shipped import shipped_directory


def run(out: Path, name: str, *arguments: Any) -> tuple[dict[str, Any], str]:
    """The numbers and the page that an analysis writes."""
    words = [name, *map(str, arguments), "--out", str(out)]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    page = (out / f"{name}.html").read_text(encoding="utf-8")
    check_page(page)
    return json.loads((out / f"{name}.json").read_text(encoding="utf-8")), page


def check_page(page: str) -> None:
    """Well-formed, self-contained, with a picture and a paragraph on how to read it."""
    open_tags: list[str] = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag, attrs):
            assert tag != "script"
            assert not any(value and value.startswith("http") for key, value in attrs if key in ("src", "href"))
            if tag not in ("meta", "use", "path", "rect", "image", "br", "circle"):
                open_tags.append(tag)

        def handle_startendtag(self, tag, attrs):
            pass

        def handle_endtag(self, tag):
            if tag not in ("meta", "use", "path", "rect", "image", "br", "circle"):
                assert open_tags.pop() == tag

    Checker().feed(page)
    assert not open_tags
    assert "<svg" in page
    reading = page.split("</h2>")[1].split("</p>")[0]
    assert len(reading) > 300


@pytest.fixture
def checkpoint(tmp_path):
    config = LoopedConfig(
        vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_loops=3, initializer_range=0.4,
    )  # fmt: skip
    save_checkpoint(LoopLMForCausalLM(LoopLMConfig.from_model_config(config)), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def prompts(tmp_path):
    """40 prompts of ids, each with an answer and a score."""
    drawn = torch.randint(23, (40, 5)).tolist()
    lines = [json.dumps({"input_ids": ids, "answer": ids[0], "score": float(i)}) for i, ids in enumerate(drawn)]
    (tmp_path / "asked.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path / "asked.jsonl"


def test_agreement(checkpoint, prompts, tmp_path):
    numbers, page = run(tmp_path / "out", "agreement", checkpoint, "--prompts", prompts, "--num-loops", 4)
    found = numbers["agreement"]
    assert [found["matrix"][i][i] for i in range(4)] == [40] * 4
    assert found["accuracy"] is not None
    assert sum(found["mean_exit_pdf"]) == pytest.approx(1.0)
    assert f"{found['matrix'][0][3]}</td>" in page


def test_probes(checkpoint, prompts, tmp_path):
    numbers, page = run(tmp_path / "out", "probes", checkpoint, "--prompts", prompts, "--num-folds", 2)
    found = numbers["probes"]
    assert len(found["grids"]) == 3
    assert [len(row) for row in found["grids"][0]["auc"]] == [2, 2, 2]
    assert "answer of loop 3" in page


def test_lens(checkpoint, tmp_path):
    numbers, page = run(tmp_path / "out", "lens", checkpoint, "--token-ids", "3,9,14", "--top", 2)
    readings = numbers["lens"]["readings"]
    assert len(readings) == 6
    assert all(len(row) == 2 for row in readings[0]["top_ids"])
    assert '<th scope="row">3, 2</th>' in page


def test_geometry(checkpoint, prompts, tmp_path):
    numbers, page = run(
        tmp_path / "out", "geometry", checkpoint, "--first", prompts, "--second", prompts, "--beyond", 6, "--joint"
    )
    found = numbers["geometry"]
    assert len(found["planes"]) == 3
    assert len(found["scores"]) == 80
    assert found["convergence"]["reference_loop"] == 6
    assert "The way to a fixed point" in page


def test_intervene(checkpoint, prompts, tmp_path):
    options = ("--count", 6, "--positions", "-1,-2")
    numbers, page = run(tmp_path / "out", "intervene", checkpoint, "--prompts", prompts, *options)
    replaced, noised = numbers["patches"]
    last = next(one for one in replaced["effects"] if (one["loop"], one["position"]) == (3, -1))
    assert last["moved"] == pytest.approx(1.0)
    assert last["flipped"] == 1.0
    assert noised["effects"][0]["moved"] is None
    assert len(numbers["schedules"]) == 6 and len(numbers["gates"]) == 2
    assert "running one less" in page


def test_scaling(tmp_path):
    points = [
        RunPoint(f"{size}-{depth}", size, tokens, depth,
                 tuple(2 + 50 / size**0.4 + 30 / tokens**0.4 + 0.5 / loop for loop in range(1, depth + 1)),
                 (1 / depth,) * depth, size // 2)
        for size in (1000, 3000, 9000) for depth in (2, 4) for tokens in (10_000, 30_000, 90_000)
    ]  # fmt: skip
    write_runs(points, tmp_path / "runs.csv")
    numbers, page = run(tmp_path / "out", "scaling", tmp_path / "runs.csv", "--no-offsets", "--resamples", 4)
    assert numbers["scaling"]["steps"]["4"]["parameters"]["gamma"]["value"] == pytest.approx(1.0, rel=0.02)
    assert numbers["scaling"]["parcae"]["formula"].startswith("E + A/(unrolled")
    assert "Not identified" in page


def test_questions_in_words(tmp_path):
    """The shipped checkpoint, whose tokenizer finds labels and splits text."""
    pairs = tmp_path / "pairs.csv"
    rows = [f"What is {i}?,Which is {i}?,{i % 2}" for i in range(6)]
    pairs.write_text("question1,question2,is_duplicate\n" + "\n".join(rows) + "\n", encoding="utf-8")
    shipped = shipped_directory()
    numbers, page = run(tmp_path / "out", "agreement", shipped, "--pairs", pairs, "--count", 4)
    assert numbers["agreement"]["labels"] == ["yes", "no"]
    assert numbers["agreement"]["num_prompts"] == 4
    numbers, page = run(tmp_path / "out", "lens", shipped, "--prompt", "def $x$ <b>:")
    assert "&lt;" in page and "<b>" not in page.split("<main>")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("agreement", "MODEL"), "one of --prompts"),
        (("agreement", "MODEL", "--prompts", "ASKED", "--labels", "a,b"), "no tokenizer"),
        (("agreement", "MODEL", "--generator", "looplm.lab.mano:documents", "--arguments", "[]"), "JSON object"),
        (("lens", "MODEL"), "--prompt"),
        (("lens", "MODEL", "--prompt", "x"), "no tokenizer"),
        (("lens", "MODEL", "--token-ids", "99"), "outside the vocabulary"),
        (("lens", "MODEL", "--token-ids", "a"), "outside the vocabulary"),
        (("intervene", "MODEL", "--prompts", "ASKED", "--positions", "x"), "--positions"),
        (("probes", "MODEL", "--prompts", "ASKED", "--reason", "4"), "--labels"),
        (("scaling", "NOWHERE"), "cannot be read"),
    ],
)
def test_user_errors(checkpoint, prompts, tmp_path, arguments, message):
    names = {"MODEL": str(checkpoint), "ASKED": str(prompts), "NOWHERE": str(tmp_path / "nowhere.csv")}
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, [names.get(word, word) for word in arguments], catch_exceptions=False)


def test_answers_after_reasoning(tmp_path):
    """What the shipped checkpoint writes comes to "future" or to "remove", and its state before says which."""
    texts = ["class A:\n    def f(self):\n        ", " if x is None:\n            raise "] * 3
    asked = tmp_path / "asked.jsonl"
    asked.write_text("\n".join(json.dumps({"prompt": text}) for text in texts) + "\n", encoding="utf-8")
    options = ("--labels", "future,remove", "--reason", 12, "--num-folds", 2, "--no-layers")
    numbers, page = run(tmp_path / "out", "probes", shipped_directory(), "--prompts", asked, *options)
    assert numbers["undecided"] + numbers["probes"]["num_prompts"] == 6
    (grid,) = numbers["probes"]["grids"]
    assert grid["target"] == "answer after reasoning"
    assert grid["auc"] == [[1.0]] * 4  # equal prompts come to equal answers
