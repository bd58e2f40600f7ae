"""`looplm generate`: text, depth on show, files of prompts, and what it refuses."""

import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer

from looplm.cli import main as cli
from looplm.cli.generate import SHIPPED, generate
from looplm.data.tokenizer import train_tokenizer
from looplm.hf.config import LoopLMConfig
from looplm.hf.load import load, load_tokenizer
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.hf.save import save_checkpoint
from looplm.inference import ConfidenceExit, Engine, FixedDepth, HiddenDiffExit, QuantileExit, SamplingParams

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A random model with a trained tokenizer, context 64, whose gate mixes depths."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["the cat sat on the mat. " * 20], 280)
    config = LoopLMConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_loops=3,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    return save_checkpoint(LoopLMForCausalLM(config), tmp_path_factory.mktemp("models") / "tiny", tokenizer)


@pytest.fixture
def run(monkeypatch, capsys) -> Run:
    """Runs `looplm generate ARGUMENTS`; returns exit status, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        app = typer.Typer(pretty_exceptions_enable=False)
        app.command()(generate)
        monkeypatch.setattr(cli, "app", app)
        monkeypatch.setattr(sys, "argv", ["looplm", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def prompts(tmp_path) -> Path:
    """Five prompts in a file."""
    path = tmp_path / "prompts.jsonl"
    texts = ["the cat", "the mat", "on", "ça 🙂", "the cat sat on the mat."]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def read_answers(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- One prompt -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        (["--exit-threshold", 0.4], QuantileExit(0.4)),
        (["--num-loops", 2], FixedDepth(2)),
        ([], FixedDepth(3)),  # nothing is saved in this checkpoint
    ],
)
def test_prompt_and_continuation_are_printed(options, policy, checkpoint, run):
    engine = Engine(load(checkpoint), load_tokenizer(checkpoint))
    (expected,) = engine.generate(["the cat"], SamplingParams(max_tokens=9), policy)
    status, out, err = run(checkpoint, "--prompt", "the cat", "--max-tokens", 9, *options)
    assert (status, out, err) == (0, f"the cat{expected.text}\n", "")


@pytest.mark.parametrize(
    ("options", "policy", "kv_cache"),
    [
        (["--exit", "hidden-diff:2.5"], HiddenDiffExit(2.5), "per_loop"),
        (["--exit", "kl:0.5", "--kv-cache", "last"], ConfidenceExit(kl=0.5), "last"),
        (["--exit", "stable:1", "--kv-cache", "fill"], ConfidenceExit(stable_loops=1), "fill"),
        (["--num-loops", 3, "--draft-loops", 1, "--draft-tokens", 2], FixedDepth(3), "per_loop"),
    ],
)
def test_exits_and_caches_reach_the_engine(options, policy, kv_cache, checkpoint, run):
    engine = Engine(load(checkpoint), load_tokenizer(checkpoint), kv_cache=kv_cache)
    (expected,) = engine.generate(["the cat"], SamplingParams(max_tokens=9), policy)
    status, out, err = run(checkpoint, "--prompt", "the cat", "--max-tokens", 9, *options)
    assert (status, out, err) == (0, f"the cat{expected.text}\n", "")


def test_interactive_texts_are_those_of_single_prompts(checkpoint, run, monkeypatch):
    """Prompts come from standard input; one that is wrong is said, and the next is answered."""
    engine = Engine(load(checkpoint), load_tokenizer(checkpoint))
    texts = [r.text for r in engine.generate(["the cat", "the mat"], SamplingParams(max_tokens=9), FixedDepth(2))]
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n\n" + "the cat " * 80 + "\nthe mat\n"))
    status, out, err = run(checkpoint, "--interactive", "--max-tokens", 9, "--num-loops", 2)
    assert status == 0
    assert out == "".join(f"{text}\n" for text in texts)
    assert "more than the 64 positions" in err


def test_drafts_are_counted_beside_the_work(checkpoint, run):
    options = ["--max-tokens", 12, "--num-loops", 3, "--draft-loops", 1, "--show-depth"]
    status, out, _ = run(checkpoint, "--prompt", "the cat", *options)
    assert status == 0 and "drafts stood" in out


def test_sampling_options_reach_the_engine(checkpoint, run):
    engine = Engine(load(checkpoint, dtype="bfloat16"), load_tokenizer(checkpoint))
    params = SamplingParams(max_tokens=9, temperature=0.9, top_p=0.8, seed=4)
    (expected,) = engine.generate(["the cat"], params, QuantileExit(0.4))
    options = "--max-tokens 9 --temperature 0.9 --top-p 0.8 --seed 4 --exit-threshold 0.4 --dtype bf16 --device cpu"
    assert run(checkpoint, "--prompt", "the cat", *options.split()) == (0, f"the cat{expected.text}\n", "")


def test_more_loops_than_trained_are_allowed_with_a_warning(checkpoint, run):
    status, out, err = run(checkpoint, "--prompt", "the cat", "--num-loops", 5, "--max-tokens", 2)
    assert status == 0 and out.startswith("the cat")
    assert "5 loops are more than the 3" in err


def test_show_depth_marks_tokens_and_counts_the_work(checkpoint, run):
    engine = Engine(load(checkpoint), load_tokenizer(checkpoint))
    (result,) = engine.generate(["the cat"], SamplingParams(max_tokens=20), QuantileExit(0.4))
    assert len(set(result.loops)) == 3
    status, out, _ = run(
        checkpoint, "--prompt", "the cat", "--max-tokens", 20, "--exit-threshold", 0.4, "--show-depth"
    )
    assert status == 0
    text, legend_and_table = out.split("left at")
    # Written to a file there are no colours, so each token is followed by its loop.
    assert [character for character in text if character in "¹²³"] == ["¹²³"[loop - 1] for loop in result.loops]
    share = result.loops.count(2) / 20
    assert f"loop 2 ² {share:.0%}" in legend_and_table
    lines = [line.split() for line in legend_and_table.splitlines()]
    stats = engine.stats
    assert ["this", "text", f"{stats.mean_loops:.2f}", f"{stats.weight_passes}", f"{stats.token_loops}"] in lines
    assert ["all", "3", "loops", "3.00", "57", "57"] in lines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-loops", "0"], "depth counts loops from 1"),
        (["--num-loops", "-3"], "depth counts loops from 1"),
        (["--num-loops", "2.5"], "--num-loops"),
        (["--exit-threshold", "-1"], "exit threshold is -1.0"),
        (["--exit-threshold", "nan"], "exit threshold is nan"),
        (["--exit-threshold", "inf"], "exit threshold is inf"),
        (["--exit-threshold", "abc"], "--exit-threshold"),
        (["--num-loops", str(10**15), "--max-tokens", "9"], "GiB"),
        (["--num-loops", str(10**30), "--max-tokens", "9"], "GiB"),
        (["--num-loops", "2", "--exit-threshold", "0.5"], "give one of them"),
        (["--num-loops", "2", "--exit", "kl:0.1"], "give one of them"),
        (["--exit", "hidden-diff"], "give hidden-diff:EPS"),
        (["--exit", "hidden-diff:-1"], "eps of HiddenDiffExit is -1.0"),
        (["--exit", "stable:1.5"], "give hidden-diff:EPS"),
        (["--exit", "oracle:1"], "give hidden-diff:EPS"),
        (["--kv-cache", "latest"], "--kv-cache is 'latest'; choose one of per_loop, fill, last, mean, first"),
        (["--kv-cache", "last", "--draft-loops", "1"], "needs --kv-cache per_loop"),
        (["--draft-tokens", "2"], "give both"),
        (["--draft-loops", "0"], "draft_loops is 0"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0.0"),
        (["--interactive"], "either --prompt"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--max-tokens", "1000"], "more than the 64 positions"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-p", "2"], "top_p is 2.0"),
        (["--seed", "-1"], "seed is -1"),
        (["--device", "toaster"], "device 'toaster' cannot be used"),
        (["--device", "meta"], "device 'meta' cannot be used"),
        (["--dtype", "int8"], "dtype is 'int8'"),
        (["--prompt", "the \udcff"], "not valid Unicode"),
        (["--prompt", ""], "The prompt is empty"),
        (["--input", "x.jsonl"], "either --prompt"),
        (["--output", "x.jsonl"], "--input and --output go together"),
    ],
)
def test_bad_options_are_a_message_and_status_2(options, message, checkpoint, run):
    status, out, err = run(checkpoint, "--prompt", "the cat", *options)
    assert (status, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_a_prompt_is_needed(checkpoint, run):
    status, _, err = run(checkpoint)
    assert status == 2 and "--prompt" in err


def test_a_checkpoint_without_a_tokenizer_is_refused(checkpoint, tmp_path, run):
    bare = save_checkpoint(load(checkpoint), tmp_path / "bare")
    status, out, err = run(bare, "--prompt", "the cat")
    assert (status, out) == (2, "") and "tokenizer" in err


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path, run):
    status, out, err = run(tmp_path / "missing", "--prompt", "the cat")
    assert (status, out) == (2, "") and "missing" in err


@pytest.mark.parametrize("content", [b"{", b'{"model_type": "looplm"'])
def test_a_damaged_config_is_not_blamed_on_the_tokenizer(content, checkpoint, tmp_path, run):
    damaged = shutil.copytree(checkpoint, tmp_path / "damaged")
    (damaged / "config.json").write_bytes(content)
    status, out, err = run(damaged, "--prompt", "the cat")
    assert (status, out) == (2, "")
    assert "config.json" in err and "tokenizer" not in err


def test_a_broken_model_is_said_to_be_broken(checkpoint, tmp_path, run):
    model = load(checkpoint)
    torch.nn.init.constant_(model.lm_head.weight, torch.inf)
    broken = save_checkpoint(model, tmp_path / "broken", load_tokenizer(checkpoint))
    status, out, err = run(broken, "--prompt", "the cat", "--max-tokens", 3)
    assert (status, out) == (2, "") and "not finite" in err


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


def test_the_shipped_checkpoint_is_the_default():
    from looplm.hf.checkpoint import SHIPPED as shipped

    assert SHIPPED in shipped


# --- A file of prompts ------------------------------------------------------------------------------------------


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


def test_a_fresh_process_prints_the_text_and_nothing_else(checkpoint):
    # transformers warns of model types that are not registered yet, which only a new process shows.
    command = [sys.executable, "-m", "looplm", "generate", str(checkpoint), "--prompt", "the", "--max-tokens", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("the")
