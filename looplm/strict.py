"""Base of every recipe: an unknown key, an impossible value or a wrong type is an error, never a default.

`parse` turns plain data (from YAML or JSON) into such a model, or into one message that names everything wrong.
"""

import difflib
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError

from looplm.errors import UserError

Path = tuple[str | int, ...]
"""Keys and list indices from the top: ("stages", 1, "optimizer", "lr")."""

Parsed = TypeVar("Parsed", bound=BaseModel)


class Strict(BaseModel):
    """Unknown keys, infinities and NaN are errors; values do not change after construction."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


def parse(cls: type[Parsed], data: Any, where: str, origins: Mapping[Path, str] | None = None) -> Parsed:
    """An instance of `cls` from plain data.

    where: what the data are, to begin the message with (a file name). origins: where a path was written ("line 12").
    Raises UserError naming every wrong key with its dotted path, its origin and the nearest valid key.
    """
    misread = list(_misread(cls, data, ()))
    try:
        parsed, invalid = cls.model_validate(data), []
    except ValidationError as error:
        parsed, invalid = None, list(_invalid(cls, data, error))
    if parsed is not None and not misread:
        return parsed
    # The same value may be wrong in both ways; what it was misread as says more.
    told = {path for path, _ in misread}
    found = [*misread, *((path, text) for path, text in invalid if path not in told)]
    problems = list(dict.fromkeys(_place(path, origins or {}) + text for path, text in found))
    if len(problems) == 1:
        raise UserError(f"{where}: {problems[0]}")
    raise UserError(f"{where} has {len(problems)} problems:" + "".join(f"\n  {problem}" for problem in problems))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be, None where none is near."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def dotted(path: Path) -> str:
    """As overrides on the command line write it: "stages.1.optimizer.lr"."""
    return ".".join(map(str, path))


def _place(path: Path, origins: Mapping[Path, str]) -> str:
    origin = next((origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origins), None)
    place = dotted(path) + (f" ({origin})" if origin is not None else "")
    return f"{place}: " if place else ""


# --- Wrong types ----------------------------------------------------------------------------------------------------


def _misread(annotation: Any, value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Values that pydantic would quietly turn into another type: text into a number, true into 1, 1 into true."""
    members = list(_members(annotation))
    if isinstance(value, dict):
        for member in _meant(members, value):
            for key, inner in value.items():
                if (kind := _inner(member, key)) is not None:
                    yield from _misread(kind, inner, (*path, key))
    elif isinstance(value, list | tuple):
        for member in members:
            if get_origin(member) in (tuple, list):
                for i, inner in enumerate(value):
                    yield from _misread(_inner(member, i), inner, (*path, i))
    elif all(member in (int, float, bool) or _fields(member) for member in members):
        numbers = {member for member in members if member in (int, float, bool)}
        wrong = isinstance(value, str) or (isinstance(value, bool) != (bool in numbers) and value is not None)
        if numbers and wrong and not (len(numbers) > 1 and bool in numbers):
            yield path, f"is {_show(value)}; it must be {_plain(numbers)}."


def _meant(members: list[Any], value: dict[Any, Any]) -> list[Any]:
    """Of several types, those that a mapping may be: by its kind where it has one."""
    tagged = [member for member in members if value.get("kind") in get_args(_fields(member).get("kind"))]
    return tagged or [member for member in members if _fields(member) or get_origin(member) in (dict, Mapping)]


def _plain(scalars: set[type]) -> str:
    if scalars == {bool}:
        return "true or false"
    return "a number" if float in scalars else "a whole number"


