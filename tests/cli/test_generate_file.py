"""`looplm generate` on files of prompts: answered, interrupted, gone on with, and what it refuses."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from looplm.hf.load import load, load_tokenizer
from looplm.hf.save import save_checkpoint
from looplm.inference import Engine, QuantileExit, SamplingParams


def read_answers(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_file_of_prompts_is_answered(checkpoint, prompts, tmp_path, run):
    output = tmp_path / "answers.jsonl"
    options = ["--max-tokens", 9, "--exit-threshold", 0.4, "--temperature", 0.7, "--seed", 3]
    status, out, err = run(checkpoint, "--input", prompts, "--output", output, *options)
    assert (status, err) == (0, "") and "5 answers" in out
    answers = read_answers(output)
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3, 4]
    engine = Engine(load(checkpoint), load_tokenizer(checkpoint))
    for index, (answer, line) in enumerate(
        zip(answers, prompts.read_text(encoding="utf-8").splitlines(), strict=True)
    ):
        assert answer["prompt"] == json.loads(line)["prompt"]
        params = SamplingParams(max_tokens=9, temperature=0.7, seed=3 + index)
        (expected,) = engine.generate([answer["prompt"]], params, QuantileExit(0.4))
        assert answer["text"] == expected.text and answer["loops"] == expected.loops
        assert answer["token_loops"] == expected.token_loops and answer["token_ids"] == expected.token_ids


@pytest.mark.parametrize("cut", [0, 5, 180])
def test_an_interrupted_run_goes_on(cut, checkpoint, prompts, tmp_path, run):
    """Killed after two answers and some bytes of the third; the rest is the same as without interruption."""
    whole, output = tmp_path / "whole.jsonl", tmp_path / "answers.jsonl"
    options = ["--max-tokens", 9, "--exit-threshold", 0.4, "--temperature", 0.7, "--seed", 3]
    run(checkpoint, "--input", prompts, "--output", whole, *options)
    lines = whole.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:2]) + lines[2][:cut])
    status, out, _ = run(checkpoint, "--input", prompts, "--output", output, *options)
    assert status == 0 and "2 of 5 prompts are answered already" in out
    assert output.read_bytes() == whole.read_bytes()
    status, out, _ = run(checkpoint, "--input", prompts, "--output", output, *options)
    assert status == 0 and "5 of 5" in out
    assert output.read_bytes() == whole.read_bytes()


def test_a_line_cut_inside_a_character_is_made_anew(checkpoint, prompts, tmp_path, run):
    output = tmp_path / "answers.jsonl"
    output.write_bytes('{"index": 0, "prompt": "ç'.encode()[:-1])
    status, _, _ = run(checkpoint, "--input", prompts, "--output", output, "--max-tokens", 2)
    assert status == 0 and len(read_answers(output)) == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"my notes, without an end of line", "line 1: is no answer"),
        (b'{\n  "mine": 1\n}', "line 1: not valid JSON"),
        (b'{"mine": 1}', "line 1: answers another prompt"),
        (b'{"index": 0, "mine": 1}', "line 1: answers another prompt"),
        (b'{"mine": 1}\n{"index": 0', "line 1: answers another prompt"),
        (b"[1, 2]", "line 1: is no answer"),
        (b"mine\n" + b"\xff" * 9, "line 1: not valid JSON"),
        (b"\n", "line 1: not valid JSON"),
    ],
)
def test_a_file_of_something_else_is_left_as_it_is(content, message, checkpoint, prompts, tmp_path, run):
    output = tmp_path / "mine.txt"
    output.write_bytes(content)
    status, out, err = run(checkpoint, "--input", prompts, "--output", output, "--max-tokens", 2)
    assert (status, out) == (2, "") and message in err
    assert output.read_bytes() == content


def test_a_file_under_answers_with_other_options_keeps_its_cut_line(checkpoint, prompts, tmp_path, run):
    output = tmp_path / "answers.jsonl"
    run(checkpoint, "--input", prompts, "--output", output, "--max-tokens", 2)
    content = output.read_bytes()[:-9]
    output.write_bytes(content)
    status, _, err = run(checkpoint, "--input", prompts, "--output", output, "--max-tokens", 3)
    assert status == 2 and "max_tokens 2" in err
    assert output.read_bytes() == content


@pytest.mark.parametrize("link", [False, True])
def test_the_input_is_not_written_over(link, checkpoint, prompts, tmp_path, run):
    content, output = prompts.read_bytes(), prompts
    if link:
        output = tmp_path / "link"
        output.symlink_to(prompts)
    status, out, err = run(checkpoint, "--input", prompts, "--output", output)
    assert (status, out) == (2, "") and "are the same file" in err
    assert prompts.read_bytes() == content


def test_answers_go_to_a_regular_file(prompts, tmp_path, run):
    os.mkfifo(tmp_path / "pipe")
    for output in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        status, out, err = run("no-such-model", "--input", prompts, "--output", output)
        assert (status, out) == (2, "") and "no regular file" in err


@pytest.mark.parametrize("option", [["--dtype", "bf16"], ["--dtype", "float64"]])
def test_another_dtype_does_not_mix_with_earlier_answers(option, checkpoint, prompts, tmp_path, run):
    output = tmp_path / "answers.jsonl"
    run(checkpoint, "--input", prompts, "--output", output, "--max-tokens", 2)
    assert read_answers(output)[0]["settings"]["device"] == "cpu"
    status, _, err = run(checkpoint, "--input", prompts, "--output", output, "--max-tokens", 2, *option)
    assert status == 2 and "other options (dtype None)" in err


def test_other_options_do_not_mix_with_earlier_answers(checkpoint, prompts, tmp_path, run):
    output = tmp_path / "answers.jsonl"
    run(checkpoint, "--input", prompts, "--output", output, "--max-tokens", 2)
    before = output.read_bytes()
    status, _, err = run(checkpoint, "--input", prompts, "--output", output, "--max-tokens", 3)
    assert status == 2 and "line 1: was made with other options" in err
    prompts.write_text('{"prompt": "something else"}\n', encoding="utf-8")
    status, _, err = run(checkpoint, "--input", prompts, "--output", output, "--max-tokens", 2)
    assert status == 2 and "line 1: answers another prompt" in err
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"  \n\n", "is empty"),
        (b'{"prompt": "a"}\n{"prompt": \n', "line 2: not valid JSON"),
        (b'{"prompt": "a"}\n\n{"prompt": "b"}\n', "line 2: not valid JSON"),
        (b'{"prompt": "a"}\n["b"]\n', "line 2: holds a list"),
        (b'{"prompt": "a"}\n{"text": "b"}\n', 'line 2: "prompt" is None'),
        (b'{"prompt": ""}\n', "line 1: \"prompt\" is ''"),
        (b'{"prompt": 3}\n', 'line 1: "prompt" is 3'),
        (b'{"prompt": ["a"]}\n', 'line 1: "prompt" is a list'),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2: the text is not UTF-8"),
        (b'{"prompt": "a"}\n{"prompt": "\\ud800"}\n', 'line 2: "prompt" is not valid Unicode text'),
        (b'{"prompt": "a"}\n' + b'{"prompt":' * 100_000, "line 2: the JSON is nested too deeply"),
        (b'{"prompt": "a"}\n{"prompt": ' + b"9" * 5000 + b"}\n", "line 2: the JSON cannot be read"),
    ],
)
def test_a_bad_line_is_named(content, message, checkpoint, tmp_path, run):
    (tmp_path / "prompts.jsonl").write_bytes(content)
    output = tmp_path / "answers.jsonl"
    status, out, err = run(checkpoint, "--input", tmp_path / "prompts.jsonl", "--output", output, "--max-tokens", 2)
    assert (status, out) == (2, "")
    assert message in err
    assert not output.exists() or output.read_bytes() == b""


def test_a_prompt_that_is_too_long_has_no_answer_and_the_others_do(checkpoint, tmp_path, run):
    (tmp_path / "prompts.jsonl").write_bytes(
        b'{"prompt": "a"}\n{"prompt": "' + b"xyz" * 40 + b'"}\n{"prompt": "b"}\n{"prompt": "' + b"x" * 99 + b'"}\n'
    )
    output = tmp_path / "answers.jsonl"
    for _ in range(2):
        status, _, err = run(checkpoint, "--input", tmp_path / "prompts.jsonl", "--output", output, "--max-tokens", 2)
        assert status == 2 and "line 2, 4: no answer. The prompt has 120 tokens" in err
        assert [answer["index"] for answer in read_answers(output)] == [0, 2]
    status, out, err = run(checkpoint, "--prompt", "xyz" * 40, "--max-tokens", 2)
    assert (status, out) == (2, "") and "The prompt has 120 tokens" in err


def test_killed_it_goes_on_where_it_was(checkpoint, tmp_path, run):
    """A process of its own, killed with nothing to clean up after it; what it has written is kept and continued."""
    texts = [f"the cat {i}" for i in range(150)]
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    options = ["--max-tokens", 9, "--temperature", 1, "--seed", 5]
    arguments = [checkpoint, "--input", prompts, "--output", output, *options]
    process = subprocess.Popen([sys.executable, "-m", "looplm", "generate", *map(str, arguments)])
    try:
        while not output.exists() or not output.stat().st_size:
            assert process.poll() is None, "it had finished before it could be killed"
            time.sleep(0.002)
    finally:
        process.kill()
        process.wait()
    done = output.read_bytes().count(b"\n")
    assert 0 <= done < 150
    status, out, _ = run(*arguments)
    assert status == 0 and (not done or f"{done} of 150 prompts are answered already" in out)
    answers = read_answers(output)
    assert [answer["index"] for answer in answers] == list(range(150))
    alone = Engine(load(checkpoint), load_tokenizer(checkpoint))
    for index in (0, 75, 149):
        params = SamplingParams(max_tokens=9, temperature=1, seed=5 + index)
        (expected,) = alone.generate([texts[index]], params)
        assert answers[index]["token_ids"] == expected.token_ids


def test_a_missing_input_or_an_unwritable_output_is_said_before_the_model_is_loaded(prompts, tmp_path, run):
    status, _, err = run("no-such-model", "--input", tmp_path / "none.jsonl", "--output", tmp_path / "a.jsonl")
    assert status == 2 and "none.jsonl cannot be read" in err
    status, _, err = run("no-such-model", "--input", prompts, "--output", tmp_path / "no" / "a.jsonl")
    assert status == 2 and "cannot be written" in err
    status, _, err = run("no-such-model", "--input", prompts, "--output", tmp_path)
    assert status == 2 and "cannot be written" in err


def test_show_depth_is_for_one_prompt(checkpoint, prompts, tmp_path, run):
    status, _, err = run(checkpoint, "--input", prompts, "--output", tmp_path / "a.jsonl", "--show-depth")
    assert status == 2 and "--show-depth" in err


def test_a_prompt_the_model_breaks_on_has_no_answer_and_the_others_do(checkpoint, prompts, tmp_path, run):
    """Only line 4 has the token that embeds to NaN; run again, it is still not done."""
    model, tokenizer = load(checkpoint), load_tokenizer(checkpoint)
    model.model.embed_tokens.weight.data[tokenizer.encode("ça 🙂")[0]] = torch.nan
    broken = save_checkpoint(model, tmp_path / "broken", tokenizer)
    output = tmp_path / "answers.jsonl"
    for _ in range(2):
        status, _, err = run(broken, "--input", prompts, "--output", output, "--max-tokens", 1)
        assert status == 2 and "prompts.jsonl, line 4: no answer. The model gave logits that are not finite" in err
        assert [answer["index"] for answer in read_answers(output)] == [0, 1, 2, 4]
