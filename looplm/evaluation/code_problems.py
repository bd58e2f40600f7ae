"""Programming problems in the two forms that are published: HumanEval's lines and MBPP's."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplm.data.text_files import read_jsonl
from looplm.errors import UserError

HUMANEVAL_STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""What ends a function body that is continued (Chen et al., arXiv 2107.03374, section 2.1)."""

MBPP_STOP = ("\nclass", "\nassert", '\n"""', "\nprint", "\nif", "\n```")
"""What ends an answer that may be several functions."""


@dataclass(frozen=True)
class Problem:
    """What a model continues, and what its continuation is tried with."""

    name: str
    prompt: str
    """Without white space at its end: most tokenizers join a line's end and the indentation after it."""
    question: str
    """The same, asked of a model that chats."""
    tests: str
    """Code that raises an exception unless the program before it is right."""
    stop: tuple[str, ...]
    """What ends a continuation of the prompt."""
    canonical: str
    """The continuation that the file gives as right."""

    def program(self, text: str, *, chat: bool = False) -> str:
        """What a model wrote, as a program with its tests: a continuation, or with `chat` a reply to the question.

        Of a reply the first block of code counts, behind its reasoning. It comes after the prompt, whose imports and
        helpers it may need and whose function it defines anew.
        """
        return f"{self.prompt}{chr(10) + reply_code(text) if chat else text}\n\n{self.tests}\n"


def read_problems(path: Path) -> list[Problem]:
    """The problems of a JSON lines file, in its order.

    HumanEval's form: `task_id`, `prompt`, `canonical_solution`, `test`, `entry_point`. MBPP's: `task_id`, `text` (or
    `prompt`), `code`, `test_list`, and where given `test_setup_code` and `test_imports`.
    Raises UserError that names the line of one that is neither, or appears twice.
    """
    problems: dict[str, Problem] = {}
    for number, record in read_jsonl(path):
        where = f"{path}, line {number}"
        problem = mbpp_problem(record, where) if "test_list" in record else humaneval_problem(record, where)
        if problem.name in problems:
            raise UserError(f"{where}: the problem {problem.name} was there before.")
        problems[problem.name] = problem
    if not problems:
        raise UserError(f"{path} holds no problem.")
    return list(problems.values())


def humaneval_problem(record: dict[str, Any], where: str) -> Problem:
    """The beginning of a function, to be continued. Raises UserError for a missing field."""
    entry_point, given = text_field(record, "entry_point", where), text_field(record, "prompt", where)
    prompt = given.rstrip()
    return Problem(
        name=text_field(record, "task_id", where),
        prompt=prompt,
        question=f"Complete this Python function. Answer with the whole function in one block of code.\n"
        f"```python\n{prompt}\n```",
        tests=f"{text_field(record, 'test', where)}\ncheck({entry_point})",
        stop=HUMANEVAL_STOP,
        canonical=given[len(prompt) :] + text_field(record, "canonical_solution", where),
    )


def mbpp_problem(record: dict[str, Any], where: str) -> Problem:
    """The question and its tests as a docstring, behind which the program is written. Raises UserError as above."""
    question = text_field(record, "text" if "text" in record else "prompt", where)
    tests, imports = record["test_list"], record.get("test_imports", [])
    if not isinstance(tests, list) or not tests or not all(isinstance(one, str) for one in (*tests, *imports)):
        raise UserError(f"{where}: test_list and test_imports must be lists of strings, the first not empty.")
    setup = [text_field(record, "test_setup_code", where)] if "test_setup_code" in record else []
    shown = "\n".join((question.strip(), *tests)).replace("\\", "\\\\").replace('"""', "'''")
    listed = "\n".join(tests)
    return Problem(
        name=str(record.get("task_id", question)),
        prompt=f'"""\n{shown}\n"""',
        question=f"{question.strip()} Answer with Python in one block of code that passes these tests.\n"
        f"```python\n{listed}\n```",
        tests="\n".join((*imports, *setup, *tests)),
        stop=MBPP_STOP,
        canonical="\n" + text_field(record, "code", where),
    )


def reply_code(reply: str) -> str:
    """The first block of code in a reply, what it reasoned left out; the whole where there is no block."""
    answer = reply.rpartition("</think>")[2]
    block = re.search(r"```[^\n]*\n(.*?)(?:\n[ \t]*```|\Z)", answer, re.DOTALL)
    return block.group(1) if block else answer


def text_field(record: dict[str, Any], name: str, where: str) -> str:
    """A field that must be a text. Raises UserError where it is none."""
    value = record.get(name)
    if not isinstance(value, str):
        raise UserError(
            f"{where}: {name} is {value!r}; give HumanEval's fields (task_id, prompt, canonical_solution, test, "
            "entry_point) or MBPP's (task_id, text, code, test_list)."
        )
    return value
