"""Memory of other processes of this host, read by the kernel's cross-memory attach.

``process_vm_readv`` copies from another process's memory in one system call. This is half of the
work of sockets or shared memory, since it needs neither packing nor sending. The kernel lets a
process read the processes that it may trace, see ptrace(2): those of the same user, unless a
security module restricts this. `own_token` lifts the restriction of one such module.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from secrets import token_bytes
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from dask_p2p import tuning
from dask_p2p.backends.host import kernel_and_namespace, pool, thread_count
from dask_p2p.errors import Obstacle
from dask_p2p.geometry import first_gapless_axis
from dask_p2p.types import Array, DType

MOST_RUNS = 1024  # of one system call: IOV_MAX
PIECE_BYTES = 1 << 24  # of contiguous memory that a thread reads, at least

TOKEN_BYTES = 16
_PROOF = struct.Struct(f"<QQ{TOKEN_BYTES}s")  # process, its token's address, the token
PROOF_BYTES = _PROOF.size
_LET_READ = (
    "Let workers trace each other: docker run --cap-add=SYS_PTRACE, or no security module that "
    "forbids it"
)
_PR_SET_PTRACER = 0x59616D61  # "Yama", from linux/prctl.h
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class RemoteArray(NamedTuple):
    """An array in the memory of another process."""

    pid: int
    address: int  # address of the first element
    shape: tuple[int, ...]  # no extent is 0
    strides: tuple[int, ...]
    dtype: DType

    def read(self, into: Array | None, memory_of: Callable[[int], Array]) -> Any:
        """Copy the array, if possible directly `into` another one. Return the copy.

        `memory_of` returns a buffer of a size, if one is needed. Raises the errors of `read`, and
        `OverflowError` for an address outside of any memory.
        """
        runs = runs_of(self.address, self.shape, self.strides, self.dtype.itemsize)
        if into is not None and read_into(self.pid, runs, into):
            return into
        memory = memory_of(len(runs.addresses) * runs.run_bytes)
        return np.broadcast_to(read(self.pid, runs, self.dtype, memory), self.shape)


class ByteRuns(NamedTuple):
    """A strided region as equal runs of bytes, in memory order."""

    addresses: np.ndarray[Any, Any]  # uint64 addresses of the runs
    run_bytes: int
    shape: tuple[int, ...]  # shape of the region with its axes in memory order
    axes: tuple[int, ...]  # the region's axis d is axis axes[d] of `shape`
    backwards: tuple[bool, ...]  # by axis of the region: true if its stride is negative


def runs_of(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> ByteRuns:
    """Return the runs of a region, given the address of its first element; no extent is 0.

    >>> runs_of(1000, (2, 3), (80, 8), 8)
    ByteRuns(addresses=array([1000, 1080], dtype=uint64), run_bytes=24, shape=(2, 3), axes=(0, 1), \
backwards=(False, False))
    """
    backwards = tuple(s < 0 and n > 1 for s, n in zip(strides, shape, strict=True))
    address += sum(s * (n - 1) for s, n in zip(strides, shape, strict=True) if s < 0)
    extents, steps, order, outer, run_bytes = _in_memory(shape, strides, itemsize)
    addresses = np.array([address], np.uint64)
    for axis in outer:
        along = np.arange(extents[axis], dtype=np.uint64) * np.uint64(steps[axis])
        addresses = (addresses[:, np.newaxis] + along).reshape(-1)
    axes = tuple(order.index(axis) for axis in range(len(shape)))
    return ByteRuns(addresses, run_bytes, tuple(extents[axis] for axis in order), axes, backwards)


def run_bytes_of(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the length of a region's runs, without computing their addresses."""
    return _in_memory(shape, strides, itemsize)[-1]


