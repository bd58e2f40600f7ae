"""Questions about the standard library, answered by its docstrings."""

import textwrap

from looplm.data.stdlib_chat import stdlib_chat


def test_conversations() -> None:
    found = list(stdlib_chat())
    assert len(found) > 3000
    assert all([turn["role"] for turn in turns] == ["user", "assistant"] for turns in found)
    answers = {user["content"]: assistant["content"] for user, assistant in found}
    dedent = answers["What does dedent in the module textwrap do?"]
    assert textwrap.dedent.__doc__ is not None and dedent.splitlines()[0] == textwrap.dedent.__doc__.splitlines()[0]
    assert "What does TextWrapper.fill in the module textwrap do?" in answers


def test_a_sample_is_the_same_every_time() -> None:
    first = list(stdlib_chat(max_bytes=300_000))
    assert first == list(stdlib_chat(max_bytes=300_000)) and 10 < len(first) < 2000
