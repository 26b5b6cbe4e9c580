"""Values that travel between processes, where another version of the package may run.

A value is pickled as the version of the package, its class by name and the values of its fields.
No other version reads it: the error names both.

Values in tasks are read without errors, because Dask takes an error of unpickling for a broken
connection and gives up the worker at its other end. An `Unreadable` stands for what cannot be read,
and the task raises its error by `check_readable`.

What thousands of tasks carry, such as a plan, is *shared*: it is pickled once, and read once by
each process as long as anything there has it. That saves a worker 0.1 ms a task, and what is worked
out of a plan is worked out once.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module, metadata
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import cloudpickle

from dask_p2p.errors import P2PError, RegistrationError, VersionError

#: Those that the tests pass with; pyproject.toml has the same. The plugins replace private parts of
#: Dask (see tests/plugins/test_canary.py), so nothing is promised of other releases.
DASK_RELEASES = ">=2025.12,<2026.9"

_C = TypeVar("_C", bound=type)

_shared: WeakValueDictionary[bytes, Any] = WeakValueDictionary()  # by what they were read from


def versioned(*, strict: bool = False, shared: bool = False) -> Callable[[_C], _C]:
    """Have a class pickled with the version of the package: a dataclass, or a named tuple.

    Strict: a value that cannot be read is an error at once; for what does not travel in tasks.
    Shared: all that read the same get one object. That is for what many tasks carry and none
    changes; the class may not have slots.
    """

    def decorate(cls: _C) -> _C:
        reader = read if strict else _read_or_replace

        def reduce(self: Any) -> tuple[Any, ...]:
            values = tuple(getattr(self, name) for name in _names(cls))
            return reader, (own_version(), cls.__module__, cls.__qualname__, values)

        def reduce_once(self: Any) -> tuple[Any, ...]:
            if "_p2p_pickle" not in vars(self):
                vars(self)["_p2p_pickle"] = cloudpickle.dumps(reduce(self)[1])
            return _read_once, (vars(self)["_p2p_pickle"],)

        changed: Any = cls
        changed.__reduce__ = reduce_once if shared else reduce
        # Once for all: each task asks, before it does anything else.
        changed._p2p_names = (
            tuple(field.name for field in fields(cls))
            if is_dataclass(cls)
            else getattr(cls, "_fields", ())
        )
        return cls

    return decorate


def read(version: str, module: str, name: str, values: tuple[Any, ...]) -> Any:
    """Return a value from what was pickled; these parameters stay as they are in all versions.

    `VersionError` if another version wrote it, or its class, perhaps of another package, is not
    here.
    """
    check_version(version)
    try:
        return getattr(import_module(module), name)(*values)
    except (ImportError, AttributeError, TypeError) as exc:
        raise VersionError(
            f"expected {module}.{name} as its sender has it, got {exc}. Install the same packages "
            f"on clients, scheduler and workers."
        ) from exc


def check_version(version: str) -> None:
    """Raise `VersionError` if another version of the package has sent something."""
    if version != own_version():
        raise VersionError(
            f"expected values of {this_version()}, got those of dask_p2p {version}. Install the "
            f"same version on clients, scheduler and workers."
        )


class Unreadable:
    """Stands for a value that another version of the package has written."""

    def __init__(self, error: P2PError) -> None:
        self.error = error  # to be raised where the value is needed


def check_readable(*values: Any) -> None:
    """Raise the error of the first value that is unreadable, or has a field that is."""
    for value in values:
        for part in (value, *(getattr(value, name) for name in _names(type(value)))):
            if isinstance(part, Unreadable):
                raise part.error


def named_fields(value: Any) -> Any:
    """Return the name of a value's class and its fields, in tuples; what does not travel as it is.

    Dask gives equal tokens to equal ones, as it does to dataclasses, for which it pickles the class
    twice every time.
    """
    if isinstance(value, tuple) and any(map(_names, set(map(type, value)))):
        return tuple(map(named_fields, value))
    cls = type(value)
    names = _names(cls)
    if not names:
        return value
    fields_of = (named_fields(getattr(value, name)) for name in names)
    return (f"{cls.__module__}.{cls.__qualname__}", *fields_of)


def this_version() -> str:
    """Name this package with its version."""
    return f"dask_p2p {own_version()}"


@cache
def own_version() -> str:
    """Return the version of this package."""
    try:
        return metadata.version("dask-p2p")
    except metadata.PackageNotFoundError:  # it runs from a folder
        return "unknown"


def check_dask() -> None:
    """Raise `RegistrationError` if this process runs a release of Dask that may not work."""
    from packaging.specifiers import SpecifierSet

    found = metadata.version("distributed")
    if not SpecifierSet(DASK_RELEASES).contains(found, prereleases=True):
        raise RegistrationError(
            f"expected distributed {DASK_RELEASES} with dask_p2p {own_version()}, got distributed "
            f"{found}. On clients, scheduler and workers: pip install 'distributed{DASK_RELEASES}' "
            f"'dask{DASK_RELEASES}', or another release of dask-p2p."
        )


def _read_or_replace(*written: Any) -> Any:
    try:
        return read(*written)
    except P2PError as exc:
        return Unreadable(exc)


def _read_once(pickled: bytes) -> Any:
    value = _shared.get(pickled)
    if value is None:
        value = _read_or_replace(*pickle.loads(pickled))
        vars(value)["_p2p_pickle"] = pickled  # it may travel on
        value = _shared.setdefault(pickled, value)
    return value


def _names(cls: type) -> tuple[str, ...]:
    """Return the names of a value's fields; none for what does not travel."""
    names: tuple[str, ...] = getattr(cls, "_p2p_names", ())
    return names
