"""Probe blocks: known bytes that every worker can be asked for, to prove that a transport works.

A probe block has a key of its own kind, and is made when it is first asked for. What it holds
follows from its size, so that whoever reads it can tell whether it came unharmed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from importlib import import_module
from typing import Any

from dask_p2p.errors import TransferError
from dask_p2p.kernels import kernel_named

__all__ = ["PROBE_BYTES", "Probes", "check_probe", "is_probe", "probe_key"]

PROBE_BYTES = 2**16  # more than UCX sends at once without a rendezvous
_MOST_BYTES = 2**30
_KINDS = ("numpy", "cupy")
_NAME = "dask-p2p-probe"
_KEPT = 2


#: Key of a probe block: a name, the kind "numpy" or "cupy", and the size in bytes.
_Key = tuple[str, str, int]


def probe_key(kind: str, nbytes: int = PROBE_BYTES) -> _Key:
    """Return the key of a probe block: a 1-D array of so many bytes."""
    return (_NAME, kind, nbytes)


def is_probe(key: Any) -> bool:
    """Tell whether this is the key of a probe block."""
    return isinstance(key, (tuple, list)) and len(key) == 3 and key[0] == _NAME


class Probes:
    """The probe blocks of one worker."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[_Key, Any] = OrderedDict()
        self._lock = threading.Lock()

    def block(self, key: Any) -> Any:
        """Return a probe block.

        Raises
        ------
        ValueError
            If the key asks for what is no probe block, or for too large a one.
        """
        _, kind, nbytes = key
        if kind not in _KINDS or type(nbytes) is not int or not 0 < nbytes <= _MOST_BYTES:
            raise ValueError(
                f"expected a probe block of numpy or cupy and 1 to {_MOST_BYTES} bytes, got {key!r}"
            )
        key = probe_key(kind, nbytes)
        with self._lock:
            if key not in self._blocks:
                self._blocks[key] = _content(kind, nbytes)
                while len(self._blocks) > _KEPT:
                    self._blocks.popitem(last=False)
            return self._blocks[key]

    def clear(self) -> None:
        """Let go of all of them."""
        with self._lock:
            self._blocks.clear()


def _content(kind: str, nbytes: int) -> Any:
    made = kernel_named(kind).empty((nbytes,), "u1")
    made[:] = _pattern(kind, nbytes)
    return made


def _pattern(kind: str, nbytes: int) -> Any:
    """Return bytes of a period that is no power of two, so that a shifted copy is seen."""
    xp = import_module(kind)
    return xp.resize(xp.arange(251, dtype="u1"), nbytes)


def check_probe(region: Any, kind: str) -> None:
    """Raise `TransferError` unless this is a whole probe block of the kind, or a copy of it."""
    if kind == "cupy":
        import cupy

        region = cupy.asarray(region)
    wrong = int((region != _pattern(kind, region.shape[0])).sum())
    if wrong:
        raise TransferError(f"{wrong} of {region.shape[0]} bytes of a probe came changed")
