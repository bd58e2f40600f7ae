"""lm-eval's own client, `local-completions`, and its command, unchanged.

Skips where lm-eval or what its clients need is missing.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import looplm
from looplm.hf.checkpoint import find_checkpoint

PAIRS = [("def main(", "self, event"), ("import", " os"), ("class A:\n    def __init__(", "self")]

if find_spec("lm_eval") is None or find_spec("tenacity") is None or find_spec("aiohttp") is None:
    pytest.skip("needs lm-eval[api]", allow_module_level=True)


@pytest.mark.filterwarnings("default")
def test_it_scores_and_generates(
    server: Any, make_engine: Callable[..., looplm.Engine], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    client = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="stdlib-small",
        tokenizer_backend="huggingface",
        tokenizer=str(find_checkpoint("stdlib-small")),
        max_length=512,
        batch_size=2,
    )

    def asked(kind: Any, arguments: tuple[Any, ...]) -> Instance:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    found = client.loglikelihood([asked("loglikelihood", pair) for pair in PAIRS])
    for (context, said), (logprob, is_greedy) in zip(PAIRS, found, strict=True):
        before, whole = tokenizer.encode(context), tokenizer.encode(context + said)
        params = looplm.SamplingParams(max_tokens=1, prompt_logprobs=True)
        (scored,) = make_engine().generate([whole], params)
        assert logprob == pytest.approx(sum((scored.prompt_logprobs or [])[len(before) - 1 :]), abs=1e-3)
        greedy = next(
            iter(make_engine().generate([before], looplm.SamplingParams(max_tokens=len(whole) - len(before))))
        )
        assert is_greedy == (greedy.token_ids == whole[len(before) :])
    options = {"until": ["\n"], "max_gen_toks": 12, "temperature": 0}
    (text,) = client.generate_until([asked("generate_until", ("def main(", options))])
    (result,) = make_engine().generate("def main(", looplm.SamplingParams(max_tokens=12, stop="\n"))
    assert text == result.text


DATA = [
    {"question": "def main(", "choices": ["self, event", "argv", "x: int"], "answer": 1},
    {"question": "import", "choices": [" os", " sys", " zzz"], "answer": 0},
    {"question": "class A:\n    def __init__(", "choices": ["self", "cls, name", "x"], "answer": 0},
    {"question": "for line in", "choices": [" file", " lines", " 5"], "answer": 1},
]
TASK = """
task: NAME
dataset_path: json
dataset_kwargs:
  data_files: DATA
test_split: train
doc_to_text: "{{question}}"
target_delimiter: ""
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list:
  - metric: acc
"""
WRITING = """
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list:
  - metric: exact_match
"""


@pytest.mark.slow
def test_its_command_gives_the_engines_scores(
    server: Any, make_engine: Callable[..., looplm.Engine], tokenizer: Any, tmp_path: Path
) -> None:
    """`lm_eval --model local-completions` with tasks and data of this directory, four questions at a time."""
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, DATA)) + "\n", encoding="utf-8")
    for name, rest in (("choosing", CHOICE), ("writing", WRITING)):
        text = TASK.replace("NAME", name).replace("DATA", str(data)) + rest
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    model = f"model=stdlib-small,base_url={server.url}/v1/completions,num_concurrent=4"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", "choosing,writing"]
    command += ["--model_args", f"{model},tokenizer={find_checkpoint('stdlib-small')}"]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"]
    environment = {**os.environ, "NO_PROXY": "127.0.0.1", "HF_HOME": str(tmp_path / "hf")}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-2000:]
    (found,) = (tmp_path / "out").glob("*/results_*.json")
    results = json.loads(found.read_text("utf-8"))["results"]
    right = written = 0
    for sample in samples(tmp_path, "choosing"):
        question, said = sample["doc"], [float(one[0][0]) for one in sample["resps"]]
        before = len(tokenizer.encode(question["question"]))
        prompts = [tokenizer.encode(question["question"] + choice) for choice in question["choices"]]
        params = looplm.SamplingParams(max_tokens=1, prompt_logprobs=True)
        scored = make_engine().generate(prompts, params)
        own = [sum((one.prompt_logprobs or [])[before - 1 :]) for one in scored]
        assert said == pytest.approx(own, abs=1e-3)
        right += own.index(max(own)) == question["answer"]
    for sample in samples(tmp_path, "writing"):
        (result,) = make_engine().generate(sample["doc"]["question"], looplm.SamplingParams(max_tokens=8, stop="\n"))
        assert sample["resps"] == [[result.text]]
        written += result.text == sample["doc"]["choices"][sample["doc"]["answer"]]
    assert results["choosing"]["acc,none"] == right / len(DATA)
    assert results["writing"]["exact_match,none"] == written / len(DATA)


def samples(directory: Path, task: str) -> list[dict[str, Any]]:
    """What lm-eval has noted of each question."""
    (path,) = (directory / "out").glob(f"*/samples_{task}_*.jsonl")
    found = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert len(found) == len(DATA)
    return found
