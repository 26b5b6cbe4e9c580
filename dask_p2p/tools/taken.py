"""Calls of Dask's functions that this package takes, and their count."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from threading import RLock
from typing import Any
from weakref import WeakSet

from dask_p2p.errors import InputError, P2PWarning, RegistrationError
from dask_p2p.plugins.registration import connection_of, current_client

LOCK = RLock()
#: Active installations that are referenced: each counts calls in its `counts`.
COUNTING: WeakSet[Any] = WeakSet()
#: Connections to clusters that lack the package.
LACKING: WeakSet[Any] = WeakSet()


def tried(verb: str, make: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
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
