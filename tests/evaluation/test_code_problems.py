"""Problems as they are published, and that programs made of them fail or pass as they should."""

import json

import pytest

from looplm.errors import UserError
from looplm.evaluation.code_execution import Limits, find_isolation, run_program, run_programs
from looplm.evaluation.code_problems import HUMANEVAL_STOP, read_problems

HUMANEVAL = {
    "task_id": "T/0",
    "prompt": 'def twice(x):\n    """Twice x."""\n',
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    "entry_point": "twice",
}
MBPP = {
    "task_id": 11,
    "text": 'Write a function that halves. """ \\',
    "code": "def half(x):\n    return x / 2",
    "test_setup_code": "two = 2",
    "test_imports": ["import math"],
    "test_list": ["assert half(two) == 1", "assert half(math.inf) == math.inf"],
}


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_both_forms(tmp_path):
    first, second = read_problems(write(tmp_path / "p.jsonl", HUMANEVAL, MBPP))
    assert (first.name, first.prompt, first.stop) == ("T/0", HUMANEVAL["prompt"].rstrip(), HUMANEVAL_STOP)
    assert second.name == "11"
    isolation = find_isolation()
    for problem in (first, second):
        assert run_program(problem.program(problem.canonical), Limits(), isolation).passed
        assert not run_program(problem.program("    return 5\n"), Limits(), isolation).passed
        assert not run_program(problem.program(""), Limits(), isolation).passed


@pytest.mark.parametrize(
    "reply",
    [
        "```python\ndef twice(x):\n    return 2 * x\n```",
        "<think>\n```\nraise KeyError\n```\n</think>Here:\n```\ndef twice(x):\n    return 2 * x\n```\nor ```x```",
        "```\n    return 2 * x\n```",
        "def twice(x):\n    return 2 * x",
        "Cut short: ```py\ndef twice(x):\n    return 2 * x",
    ],
)
def test_replies_of_a_model_that_chats(tmp_path, reply):
    (problem,) = read_problems(write(tmp_path / "p.jsonl", HUMANEVAL))
    assert problem.prompt in problem.question
    program = problem.program(reply, chat=True)
    assert program.startswith(problem.prompt)
    exec(compile(program, "program", "exec"), {})
    with pytest.raises(AssertionError):
        exec(compile(problem.program(reply.replace("2 * x", "x"), chat=True), "program", "exec"), {})


@pytest.mark.parametrize(
    "wrong",
    [
        {**HUMANEVAL, "test": None},
        {name: value for name, value in HUMANEVAL.items() if name != "task_id"},
        {**MBPP, "test_list": []},
        {**MBPP, "test_list": "assert 1"},
        {**MBPP, "code": 3},
        HUMANEVAL,
    ],
)
def test_a_wrong_line_is_named(tmp_path, wrong):
    with pytest.raises(UserError, match="line 2"):
        read_problems(write(tmp_path / "p.jsonl", HUMANEVAL, wrong))


def test_an_empty_file(tmp_path):
    with pytest.raises(UserError, match="no problem"):
        read_problems(write(tmp_path / "p.jsonl"))


@pytest.mark.slow
def test_every_solution_of_humaneval_passes(shared_dir):
    problems = read_problems(shared_dir / "data" / "HumanEval.jsonl")
    programs = [problem.program(problem.canonical) for problem in problems]
    outcomes = run_programs(programs, Limits(wall_seconds=60), find_isolation(), num_processes=2)
    assert len(problems) == 164
    assert [(p.name, o.reason) for p, o in zip(problems, outcomes, strict=True) if not o.passed] == []
