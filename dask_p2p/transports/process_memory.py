"""Memory of other processes of this host, read by the kernel's cross-memory attach.

The only user of ``process_vm_readv``, which copies from another process' memory in one system call.
That is half of the work that sockets or shared memory take, since nobody packs and nothing is sent.
The kernel lets a process read those that it might trace, see ptrace(2): of the same user, and not
restricted by a security module. `allow_readers` lifts the restriction of one of these.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from dask_p2p.types import DType

__all__ = [
    "MOST_RUNS",
    "Runs",
    "address_of",
    "allow_readers",
    "is_there",
    "read",
    "run_bytes_of",
    "runs_of",
]

MOST_RUNS = 1024  # of one system call: IOV_MAX
_PR_SET_PTRACER = 0x59616D61  # "Yama", of linux/prctl.h
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class Runs(NamedTuple):
    """A strided region as equal runs of bytes, in the order in which they lie in memory."""

    addresses: np.ndarray[Any, Any]  # uint64, of the first byte of each
    run_bytes: int
    shape: tuple[int, ...]  # of the elements, their axes in that order
    axes: tuple[int, ...]  # the region's axis d is axis axes[d] of these
    backwards: tuple[bool, ...]  # for each axis of the region, whether its stride is negative


def runs_of(address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Runs:
    """Return where the elements of a region lie.

    Parameters
    ----------
    address
        Of its first element.
    shape, strides, itemsize
        Strides and the size of an element in bytes. No extent is 0.

    Examples
    --------
    >>> runs_of(1000, (2, 3), (80, 8), 8)
    Runs(addresses=array([1000, 1080], dtype=uint64), run_bytes=24, shape=(2, 3), axes=(0, 1), \
backwards=(False, False))
    """
    backwards = tuple(stride < 0 for stride in strides)
    address += sum(s * (n - 1) for s, n in zip(strides, shape, strict=True) if s < 0)
    extents, steps, order, outer, run_bytes = _in_memory(shape, strides, itemsize)
    addresses = np.array([address], np.uint64)
    for axis in outer:
        along = np.arange(extents[axis], dtype=np.uint64) * np.uint64(steps[axis])
        addresses = (addresses[:, np.newaxis] + along).reshape(-1)
    places = tuple(order.index(axis) for axis in range(len(shape)))
    return Runs(addresses, run_bytes, tuple(extents[axis] for axis in order), places, backwards)


def run_bytes_of(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return how long the runs of a region are, without looking where each is."""
    return _in_memory(shape, strides, itemsize)[-1]


def _in_memory(
    shape: Sequence[int], strides: Sequence[int], itemsize: int
) -> tuple[list[int], list[int], list[int], list[int], int]:
    """Return a region's extents and steps, its axes in order, those around a run, and its bytes."""
    steps = [abs(stride) for stride in strides]
    # Elements that are repeated are read once.
    extents = [n if step else 1 for n, step in zip(shape, steps, strict=True)]
    order = sorted(range(len(shape)), key=lambda axis: -steps[axis] * (extents[axis] > 1))
    outer = list(order)
    run_bytes = itemsize
    while outer and (extents[outer[-1]] == 1 or steps[outer[-1]] == run_bytes):
        run_bytes *= extents[outer.pop()]
    return extents, steps, order, outer, run_bytes


def read(pid: int, runs: Runs, dtype: DType, memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Copy a region of another process into `memory`; return it as an array in the region's axes.

    Parameters
    ----------
    pid
        Of the process.
    runs
        Where the region is in it.
    dtype
        Of its elements, `numpy.dtype`.
    memory
        1-D array of bytes, at least as many as the region has.

    Raises
    ------
    OSError
        If the kernel refuses: ``ESRCH`` where the process has ended, ``EPERM`` where it may not be
        read, ``EFAULT`` where there is no such memory in it.
    """
    _read_runs(pid, runs.addresses, runs.run_bytes, memory)
    array = np.ndarray(runs.shape, dtype, memory.data).transpose(runs.axes)
    turned: list[Any] = [slice(None, None, -1 if back else 1) for back in runs.backwards]
    return array[(*turned, ...)]  # of no axes, too, an array


def _read_runs(
    pid: int, addresses: np.ndarray[Any, Any], run_bytes: int, memory: np.ndarray[Any, Any]
) -> None:
    if not run_bytes:
        return
    remote = np.empty((len(addresses), 2), np.uint64)  # of struct iovec: address, bytes
    remote[:, 0] = addresses
    remote[:, 1] = run_bytes
    local = np.empty(2, np.uint64)
    base = memory.ctypes.data
    for first in range(0, len(remote), MOST_RUNS):
        part = remote[first : first + MOST_RUNS]
        local[:] = base + first * run_bytes, len(part) * run_bytes
        done = _libc().process_vm_readv(pid, local.ctypes.data, 1, part.ctypes.data, len(part), 0)
        if done != len(part) * run_bytes:
            # Less than all: what follows lies where nothing is mapped.
            error = ctypes.get_errno() if done < 0 else errno.EFAULT
            raise OSError(error, os.strerror(error))


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    libc.process_vm_readv.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
    return libc


@cache
def is_there() -> bool:
    """Return whether this system has cross-memory attach: Linux does."""
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "process_vm_readv")


def allow_readers() -> None:
    """Let all processes of this user read this one's memory, where Yama allows its parents only.

    With that they may trace it, too. It does nothing where Yama is not there.
    """
    _libc().prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Return the address of an array's first element in this process."""
    return int(array.__array_interface__["data"][0])
