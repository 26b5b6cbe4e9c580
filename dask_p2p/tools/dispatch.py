"""Calls of Dask's functions that this package takes, and their count."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import accumulate
from threading import RLock
from typing import Any
from weakref import WeakSet

from dask import config

from dask_p2p.errors import InputError, P2PWarning, RegistrationError
from dask_p2p.plugins.registration import connection_of, current_client

LOCK = RLock()
#: Active installations that are referenced: each counts calls in its `counts`.
COUNTING: WeakSet[Any] = WeakSet()
#: Connections to clusters that lack the package.
LACKING: WeakSet[Any] = WeakSet()

#: Active installations that take all rechunks that move bytes.
TAKING_ALL: set[Any] = set()


def is_taken_in_any_case(before: Any, after: Any) -> bool:
    """Return whether an installation takes a rechunk, even if Dask would choose tasks."""
    if not TAKING_ALL or config.get("array.rechunk.method", None) is not None:
        return False
    connection = connection_of(current_client())
    if connection is None or connection in LACKING:
        return False
    pairs = [*zip(before, after, strict=True)]
    if any(size != size for along in pairs for sizes in along for size in sizes):
        return False
    # Blocks that are only split stay on their workers.
    return any(not {*accumulate(old)} <= {*accumulate(new)} for old, new in pairs)


def try_replace(verb: str, make: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return the array that `make` returns, and count the call under `verb`.

    None if this package does not support the arguments, or the cluster lacks the package.
    """
    connection = connection_of(current_client())
    if connection in LACKING:
        return None
    try:
        result = make(*args, **kwargs)
    except InputError:
        return None
    except RegistrationError as exc:
        if connection is not None:
            LACKING.add(connection)
        warnings.warn(f"dask_p2p: Dask's own function is used: {exc}", P2PWarning, stacklevel=4)
        return None
    if result is not None:
        with LOCK:
            for installation in COUNTING:
                installation.counts[verb] += 1
    return result
