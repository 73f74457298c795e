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
    read: Any = literal(value) if isinstance(value, str) else value
    number = isinstance(read, int | float) and not isinstance(read, bool)
    for kind in _kinds(hint):
        origin = typing.get_origin(kind)
        if kind in (bool, types.NoneType) and isinstance(read, kind):
            return read
        if number and (kind is float or (kind is int and float(read).is_integer())):
            return kind(read)
        if kind is str and isinstance(value, str):
            return value
        if origin is typing.Literal and value in typing.get_args(kind):
            return value
        if origin is tuple and isinstance(value, str | list | tuple):
            return _words(value) if isinstance(value, str) else tuple(value)
        if origin is Mapping:
            parsed = json.loads(value) if isinstance(value, str) else value
            if isinstance(parsed, Mapping):
                return dict(parsed)
    raise LabError(f"{name} must be {_describe(hint)}, got {value!r}.")


def _kinds(hint: Any) -> list[Any]:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return [hint]
    return sorted(typing.get_args(hint), key=lambda kind: kind is str)  # text fits anything: last


def _words(text: str) -> tuple[str, ...]:
    words: list[str] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        if words and "=" in word and ":" not in word:  # a second option of the word before
            words[-1] += f",{word}"
        else:
            words.append(word)
    return tuple(words)


def _describe(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    parts = []
    for option in _kinds(hint):
        if typing.get_origin(option) is typing.Literal:
            parts.append(" or ".join(map(str, typing.get_args(option))))
        elif option is types.NoneType:
            parts.append("none")
        else:
            parts.append(words.get(option, "a list of words separated by commas"))
    return " or ".join(parts)
