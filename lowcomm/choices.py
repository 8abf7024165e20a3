"""Choices by name: a value of one is a class in a file of its own, which no list elsewhere has to mention.

A method is a combination of independent choices (a codec, an outer optimizer, a peer rule, ...). Each choice has a
base class that derives from `Choice`; its values are the subclasses that have `names`. They are found by importing
every module of the package in which the base class stands, so a new value is a new file there, and nothing more; or a
class in a script or a notebook, from where it is defined.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Any, ClassVar, TypeVar

from lowcomm.settings import ConfigError, nearest


class Choice:
    """A value of a choice.

    Attributes:
        names: what settings call it; a class without names is no value itself, but may be the base of some.
        settings: the fields of the method's configuration that mean something with this value, and do not with all
            others. With a value that does not list them they must keep their defaults (`check_settings`).
    """

    names: ClassVar[tuple[str, ...]] = ()
    settings: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        options.cache_clear()  # there is one more


T = TypeVar("T", bound=Choice)


@functools.cache
def options(base: type[T]) -> dict[str, type[T]]:
    """All values of the choice `base` by name, in the order of their modules. Raises ValueError for a name used twice.

    Modules whose name begins with an underscore are not imported: they hold no values. Of a class that is defined
    again, as by a notebook's cell, the last counts.
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
    """The value of the choice `base` with this name. Raises ConfigError that names the nearest; `where` begins it."""
    found = options(base)
    if name not in found:
        raise ConfigError(f"{where} = {name!r} is not a valid choice{nearest(name, found)}")
    return found[name]


def check_settings(base: type[Choice], name: str, where: str, config: Any, defaults: Any) -> None:
    """Raise ConfigError where a setting of `config` belongs to another value of the choice, and is not its default.

    Args:
        name: the value chosen. where: its setting, as "method.outer".
        config, defaults: the dataclass that holds the settings, as it is and as it is by default.
    """
    chosen = choose(base, name, where)
    section = where.rpartition(".")[0]
    for other in options(base).values():
        for key in other.settings:
            if key not in chosen.settings and getattr(config, key) != getattr(defaults, key):
                raise ConfigError(f"{section}.{key} means nothing with {where} = {name}")
