"""Values that are sent between processes, which may run other versions of the package.

A value is pickled as the package's version, the name of its class and the values of its fields. Any
other version refuses it, with an error that names both versions.

Values in tasks are read without errors, because Dask treats an error of unpickling as a broken
connection, and gives up the worker at its other end. An `Unreadable` replaces an unreadable value,
and the task raises its error by `check_readable`.

A value that thousands of tasks carry, such as a plan, is *shared*: it is pickled once, and each
process reads it once while it is in use there. This saves a worker 0.1 ms a task, and derived data
of a plan are computed once.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import metadata
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import cloudpickle

from dask_p2p.errors import P2PError, RegistrationError, VersionError
from dask_p2p.loading import loaded

#: Releases of Dask that pass the tests, as in pyproject.toml. Other releases are unsupported,
#: because the plugins replace private parts of Dask (see tests/plugins/test_canary.py).
DASK_RELEASES = ">=2025.12,<2026.9"

#: Releases of the package dask-array that pass the tests, as in pyproject.toml. Private parts of it
#: are used in dask_p2p/graph/arrays.py.
DASK_ARRAY_RELEASES = ">=0.7.1,<0.8"

_C = TypeVar("_C", bound=type)

_shared: WeakValueDictionary[bytes, Any] = WeakValueDictionary()  # by their pickled bytes


def versioned(*, strict: bool = False, shared: bool = False) -> Callable[[_C], _C]:
    """Pickle instances of a dataclass or named tuple with the package's version.

    Strict: reading raises an error for an unreadable value; for values outside tasks.
    Shared: all readers of one value in a process get the same object; for values that many tasks
    carry and no task changes. The class may not have slots.
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
        # Computed once, because each task reads it first.
        changed._p2p_names = (
            tuple(field.name for field in fields(cls))
            if is_dataclass(cls)
            else getattr(cls, "_fields", ())
        )
        return cls

    return decorate


def read(version: str, module: str, name: str, values: tuple[Any, ...]) -> Any:
    """Return a value from its pickled form; all versions keep these parameters.

    Raises `VersionError` if another version wrote it, or this process lacks its class, perhaps
    of another package.
    """
    check_version(version)
    try:
        return getattr(loaded(module), name)(*values)
    except (ImportError, AttributeError, TypeError) as exc:
        raise VersionError(
            f"expected the sender's version of {module}.{name}, got {exc}. Install the same "
            f"packages on clients, scheduler and workers."
        ) from exc


def check_version(version: str) -> None:
    """Raise `VersionError` if the sender's version differs from this one."""
    if version != own_version():
        raise VersionError(
            f"expected values of {this_version()}, got values of dask_p2p {version}. Install the "
            f"same version on clients, scheduler and workers."
        )


class Unreadable:
    """Placeholder of a value from another version of the package."""

    def __init__(self, error: P2PError) -> None:
        self.error = error  # raised by `check_readable`


def check_readable(*values: Any) -> None:
    """Raise the error of the first unreadable value or field of a value."""
    for value in values:
        for part in (value, *(getattr(value, name) for name in _names(type(value)))):
            if isinstance(part, Unreadable):
                raise part.error


def named_fields(value: Any) -> Any:
    """Return tuples of a versioned value's class name and fields; other values unchanged.

    Dask gives equal tuples equal tokens. It does so for dataclasses too, but pickles the class
    twice each time.
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
    """Return this package's name and version."""
    return f"dask_p2p {own_version()}"


@cache
def own_version() -> str:
    """Return the version of this package."""
    try:
        return metadata.version("dask-p2p")
    except metadata.PackageNotFoundError:  # not installed: it runs from a folder
        return "unknown"


def check_dask() -> None:
    """Raise `RegistrationError` if this process runs an unsupported release of Dask."""
    from packaging.specifiers import SpecifierSet

    found = metadata.version("distributed")
    if not SpecifierSet(DASK_RELEASES).contains(found, prereleases=True):
        raise RegistrationError(
            f"expected distributed {DASK_RELEASES} with dask_p2p {own_version()}, got distributed "
            f"{found}. On clients, scheduler and workers: pip install 'distributed{DASK_RELEASES}' "
            f"'dask{DASK_RELEASES}', or another release of dask-p2p."
        )


@cache
def check_dask_array() -> None:
    """Raise `VersionError` if this process runs an unsupported release of dask-array."""
    from packaging.specifiers import SpecifierSet

    found = metadata.version("dask-array")
    if not SpecifierSet(DASK_ARRAY_RELEASES).contains(found, prereleases=True):
        raise VersionError(
            f"expected dask-array {DASK_ARRAY_RELEASES} with dask_p2p {own_version()}, got "
            f"dask-array {found}. On clients, scheduler and workers: pip install "
            f"'dask-array{DASK_ARRAY_RELEASES}', or another release of dask-p2p."
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
        vars(value)["_p2p_pickle"] = pickled  # this process may send it further
        value = _shared.setdefault(pickled, value)
    return value


def _names(cls: type) -> tuple[str, ...]:
    """Return the names of a versioned value's fields; none for other values."""
    names: tuple[str, ...] = getattr(cls, "_p2p_names", ())
    return names
