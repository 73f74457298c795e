"""Text to typed values: what `--set name=value`, method options and config files need."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

from steppe.lab.errors import LabError


@cache
def field_types(cls: type) -> Mapping[str, Any]:
    """The annotated type of every field."""
    return types.MappingProxyType(typing.get_type_hints(cls))


def literal(text: str) -> object:
    """The value that a word on the command line stands for.

    >>> [literal(word) for word in ("3", ".5", "1e-3", "true", "none", "flip")]
    [3, 0.5, 0.001, True, None, 'flip']
    """
    word = text.strip()
    named: dict[str, object] = {"true": True, "false": False, "none": None, "null": None}
    if word.lower() in named:
        return named[word.lower()]
    for number in (int, float):
        try:
            return number(word)
        except ValueError:
            continue
    return word


def coerce(name: str, value: object, hint: Any) -> object:
    """`value` as the type `hint`; text is read first. Raises with both if it does not fit."""
    read = literal(value) if isinstance(value, str) else value
    for option in _options(hint):
        fitted = _fit(value, read, option)
        if fitted is not NO_FIT:
            return fitted
    raise LabError(f"{name} must be {_describe(hint)}, got {value!r}.")


NO_FIT = object()


def _options(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = list(typing.get_args(hint))
        return sorted(members, key=lambda member: member is str)  # text fits anything: last
    return [hint]


def _fit(value: object, read: object, hint: Any) -> object:
    origin = typing.get_origin(hint)
    if hint in (None, types.NoneType):
        return None if read is None else NO_FIT
    if origin is typing.Literal:
        return value if value in typing.get_args(hint) else NO_FIT
    if origin is tuple:
        return _fit_tuple(value)
    if origin is not None and issubclass(origin, Mapping):
        parsed = json.loads(value) if isinstance(value, str) else value
        return dict(parsed) if isinstance(parsed, Mapping) else NO_FIT
    if hint is str:
        return value if isinstance(value, str) else NO_FIT
    if hint is float and isinstance(read, int) and not isinstance(read, bool):
        return float(read)
    if hint is int and isinstance(read, float) and read.is_integer():
        return int(read)
    return read if isinstance(read, hint) and (hint is bool) == (type(read) is bool) else NO_FIT


def _fit_tuple(value: object) -> object:
    if isinstance(value, str):
        words: list[str] = []
        for word in filter(None, (part.strip() for part in value.split(","))):
            if words and "=" in word and ":" not in word:  # a second option of the word before
                words[-1] += f",{word}"
            else:
                words.append(word)
        return tuple(words)
    return tuple(value) if isinstance(value, list | tuple) else NO_FIT


def _describe(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    parts = []
    for option in _options(hint):
        if typing.get_origin(option) is typing.Literal:
            parts.append(" or ".join(map(str, typing.get_args(option))))
        elif option is types.NoneType:
            parts.append("none")
        else:
            parts.append(words.get(option, "a list of words separated by commas"))
    return " or ".join(parts)