def _in_memory(
    shape: Sequence[int], strides: Sequence[int], itemsize: int
) -> tuple[list[int], list[int], list[int], list[int], int]:
    """Return a region's extents, steps, axes in memory order, axes around a run, and run bytes."""
    steps = [abs(stride) for stride in strides]
    # Repeated elements are read once.
    extents = [n if step else 1 for n, step in zip(shape, steps, strict=True)]
    order = sorted(range(len(shape)), key=lambda axis: -steps[axis] * (extents[axis] > 1))
    lie = [extents[axis] for axis in order]
    run = first_gapless_axis(lie, [steps[axis] for axis in order], itemsize)
    return extents, steps, order, order[:run], itemsize * prod(lie[run:])


def read(
    pid: int, runs: ByteRuns, dtype: DType, memory: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Copy a region of another process into `memory`; return it as an array in the region's axes.

    `memory` is a 1-D array of bytes, at least of the region's size. `OSError` if the kernel
    refuses: ``ESRCH`` if the process has ended, ``EPERM`` if it may not be read, ``EFAULT`` if it
    has no such memory.
    """
    if runs.run_bytes:
        _read_runs(pid, runs.addresses, runs.run_bytes, *_contiguous(memory.ctypes.data, runs))
    array = np.ndarray(runs.shape, dtype, memory.data).transpose(runs.axes)
    slices: Any = [slice(None, None, -1 if is_turned else 1) for is_turned in runs.backwards]
    return array[(*slices, ...)]  # an array also without axes


def read_into(pid: int, runs: ByteRuns, array: np.ndarray[Any, Any]) -> bool:
    """Copy a region of another process directly into `array`, if both have the same memory order.

    Return true if it was copied. It is not copied if runs are short. `array` is any view with the
    region's shape and dtype.
    """
    local = runs_of(array.ctypes.data, array.shape, array.strides, array.itemsize)
    is_turned = any(local.backwards + runs.backwards)
    if is_turned or (local.shape, local.axes) != (runs.shape, runs.axes):
        return False
    local_addresses, run_bytes_here = local[:2]
    remote_addresses, run_bytes_there = runs[:2]
    if len(local_addresses) == 1:
        local_addresses, run_bytes_here = _contiguous(int(local_addresses[0]), runs)
    elif len(remote_addresses) == 1:
        remote_addresses, run_bytes_there = _cut(int(remote_addresses[0]), local)
    shortest, longest = sorted((run_bytes_here, run_bytes_there))
    least_bytes, ratio = tuning.current.process_run_bytes, MOST_RUNS
    if not least_bytes <= shortest <= longest <= ratio * shortest:
        return False
    _read_runs(pid, remote_addresses, run_bytes_there, local_addresses, run_bytes_here)
    return True


def _contiguous(address: int, runs: ByteRuns) -> tuple[np.ndarray[Any, Any], int]:
    run_bytes = MOST_RUNS * runs.run_bytes
    end = address + len(runs.addresses) * runs.run_bytes
    return np.arange(address, end, run_bytes, dtype=np.uint64), run_bytes


def _cut(address: int, local: ByteRuns) -> tuple[np.ndarray[Any, Any], int]:
    count = len(local.addresses)
    run_limit = min(count, MOST_RUNS)
    at_once = next(n for n in range(run_limit, 0, -1) if count % n == 0)  # few remote runs
    run_bytes = at_once * local.run_bytes
    end = address + count * local.run_bytes
    return np.arange(address, end, run_bytes, dtype=np.uint64), run_bytes


def _read_runs(
    pid: int,
    remote_addresses: np.ndarray[Any, Any],
    run_bytes: int,
    local_addresses: np.ndarray[Any, Any],
    local_run_bytes: int,
) -> None:
    """Copy runs of another process to local runs. One length divides the other."""
    longest = max(run_bytes, local_run_bytes)
    step_bytes = MOST_RUNS * min(run_bytes, local_run_bytes) // longest * longest
    is_large = len(remote_addresses) == len(local_addresses) == 1 and run_bytes >= 2 * PIECE_BYTES
    if is_large:  # contiguous on both sides: a piece for each thread
        step_bytes = local_run_bytes = max(PIECE_BYTES, -(-run_bytes // thread_count()))
        starts = np.arange(0, run_bytes, step_bytes, dtype=np.uint64)
        remote, local = (
            _iovecs(addresses[0] + starts, step_bytes)
            for addresses in (remote_addresses, local_addresses)
        )
        remote[-1, 1] = run_bytes - int(starts[-1])
        run_bytes = step_bytes
    else:
        remote = _iovecs(remote_addresses, run_bytes)
        local = _iovecs(local_addresses, local_run_bytes)
    steps = step_bytes // run_bytes, step_bytes // local_run_bytes

    def read_step(number: int) -> None:
        src, dst = (
            iovecs[number * step :][:step]
            for iovecs, step in zip((remote, local), steps, strict=True)
        )
        # The copy ends with the remote runs; the last local run may be longer.
        copied_bytes = _libc().process_vm_readv(
            pid, dst.ctypes.data, len(dst), src.ctypes.data, len(src), 0
        )
        if copied_bytes != int(src[:, 1].sum()):
            # A short copy: the rest is not mapped there.
            error = ctypes.get_errno() if copied_bytes < 0 else errno.EFAULT
            raise OSError(error, os.strerror(error))

    for _ in (pool().map if is_large else map)(read_step, range(-(-len(remote) // steps[0]))):
        pass


def _iovecs(addresses: np.ndarray[Any, Any], run_bytes: int) -> np.ndarray[Any, Any]:
    iovecs = np.empty((len(addresses), 2), np.uint64)
    iovecs[:, 0] = addresses
    iovecs[:, 1] = run_bytes
    return iovecs


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    libc.process_vm_readv.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
    return libc


@cache
def is_supported() -> bool:
    """Return true if this system has cross-memory attach, as Linux does."""
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "process_vm_readv")


def own_token() -> tuple[int, bytes]:
    """Let other processes read this one. Return the address and the value of its token.

    If Yama allows only parents to read a process, all processes of this user may from now on read
    this one, and trace it. Without Yama the call has no effect.
    """
    _libc().prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    token = _token()
    return token.ctypes.data, token.tobytes()


_tokens = dict[int, np.ndarray[Any, Any]]()  # by process, since a fork has the parent's objects


def _token() -> np.ndarray[Any, Any]:
    """Return random bytes; a reader that finds them at their address reads the right process."""
    if (pid := os.getpid()) not in _tokens:  # all threads get the same ones: others would be freed
        _tokens.setdefault(pid, np.frombuffer(token_bytes(TOKEN_BYTES), np.uint8))
    return _tokens[pid]


def own_proof() -> bytes:
    """Let other processes read this one. Return the proof for `readable_pid`."""
    return _PROOF.pack(os.getpid(), *own_token())


def readable_pid(proof: bytes) -> int:
    """Return the process of a proof if this one can read its memory, else 0."""
    pid, *token = _PROOF.unpack(proof)
    return int(pid) if pid and obstacle(pid, *token) is None else 0


def obstacle(pid: int, address: int, token: bytes) -> Obstacle | None:
    """Return the obstacle to reading the process that has this token, or None."""
    try:
        runs = runs_of(address, (TOKEN_BYTES,), (1,), 1)
        memory = read(pid, runs, np.dtype("u1"), np.empty(TOKEN_BYTES, np.uint8))
    except (OSError, OverflowError) as exc:
        return Obstacle("forbidden", f"its memory may not be read: {exc}", _LET_READ)
    if memory.tobytes() == token:
        return None
    return Obstacle("other-process", "its memory is another process'")


logger = logging.getLogger(__name__)

#: Called with the name of a process that has ended.
OnEnd: TypeAlias = Callable[[str], object]


def own_name() -> str:
    """Return a unique name of this process, for all time."""
    return f"{os.getpid()}-{_token().tobytes().hex()}"


class Processes:
    """Other processes, each watched by a thread until it ends.

    The kernel reports the end of a process after it has closed the process's sockets and freed its
    GPU memory, except memory that others have mapped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By name of a watched process: functions, and true if a function comes last.
        self._calls: dict[str, dict[OnEnd, bool]] = {}
        self._ended = set[str]()  # names; few processes of a host end

    def watch(self, name: str, pid: int, on_end: OnEnd | None = None, last: bool = False) -> None:
        """Watch a process, if the kernel allows it, and call a function once after its end.

        The thread of a process calls its functions, one after another. A function that waits
        for the GPU comes `last`, in a thread of its own, because the GPU may wait until another
        function has returned.
        """
        with self._lock:
            if name not in self._ended and name not in self._calls:
                self._begin(name, pid)
            if on_end is not None and name in self._calls:
                self._calls[name][on_end] = last
            elif on_end is not None and name in self._ended:
                _start_thread(_call, on_end, name)

    def forget(self, name: str, on_end: OnEnd) -> None:
        with self._lock:
            self._calls.get(name, {}).pop(on_end, None)

    def has_ended(self, name: str) -> bool:
        return name in self._ended

    def _begin(self, name: str, pid: int) -> None:
        try:
            number = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended.add(name)
            return
        except OSError as exc:  # an old container forbids the call
            logger.debug("process %s cannot be watched: %s", name, exc)
            return
        self._calls[name] = {}
        _start_thread(self._wait, name, number)

    def _wait(self, name: str, number: int) -> None:
        watch = select.poll()
        watch.register(number, select.POLLIN)
        watch.poll()
        os.close(number)
        with self._lock:
            self._ended.add(name)
            calls = self._calls.pop(name)
        for on_end in sorted(calls, key=calls.__getitem__):
            if calls[on_end]:
                _start_thread(_call, on_end, name)
            else:
                _call(on_end, name)


def _start_thread(function: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=function, args=args, name="dask-p2p-process", daemon=True).start()


def _call(on_end: OnEnd, name: str) -> None:
    try:
        on_end(name)
    except Exception:
        logger.exception("the end of process %s could not be handled", name)


#: All other processes whose memory this one may map.
PROCESSES = Processes()


@dataclass(frozen=True, slots=True)
class Peer:
    """The process of a worker, as far as it decides if others can read its memory."""

    boot_id: str
    pid_namespace: str
    user: int
    pid: int
    process: str  # unique name of the process
    folder: str  # folder of its published descriptors, if any
    memory_proof: str  # token that proves access to the process's memory
    refusal: str | None = None  # reason why it has no folder

    @classmethod
    def describe_self(cls, memory_proof: str, folder: str = "", refusal: str | None = None) -> Peer:
        identity = *kernel_and_namespace(), os.getuid(), os.getpid(), own_name()
        return cls(*identity, folder, memory_proof, refusal)


def separation(local: Peer, remote: Peer) -> Obstacle | None:
    """Return the obstacle to two processes' reading each other's memory, or None."""
    if local.boot_id != remote.boot_id:
        return Obstacle("other-host", "they run on different hosts")
    if local.pid_namespace != remote.pid_namespace:
        return Obstacle(
            "other-namespace",
            "they run in different PID namespaces",
            "Run all workers of a host in one PID namespace (docker run --pid=host)",
        )
    if local.user != remote.user:
        return Obstacle(
            "other-user", "they belong to different users", "Run all workers of a host as one user"
        )
    if local.pid == remote.pid:
        return Obstacle("same-process", "they share a process")
    return None if remote.refusal is None else no_directory(remote.refusal)


def no_directory(text: str) -> Obstacle:
    """Return the obstacle of a worker that cannot publish descriptors."""
    remedy = "Set the worker's --local-directory to a local disk with free space"
    return Obstacle("no-directory", text, remedy)
