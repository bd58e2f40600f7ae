"""`looplm generate`: text, depth on show, files of prompts, and what it refuses."""

import io
import shutil
import subprocess
import sys

import pytest
import torch

from looplm.cli.generate import SHIPPED
from looplm.hf.load import load, load_tokenizer
from looplm.hf.save import save_checkpoint
from looplm.inference import ConfidenceExit, Engine, FixedDepth, HiddenDiffExit, QuantileExit, SamplingParams

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
        (["--exit", "hidden-diff:-1"], "--exit is 'hidden-diff:-1'; its number must be finite, from 0"),
        (["--exit", "stable:1.5"], "give hidden-diff:EPS"),
        (["--exit", "oracle:1"], "give hidden-diff:EPS"),
        (["--kv-cache", "latest"], "--kv-cache is 'latest'; choose one of per_loop, fill, last, mean, first"),
        (["--kv-cache", "last", "--draft-loops", "1"], "needs --kv-cache per_loop"),
        (["--draft-tokens", "2"], "give both"),
        (["--draft-loops", "0"], "draft_loops is 0"),
        (["--num-loops", "1", "--draft-loops", "1"], "every token leaves at loop 1"),
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


def test_the_shipped_checkpoint_is_the_default():
    from looplm.hf.checkpoint import SHIPPED as shipped

    assert SHIPPED in shipped


def test_a_fresh_process_prints_the_text_and_nothing_else(checkpoint):
    # transformers warns of model types that are not registered yet, which only a new process shows.
    command = [sys.executable, "-m", "looplm", "generate", str(checkpoint), "--prompt", "the", "--max-tokens", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("the")
