"""mpi4py: messages between two processes, and sums of arrays of all processes.

`benchmarks.messages` compares them with those of a section. Small letters, `send`, pickle values.
Capital ones, `Send`, take the memory of arrays.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from math import inf
from typing import Any

import numpy as np

from benchmarks.rivals.mpi_fft import run_once

__all__ = [
    "ALLREDUCE",
    "INTO",
    "NEW",
    "NUMBER",
    "NUMBER_BYTES",
    "least_s",
    "ping_pong",
    "rounds_of",
    "seconds",
]

NUMBER_BYTES = 8  # numbers are compared once, with arrays of this size
NUMBER, NEW, INTO, ALLREDUCE = "number", "new array", "array into memory", "allreduce"
_IN_A_ROW, _SMALL_BYTES = 50, 1 << 14  # calls between looks at the clock, of small values


def rounds_of(size_bytes: int, rounds: int) -> tuple[int, int]:
    """Return the number of rounds, and of calls in a row in each."""
    return (rounds * 10, _IN_A_ROW) if size_bytes <= _SMALL_BYTES else (rounds, 2)


def ping_pong(rank: int, send: Callable[[], Any], receive: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that sends a message there and one back: two in turn."""

    def call() -> None:
        if rank:
            receive()
            send()
        else:
            send()
            receive()

    return call


def least_s(barrier: Callable[[], Any], call: Callable[[], Any], rounds: int, count: int) -> float:
    """Return the seconds of a call in the fastest round of several calls."""
    best_s = inf
    for _ in range(rounds):
        barrier()
        start_s = time.perf_counter()
        for _ in range(count):
            call()
        best_s = min(best_s, (time.perf_counter() - start_s) / count)
    return best_s


def seconds(size_bytes: int, processes: int, rounds: int) -> dict[str, float]:
    """Return the seconds of a message, and of a sum, by each way."""
    report = run_once(__name__, processes, size_bytes, rounds)
    return {name: float(value) for name, value in report.items()}


def measure(size_bytes: int, rounds: int, world: Any) -> dict[str, float]:
    """Time all ways."""
    sent, into = np.zeros(size_bytes // 8), np.zeros(size_bytes // 8)
    peer, options = 1 - world.rank, rounds_of(size_bytes, rounds)

    def messages(send: Callable[[], Any], receive: Callable[[], Any]) -> float:
        call = ping_pong(world.rank, send, receive)
        return least_s(world.Barrier, call, *options) / 2

    seconds = {}
    if world.size == 2:
        if size_bytes == NUMBER_BYTES:
            seconds[NUMBER] = messages(
                lambda: world.send(0.5, peer), lambda: world.recv(source=peer)
            )
        seconds[NEW] = messages(lambda: world.send(sent, peer), lambda: world.recv(source=peer))
        seconds[INTO] = messages(lambda: world.Send(sent, peer), lambda: world.Recv(into, peer))
    seconds[ALLREDUCE] = least_s(world.Barrier, lambda: world.Allreduce(sent, into), *options)
    return seconds


if __name__ == "__main__":
    from mpi4py import MPI

    size_bytes, rounds = map(int, sys.argv[1:])
    report = measure(size_bytes, rounds, MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(report))
