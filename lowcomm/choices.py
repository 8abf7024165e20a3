"""Choices by name: each value of a choice is a class in a file of its own, which no list elsewhere has to mention.

A method is a combination of independent choices (a codec, an outer optimizer, a peer rule, ...). Each choice has a
base class that derives from `Choice`; its values are the subclasses that have `names`. They are found by importing
every module of the package in which the base class stands, so a new value takes a new file there and nothing more. A
class in a script or a notebook is a value too, as soon as it is defined.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Any, ClassVar, TypeVar

from lowcomm.settings import ConfigError, nearest


class Choice:
    """The common base class of choices and of their values; a class that has `names` is a value.

    Attributes:
        names: the names by which settings select the value; a class without names is no value itself, but may be the
            base of some.
        settings: the fields of the configuration that mean something with this value, and do not with all others. With
            a value that does not list them they must keep their defaults (`check_settings`).
    """

    names: ClassVar[tuple[str, ...]] = ()
    settings: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        options.cache_clear()  # there is one more


T = TypeVar("T", bound=Choice)


@functools.cache
def options(base: type[T]) -> dict[str, type[T]]:
    """Return all values of the choice `base` by name, in the order of their modules.

    Modules whose name begins with an underscore are not imported: they hold no values. Of a class that is defined
    again, as by a notebook's cell, the last definition counts. Raises ValueError where two classes share a name.
    """
    package = importlib.import_module(base.__module__.rpartition(".")[0])
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{package.__name__}.{module.name}")
    found: dict[str, type[T]] = {}
    todo = [base]
    while todo:
        value = todo.pop(0)
        todo += value.__subclasses__()
        for name in value.__dict__.get("names", ()):
            other = found.get(name, value)
            if (other.__module__, other.__qualname__) != (value.__module__, value.__qualname__):
                raise ValueError(f"{value.__qualname__} and {other.__qualname__} are both named {name!r}")
            found[name] = value
    return dict(sorted(found.items(), key=lambda item: item[1].__module__))


def choose(base: type[T], name: str, where: str) -> type[T]:
    """Return the value of the choice `base` that is named `name`; `where` is the setting that names it, for messages.

    Raises ConfigError, with the nearest name, where there is none.
    """
    found = options(base)
    if name not in found:
        raise ConfigError(f"{where} = {name!r} is not a valid choice{nearest(name, found)}")
    return found[name]


def check_settings(base: type[Choice], name: str, where: str, config: Any, defaults: Any) -> None:
    """Raise ConfigError where a setting of `config` that only other values of the choice have is not at its default.

    Args:
        name: the value chosen. where: the setting that names it, as "method.outer".
        config, defaults: the settings, as they are and as they are by default.
    """
    chosen = choose(base, name, where)
    section = where.rpartition(".")[0]
    for other in options(base).values():
        for key in other.settings:
            if key not in chosen.settings and getattr(config, key) != getattr(defaults, key):
                raise ConfigError(f"{section}.{key} means nothing with {where} = {name}")
