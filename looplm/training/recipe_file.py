"""Recipe files: YAML in, with the line of every mistake, and the resolved recipe out.

Scalars are those of YAML 1.2: `1e-3` and `3e12` are numbers, `yes` and `on` are text. `_` may separate digits.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError

from looplm.errors import UserError
from looplm.strict import Path as KeyPath
from looplm.strict import dotted, nearest, parse
from looplm.training.recipe import RunRecipe

_MOST_NODES = 100_000
"""More than any recipe holds; aliases of aliases could write out billions."""

_MOST_DIGITS = 400
"""Of a whole number; no float holds as many, and Python reads no more than 4300."""

Origins = dict[KeyPath, str]
"""Where each value was written: "line 12", or the override."""


# --- YAML -----------------------------------------------------------------------------------------------------------

_RESOLVERS = (
    ("tag:yaml.org,2002:null", re.compile(r"~|null|Null|NULL|"), ("~", "n", "N", "")),
    ("tag:yaml.org,2002:bool", re.compile(r"true|True|TRUE|false|False|FALSE"), tuple("tTfF")),
    ("tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9](_?[0-9])*"), tuple("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        re.compile(
            r"[-+]?(\.[0-9]+|[0-9](_?[0-9])*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
        ),
        tuple("-+.0123456789"),
    ),
    ("tag:yaml.org,2002:merge", re.compile(r"<<"), ("<",)),
)


def _implicit_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """First character -> tags in order of precedence, in PyYAML's layout."""
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, starts in _RESOLVERS:
        for start in starts:
            table.setdefault(start, []).append((tag, re.compile(f"(?:{pattern.pattern})$")))
    return table


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's numbers, for which a key that is given twice is an error."""

    yaml_implicit_resolvers = _implicit_resolvers()

    def construct_yaml_int(self, node: Any) -> int:
        # PyYAML reads a leading zero as octal, as YAML 1.1 does.
        digits = self.construct_scalar(node).replace("_", "")
        if len(digits) > _MOST_DIGITS:
            raise ConstructorError(None, None, f"a number of {len(digits):,} digits is too long", node.start_mark)
        return int(digits)

    def flatten_mapping(self, node: Any) -> None:
        seen: dict[Any, int] = {}
        for key, _ in node.value:
            text = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
            if not isinstance(key, yaml.ScalarNode) or key.tag not in text:
                raise ConstructorError(None, None, "a key must be a plain word", key.start_mark)
            if key.value in seen:
                problem = f"the key {key.value} is given twice (first in line {seen[key.value]}); keep one of them"
                raise ConstructorError(None, None, problem, key.start_mark)
            if key.tag != "tag:yaml.org,2002:merge":
                seen[key.value] = key.start_mark.line + 1
        super().flatten_mapping(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly what `_Loader` would read as something else."""

    yaml_implicit_resolvers = _implicit_resolvers()

    def ignore_aliases(self, data: Any) -> bool:
        return True


def read_yaml(text: str, where: str) -> tuple[Any, Origins]:
    """The data in one YAML document, and the line of every key and element.

    Raises UserError with the line for what is no YAML, duplicate keys, tabs as indentation and Python tags.
    """
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return None, {}
            # Lines first: constructing merges `<<` into the nodes.
            origins = {path: f"line {line}" for path, line in _lines(root, where)}
            return loader.construct_document(root), origins
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise UserError(f"{where}{_complaint(error, text)}") from None
    except RecursionError:
        raise UserError(f"{where} is nested more deeply than any recipe; write it flat.") from None


def _lines(root: yaml.Node, where: str) -> Iterator[tuple[KeyPath, int]]:
    pending: list[tuple[KeyPath, yaml.Node]] = [((), root)]
    count = 0
    while pending:
        path, node = pending.pop()
        count += 1
        if count > _MOST_NODES or len(path) > 100:
            raise UserError(f"{where} refers to itself or repeats its anchors too often; write the values out.")
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    yield (*path, key.value), key.start_mark.line + 1
                    pending.append(((*path, key.value), value))
        elif isinstance(node, yaml.SequenceNode):
            for i, value in enumerate(node.value):
                yield (*path, i), value.start_mark.line + 1
                pending.append(((*path, i), value))


def _complaint(error: yaml.YAMLError, text: str) -> str:
    """What is wrong with the YAML, and in which line."""
    if isinstance(error, ReaderError):
        line = text[: int(error.position)].count("\n") + 1
        return f", line {line}: the character U+{int(error.character):04X} is not allowed in YAML; remove it."
    problem = str(error.problem) if isinstance(error, yaml.MarkedYAMLError) else str(error)
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    line = f", line {mark.line + 1}" if mark is not None else ""
    source = text.splitlines()[mark.line] if mark is not None and mark.line < len(text.splitlines()) else ""
    if "\t" in source[: len(source) - len(source.lstrip())]:
        return f"{line}: the line is indented with a tab; YAML wants spaces."
    if "\\t" in problem:
        return f"{line}: there is a tab before a value; YAML wants a space."
    if "tag" in problem and "!" in problem:
        return f"{line}: {problem}; recipes hold plain values only, without tags."
    if isinstance(error, ComposerError) and "single document" in str(error):
        return f"{line}: a second document begins (---); a recipe is one document."
    return f"{line}: {problem}."


# --- Loading --------------------------------------------------------------------------------------------------------


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> RunRecipe:
    """The recipe in a YAML file, with `key=value` overrides.

    A key is a dotted path; elements of a list go by their index, stages by their name too
    (`stages.0.optimizer.lr=1e-3`, `stages.pretrain.num_steps=10`), and a value is read as YAML.

    Raises UserError for a file that cannot be read and for everything wrong with its content, with lines.
    """
    data, origins = read_yaml(read_text(path), str(path))
    if data is None:
        raise UserError(f"{path} is empty; a recipe needs a name, a model, a tokenizer and stages (docs/train.md).")
    if not isinstance(data, dict):
        raise UserError(f"{path} does not hold a mapping of keys to values, as a recipe is (docs/train.md).")
    for override in overrides:
        apply_override(data, origins, override)
    return parse(RunRecipe, data, str(path), origins)


def read_text(path: Path) -> str:
    """A UTF-8 file, with or without a byte-order mark. Raises UserError when it cannot be read."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"There is no recipe {path}.") from None
    except OSError as error:
        raise UserError(f"The recipe {path} cannot be read: {error.strerror}.") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: the file is not UTF-8; save it in that encoding.") from None


def apply_override(data: dict[str, Any], origins: Origins, override: str) -> None:
    """Sets one value in place. Whether the last key is a known one is left to the schema."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"{override!r} is no override; write key=value, as in stages.0.optimizer.lr=1e-3.")
    shown = override if len(override) <= 100 else override[:97] + "..."
    value, _ = read_yaml(text, f"The override {shown!r}")
    parts = key.split(".")
    if "" in parts:
        raise UserError(f"The override {override!r} has an empty key; write key=value, as in seed=1.")
    here: Any = data
    path: KeyPath = ()
    for part in parts[:-1]:
        step = _step(here, part, path, override)
        if isinstance(here, dict) and here.get(step) is None:
            here[step] = {}
            origins[*path, step] = "command line"
        here, path = here[step], (*path, step)
    last = _step(here, parts[-1], path, override)
    here[last] = value
    path = (*path, last)
    for written in [p for p in origins if p[: len(path)] == path]:
        del origins[written]
    origins[path] = "command line"


def _step(here: Any, part: str, path: KeyPath, override: str) -> str | int:
    """The key or index that one part of an override's path means."""
    if isinstance(here, dict):
        return part
    if not isinstance(here, list):
        raise UserError(f"The override {override!r} goes too deep: {dotted(path)} is {here!r}, which has no keys.")
    if part.isdecimal():
        if int(part) < len(here):
            return int(part)
        raise UserError(f"The override {override!r}: {dotted(path)} has {len(here)} elements, counted from 0.")
    names = [element.get("name") if isinstance(element, dict) else None for element in here]
    if part in names:
        return names.index(part)
    known = [name for name in names if isinstance(name, str)]
    close = nearest(part, known)
    hint = f"did you mean {close}?" if close else f"give an index or one of {', '.join(known)}." if known else (
        "its elements go by their index, from 0."
    )  # fmt: skip
    raise UserError(f"The override {override!r}: {dotted(path)} has no element {part}; {hint}")


# --- Saving ---------------------------------------------------------------------------------------------------------


def dump_recipe(recipe: RunRecipe) -> str:
    """The recipe as YAML with its defaults written out; loading it gives an equal recipe.

    Data sections stand as they were given: which of their fields may be given depends on the others.
    """
    resolved = recipe.model_dump(mode="json")
    sections = [(plain, given.data) for plain, given in zip(resolved["stages"], recipe.stages, strict=True)]
    if recipe.evaluation is not None:
        sections.append((resolved["evaluation"], recipe.evaluation.data))
    for plain, data in sections:
        plain["data"] = None if data is None else data.model_dump(mode="json", exclude_unset=True)
    return yaml.dump(resolved, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def parse_recipe(text: str, where: str) -> RunRecipe:
    """The recipe that `dump_recipe` has written."""
    data, origins = read_yaml(text, where)
    return parse(RunRecipe, data, where, origins)
