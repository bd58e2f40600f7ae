"""`looplm analyze` from files to pages."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from looplm.analysis.runs import RunPoint, write_runs
from looplm.cli.analyze import app
from looplm.cli.analyze_inputs import generator_prompts
from looplm.errors import UserError
from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.hf.save import save_checkpoint
from looplm.lab.fold import FoldTask
from looplm.model.config import LoopedConfig
from looplm.quickstart.shipped import shipped_directory

FOLD = ("--generator", "looplm.lab.fold:documents", "--arguments", '{"max_k": 3, "seed": 5}')


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


def saved(folder: Path, num_layers: int, num_loops: int) -> Path:
    config = LoopedConfig(
        vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=num_layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_loops=num_loops, initializer_range=0.4,
    )  # fmt: skip
    save_checkpoint(LoopLMForCausalLM(LoopLMConfig.from_model_config(config)), folder)
    return folder


@pytest.fixture
def checkpoint(tmp_path):
    return saved(tmp_path / "model", 2, 3)


@pytest.fixture
def dense(tmp_path):
    return saved(tmp_path / "dense", 4, 1)


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
    assert [grid["target"] for grid in found["grids"]][2:] == ["answer of loop 3", "right answer"]
    # Prompts are drawn at random, so their last tokens tell nothing about the first, which is the right answer.
    assert 0.2 < found["grids"][3]["token_auc"] < 0.8
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


def test_intervene_with_states_of_another_loop(checkpoint, prompts, tmp_path):
    options = ("--count", 4, "--positions", "all", "--from-loop", 2, "--noise", 0)
    numbers, page = run(tmp_path / "out", "intervene", checkpoint, "--prompts", prompts, *options)
    _, own = numbers["patches"]
    assert own["kind"] == "own state of loop 2"
    assert {one["position"] for one in own["effects"]} == {-1, -2, -3, -4, -5}
    # Put back where it was, it changes nothing; at another loop it does.
    shifts = {one["loop"]: one["shift"] for one in own["effects"] if one["position"] == -1}
    assert shifts[2] == 0.0 < min(shifts[1], shifts[3])
    assert "Own state of loop 2" in page


def test_a_task_is_asked_what_it_holds_out():
    task = FoldTask(max_k=3, seed=5)
    asked = generator_prompts(FOLD[1], {"max_k": 3, "seed": 5}, None, 20, 1)
    assert [one.level for one in asked] == [1] * 6 + [2] * 6 + [3] * 6
    for one in asked:
        digits = torch.tensor([one.token_ids])
        assert one.answer == task.fold(digits).item()
        assert one.level == 1 or task.held_out(digits).item()
    assert [one.level for one in generator_prompts(FOLD[1], {"max_k": 3}, [4, 2], 4, 0)] == [4, 4, 2, 2]


def test_levels_of_a_task(checkpoint, tmp_path):
    numbers, page = run(tmp_path / "out", "agreement", checkpoint, *FOLD, "--count", 30, "--levels", "2,3")
    assert [(one["level"], one["num_prompts"]) for one in numbers["by_level"]] == [(2, 15), (3, 15)]
    assert "By level" in page
    numbers, page = run(tmp_path / "out", "lens", checkpoint, *FOLD, "--count", 6)
    assert [(one["level"], one["loop"], one["layer"]) for one in numbers["levels"]] == [
        (level, loop, layer) for level in (1, 2, 3) for loop in (1, 2, 3) for layer in (1, 2)
    ]
    assert "Where does the answer appear?" in page


def test_layers_taken_for_loops(dense, prompts, tmp_path):
    """Every analysis on a dense model whose four layers are two loops."""
    common = (dense, "--layers-per-loop", 2)
    numbers, page = run(tmp_path / "out", "agreement", *common, "--prompts", prompts)
    assert len(numbers["agreement"]["matrix"]) == 2 and not numbers["agreement"]["mean_exit_pdf"]
    assert "2 times 2 layers taken for loops" in page
    numbers, _ = run(tmp_path / "out", "intervene", *common, "--prompts", prompts, "--count", 4)
    assert not numbers["gates"] and [one["change"] for one in numbers["schedules"]][0] == "skip 1"
    assert "running one less" not in page
    numbers, _ = run(tmp_path / "out", "geometry", *common, "--first", prompts, "--second", prompts)
    assert len(numbers["geometry"]["planes"]) == 2 and numbers["geometry"]["convergence"] is None


def test_options_that_are_shared_are_read_alike():
    options = {command.name: {option.name: option for option in command.params} for command in commands()}
    for name in ("agreement", "probes", "lens", "intervene"):
        assert {"checkpoint", "prompts", "generator", "levels", "labels", "seed", "out"} <= options[name].keys()
        assert options[name]["arguments"].default == "{}"
    assert options["geometry"].keys() >= {"checkpoint", "first", "layers_per_loop"}
    assert "prompts" not in options["geometry"]


def commands() -> list[Any]:
    return list(get_command(app).commands.values())  # type: ignore[attr-defined]


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
        (("agreement", "MODEL", "--prompts", "ASKED", "--levels", "1"), "--levels chooses"),
        (("agreement", "MODEL", *FOLD, "--levels", "a"), "--levels is 'a'"),
        (("agreement", "MODEL", *FOLD, "--count", "2"), "fewer than the 3 levels"),
        (("agreement", "MODEL", "--generator", "looplm.lab.fold:documents", "--arguments", '{"k": 1}'), "arguments"),
        (("agreement", "MODEL", "--generator", "looplm.lab.capo:documents", "--levels", "1"), "no task of the lab"),
        (("agreement", "MODEL", "--prompts", "ASKED", "--layers-per-loop", "1"), "loops of its own"),
        (("intervene", "MODEL", "--prompts", "ASKED", "--from-loop", "4"), "--from-loop is 4"),
        (("lens", "MODEL"), "one of --prompts"),
        (("lens", "MODEL", "--prompt", "x", "--token-ids", "1"), "--prompt, or"),
        (("lens", "MODEL", "--prompt", "x"), "no tokenizer"),
        (("lens", "MODEL", "--token-ids", "99"), "outside the vocabulary"),
        (("lens", "MODEL", "--token-ids", "a"), "--token-ids is 'a'"),
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
    assert numbers["cut_off"] == numbers["probes"]["num_prompts"]  # none comes to an end in 12 tokens
    assert "were cut off after 12 tokens" in page
    (grid,) = numbers["probes"]["grids"]
    assert grid["target"] == "answer after reasoning"
    assert grid["auc"] == [[1.0]] * 4  # equal prompts come to equal answers
