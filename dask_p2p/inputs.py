"""Checks of users' arguments: clients, numbers, flags, choices and dtypes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import SequenceMatcher
from operator import index
from os.path import basename
from typing import Any

from dask_p2p.errors import InputError


def checked_client(client: Any) -> Any:
    """Return an open client; by default the current one."""
    from distributed import Client, default_client

    client = default_client() if client is None else client
    if not isinstance(client, Client):
        raise InputError(
            f"expected a distributed.Client, got {client!r}. Make one from a cluster, or from the "
            f"address of its scheduler: Client(cluster)."
        )
    if client.status in ("closing", "closed"):
        raise InputError("expected an open client: the client is closed. Make another one.")
    return client


def as_integer(value: Any, otherwise: int) -> int:
    """Return an integer of any type as one of Python; `otherwise` for any other value."""
    try:
        return index(value)
    except TypeError:
        return otherwise


def checked_count(unit: str, least: int = 1, **argument: Any) -> int:
    """Return a number of at least `least`, given as a keyword with its parameter's name."""
    ((name, value),) = argument.items()
    count = least - 1 if isinstance(value, bool) else as_integer(value, least - 1)
    if count < least:
        raise InputError(
            f"expected a number of {unit}, at least {least}, got {name}={value!r}. Give an "
            f"integer, {name}={least} or more."
        )
    return count


def checked_flag(name: str, value: Any, expected: str = "True or False") -> bool:
    """Return a Boolean of Python or NumPy. A text or a number may be a mistake."""
    if type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise InputError(f"{name}: expected {expected}, got {value!r}.")


def checked_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """Return a parameter that is one of some texts. Raises `InputError` for any other value."""
    if isinstance(value, str) and value in choices:
        return value
    raise InputError(
        f"{name}: expected one of {', '.join(choices)}, got {value!r:.80}. Name one of these."
    )


def checked_dtype(name: str, dtype_like: Any) -> Any:
    """Return a dtype with elements. Raises `InputError` for any other value."""
    import numpy as np

    try:
        dtype = np.dtype(dtype_like)
    except (TypeError, ValueError):
        dtype = np.dtype("V0")
    if dtype.kind == "V" and not dtype.itemsize:
        raise InputError(
            f"{name}: expected a dtype, got {dtype_like!r:.80}. Give a type such as float, or a "
            f"text such as 'float32'."
        )
    return dtype


def describe_function(function: Any) -> str:
    """Return the name of a user's function in errors, with its place.

    >>> describe_function(len)
    '<built-in function len>'
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return f"{function!r:.80}"
    name = "the lambda" if function.__name__ == "<lambda>" else f"{function.__name__}()"
    return f"{name} at {basename(code.co_filename)}, line {code.co_firstlineno}"


def nearest_name(name: str, candidates: Iterable[str]) -> str:
    """Return the known name that is most similar to another one.

    >>> nearest_name("workers", ["name", "n_workers", "worker_class"])
    'n_workers'
    """
    return max(sorted(candidates), key=lambda text: SequenceMatcher(None, name, text).ratio())


def pluralize(count: float, noun: str) -> str:
    """Return a number with its noun, in the plural if needed.

    >>> pluralize(1, "stage"), pluralize(2, "stage")
    ('1 stage', '2 stages')
    """
    return f"{count:.12g} {noun}{'s' * (count != 1)}"