def _members(annotation: Any) -> Iterator[Any]:
    """The alternatives of a type, None left out and Annotated unwrapped."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    elif annotation is not type(None):
        yield annotation


# --- What pydantic found, in plain words ----------------------------------------------------------------------------


def _invalid(cls: type, data: Any, error: ValidationError) -> Iterator[tuple[Path, str]]:
    for entry in error.errors():
        path, owner, annotation, relevant = _locate(cls, data, tuple(entry["loc"]))
        # A list whose only element is wrong is called too short as well.
        if relevant and not (
            entry["type"] == "too_short" and len(entry["input"]) >= entry.get("ctx", {})["min_length"]
        ):
            yield path, _sentence(entry, path, owner, annotation)


def _locate(cls: Any, data: Any, loc: Path) -> tuple[Path, Any, Any, bool]:
    """Where in the data an error lies, the class its last key belongs to, the type there, and whether that was meant.

    pydantic's location also holds the names of union members, which are no keys of the data.
    """
    path: list[str | int] = []
    annotation, owner, relevant = cls, cls, True
    for element in loc:
        members = list(_members(annotation))
        if len(members) > 1:
            chosen = [member for member in members if _is_member(member, element)]
            if chosen or not (isinstance(data, dict) and element in data):
                relevant = relevant and isinstance(data, dict) == any(_fields(member) for member in chosen)
                # A tagged union inside a plain one is named as a whole first, then by its tag.
                annotation = chosen[0] if len(chosen) == 1 else reduce(or_, chosen or members)
                continue
        member = members[0] if members else None
        path.append(element)
        owner, annotation = member, _inner(member, element)
        if isinstance(data, dict):
            data = data.get(element)
        elif isinstance(data, list | tuple) and isinstance(element, int) and element < len(data):
            data = data[element]
    return tuple(path), owner, annotation, relevant


def _is_member(member: Any, label: str | int) -> bool:
    """Whether pydantic's name for a union member means `member`: its tag, its class, or its type."""
    # A validator wraps the name: function-after[_whole_increments(), BatchRamp].
    names = re.sub(r"function-\w+\[[^,\]]*, ([^\]]*)\]", r"\1", str(label))
    fields = _fields(member)
    if names.startswith("tagged-union["):
        return bool(fields) and member.__name__ in re.split(r"[\[\],]", names)
    if fields:
        return label in get_args(fields.get("kind")) or names == member.__name__
    if get_origin(member) is Literal:
        return names.startswith("literal[")
    return member in (int, float, str, bool) and names.removeprefix("constrained-") == member.__name__


def _fields(member: Any) -> dict[str, Any]:
    """Field names and types of a pydantic model or a dataclass; empty for anything else."""
    if isinstance(member, type) and issubclass(member, BaseModel):
        return {name: field.annotation for name, field in member.model_fields.items()}
    return get_type_hints(member) if isinstance(member, type) and is_dataclass(member) else {}


def _inner(member: Any, element: str | int) -> Any:
    """The type of one entry of `member`: a field, an element of a list, a value of a mapping."""
    args = [arg for arg in get_args(member) if arg is not Ellipsis]
    if get_origin(member) in (tuple, list) and isinstance(element, int):
        return args[min(element, len(args) - 1)]
    if get_origin(member) in (dict, Mapping):
        return args[1]
    return _fields(member).get(str(element))


def _sentence(entry: Any, path: Path, owner: Any, annotation: Any) -> str:
    """One of pydantic's errors in plain words."""
    kind, value, context = entry["type"], entry["input"], entry.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "missing":
        return "is missing."
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        known = list(_fields(owner))
        close = nearest(str(path[-1]), known)
        return f"unknown key; did you mean {close}?" if close else f"unknown key; known here: {', '.join(known)}."
    if kind == "union_tag_invalid":
        tags = [tag.strip("' ") for tag in context["expected_tags"].split(",")]
        close = nearest(context["tag"], tags)
        return f"kind is {context['tag']!r}; " + _choose(tags, close)
    if kind == "union_tag_not_found":
        tags = [tag for member in _members(annotation) for tag in get_args(_fields(member).get("kind"))]
        return f"is missing its kind; {_choose(tags)}"
    if kind == "literal_error":
        choices = [choice.strip("' ") for choice in context["expected"].replace(" or ", ", ").split(",")]
        close = nearest(value, choices) if isinstance(value, str) else None
        return f"is {_show(value)}; " + _choose(choices, close)
    return f"is {_show(value)}; {_wanted(kind, context) or entry['msg']}."


def _choose(choices: list[str], close: str | None = None) -> str:
    """What may be given instead, the nearest choice first."""
    if len(choices) == 1:
        return f"it must be {choices[0]}."
    start = f"did you mean {close}? Choose" if close else "choose"
    return f"{start} one of {', '.join(choices)}."


def _wanted(kind: str, context: Mapping[str, Any]) -> str | None:
    """What a value of the wrong type or size must be."""
    types_wanted = {
        "int": "a whole number", "float": "a number", "finite_number": "a finite number", "bool": "true or false",
        "string": "text", "model": "a mapping of keys to values", "dict": "a mapping of keys to values",
        "dataclass": "a mapping of keys to values", "tuple": "a list", "list": "a list",
    }  # fmt: skip
    bounds = {
        "greater_than": "above {gt}", "greater_than_equal": "at least {ge}",
        "less_than": "below {lt}", "less_than_equal": "at most {le}",
        "string_pattern_mismatch": "text of the form {pattern}",
        "too_short": "a list of at least {min_length}", "too_long": "a list of at most {max_length}",
    }  # fmt: skip
    if kind in bounds:
        return "it must be " + bounds[kind].format(**context)
    wanted = types_wanted.get(kind) or types_wanted.get(kind.split("_")[0])
    return f"it must be {wanted}" if wanted else None


def _show(value: Any) -> str:
    """A value in a message: as YAML writes it, and not at length."""
    if value is None or isinstance(value, bool):
        return {None: "empty", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
