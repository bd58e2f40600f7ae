"""Conversations from the offline default corpus: what a function of the standard library does, and its docstring.

For instruction tuning at small size, with no network: real prose, and an answer that cannot be guessed from the
form of the question alone.
"""

import ast
import inspect
from collections.abc import Iterator

from looplm.data.stdlib_text import load_stdlib_text

_MAX_ANSWER_CHARS = 600

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def stdlib_chat(max_bytes: int | None = None) -> Iterator[list[dict[str, str]]]:
    """Yields conversations of one question and one answer, in the order of the corpus.

    Args:
        max_bytes: of the standard library's text to go through; None for all. See `load_stdlib_text`.
    """
    for document in load_stdlib_text(max_bytes).documents:
        if not document.name.endswith(".py"):
            continue
        module = document.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name, answer in _documented(ast.parse(document.text)):
            yield [
                {"role": "user", "content": f"What does {name} in the module {module} do?"},
                {"role": "assistant", "content": answer},
            ]


def _documented(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Name and docstring of every documented definition, methods as `Class.method`."""
    pending: list[tuple[str, ast.AST]] = [("", tree)]
    while pending:
        prefix, parent = pending.pop(0)
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, _Definition):
                name = prefix + node.name
                text = ast.get_docstring(node, clean=False)
                if text is not None and 0 < len(inspect.cleandoc(text)) <= _MAX_ANSWER_CHARS:
                    yield name, inspect.cleandoc(text)
                if isinstance(node, ast.ClassDef):
                    pending.append((f"{name}.", node))
