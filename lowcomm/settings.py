"""Typed settings: dataclasses whose numbers carry their bounds, and how they are made from mappings.

Numbers are coerced by declared type (PyYAML reads 1e-4 as a string) and an unknown key is an error that names the
nearest valid one.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import numbers
import operator
import reprlib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal


class ConfigError(ValueError):
    """Raised for a setting that breaks a rule; the message names the value and the rule."""


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxstring, _BRIEF.maxother = 2, 100, 100


def brief(value: Any) -> str:
    """Return the `repr` of a value, cut short where it is long or deep."""
    return _BRIEF.repr(value)


def nearest(word: str, options: typing.Iterable[str]) -> str:
    """Return '; did you mean X?' with the option closest to `word`, or '; valid: ...' with all where none is close."""
    options = sorted(options)
    close = difflib.get_close_matches(str(word), options, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; valid: {', '.join(options)}"


def first_difference(first: Mapping[str, Any], second: Mapping[str, Any], one: str = "there", two: str = "here") -> str:
    """Describe the first difference between two mappings of settings by name; return "" where they are equal.

    The text reads 'train.lr is 0.1 there and 0.2 here (and 2 more differ)'; `one` and `two` are its words for the place
    of each mapping.
    """
    differ = [key for key in {**first, **second} if first.get(key) != second.get(key)]
    if not differ:
        return ""
    told = [brief(settings.get(differ[0])) for settings in (first, second)]
    more = f" (and {len(differ) - 1} more differ)" if len(differ) > 1 else ""
    return f"{differ[0]} is {told[0]} {one} and {told[1]} {two}{more}"


def number(
    default: Any = dataclasses.MISSING,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Return a field of a settings dataclass that `check_bounds` keeps within these bounds; None sets no bound."""
    bounds = {"at least": at_least, "at most": at_most, "above": above, "below": below}
    return dataclasses.field(default=default, metadata={k: v for k, v in bounds.items() if v is not None})


_WITHIN = {
    "at least": lambda value, bound: value >= bound,
    "at most": lambda value, bound: value <= bound,
    "above": lambda value, bound: value > bound,
    "below": lambda value, bound: value < bound,
}


def whole_number(name: str, value: Any, *, at_least: int = 0) -> int:
    """Return a whole number of any integer type as an int. Raises ConfigError where it is none, or below `at_least`."""
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or found < at_least:
        raise ConfigError(f"{name} must be a whole number from {at_least} on, got {value!r}")
    return found


def check_bounds(section: str, values: Any) -> None:
    """Raise ConfigError where a field of a settings dataclass is out of its bounds, or not finite.

    `section` prefixes the field's name in the message.
    """
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{section}.{field.name}".removeprefix(".") + f" must be finite, got {value}")
        if field.metadata and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
            name = f"{section}.{field.name}".removeprefix(".")
            raise ConfigError(f"{name} must be a number, got {value!r}")
        for rule, bound in field.metadata.items():
            if not _WITHIN[rule](value, bound):
                name = f"{section}.{field.name}" if section else field.name
                raise ConfigError(f"{name} must be {rule} {bound}, got {value}")


def _coerce(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _coerce(next(a for a in typing.get_args(kind) if a is not type(None)), value, where)
    if origin is Literal:
        options = typing.get_args(kind)
        if value not in options:
            raise ConfigError(f"{where} = {brief(value)} is not a valid choice{nearest(value, map(str, options))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} = {brief(value)} must be a list")
        return tuple(_coerce(typing.get_args(kind)[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if dataclasses.is_dataclass(kind):
        return build(kind, value, where)
    if kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{where} = {brief(value)} must be true or false")
        return value
    if kind is str:
        if not isinstance(value, str):
            raise ConfigError(f"{where} = {brief(value)} must be a string")
        return value
    if isinstance(value, bool):
        raise ConfigError(f"{where} = {brief(value)} must be a number")
    if kind is int and type(value) is int:
        return value  # as a float, it might be another one
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{where} = {brief(value)} must be a number") from None
    if not math.isfinite(number):
        raise ConfigError(f"{where} = {brief(value)} must be finite")
    if kind is int:
        if number != int(number):
            raise ConfigError(f"{where} = {brief(value)} must be a whole number")
        return int(number)
    return number


_hints = functools.cache(typing.get_type_hints)


def build(cls: type, mapping: Any, where: str) -> Any:
    """Make the dataclass `cls` from a mapping, coercing each value to its field's type; `where` prefixes messages.

    Raises ConfigError for a key that is unknown or missing, for a value that is not of its field's type, and where
    `cls` itself raises a ValueError.
    """
    if not isinstance(mapping, dict):
        raise ConfigError(f"{where} must be a mapping of settings, got {brief(mapping)}")
    hints = _hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values = {}
    for key, value in mapping.items():
        if key not in fields:
            raise ConfigError(f"unknown key {where}.{key}{nearest(key, fields)}")
        values[key] = _coerce(hints[key], value, f"{where}.{key}")
    missing = [
        n
        for n, f in fields.items()
        if n not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
