"""The handles of a suspended gang, which are data of Dask.

So Dask spills them, and moves them from workers that retire. A checkpoint of the ranks becomes
these data, with its copies: the loss of one worker leaves a copy of each rank's handles. Dask
removes replicas of the same key, so that copies have keys of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from distributed import Future, Worker
from distributed.utils_comm import gather_from_workers

from dask_p2p.fusing.resident.events import Ranks
from dask_p2p.geometry import Index
from dask_p2p.types import Key

#: Index and size in bytes of each block that a rank has.
Sizes: TypeAlias = Sequence[tuple[Index, int]]

_OWN, _COPY = 0, 1  # of a rank's state


@dataclass(frozen=True)
class StoredHandles:
    """The stored handles of a gang, as its client has them. They go with the futures."""

    name: str
    number: int  # of the checkpoint
    futures: Mapping[Key, Any]


async def registered(client: Any, name: str, sizes: Sequence[Sizes], ranks: Ranks) -> Any:
    """Register blocks with the scheduler, before the ranks add them; return their futures, by key.

    Raises `KeyError` if the scheduler has lost a worker.
    """
    who_has, nbytes = dict[Key, list[str]](), dict[Key, int]()
    for (address, *_), blocks in zip(ranks, sizes, strict=True):
        who_has |= {(name, *index): [address] for index, _ in blocks}
        nbytes |= {(name, *index): size_bytes for index, size_bytes in blocks}
    await client.scheduler.update_data(who_has=who_has, nbytes=nbytes, client=client.id)
    futures = {key: Future(key, client) for key in who_has}
    for key in futures:
        client.futures[key].finish()
    return futures


def sizes_of(rank: int, states: Mapping[int, Any]) -> list[tuple[Index, int]]:
    """Return the index and size of each state on the worker of a rank, its own and copies."""
    return [(_index(rank, of), len(state)) for of, state in states.items()]


def blocks_of(name: str, rank: int, states: Mapping[int, Any]) -> dict[Key, Any]:
    """Return states as blocks of Dask, by key. They share the memory of the states."""
    return {(name, *_index(rank, of)): np.frombuffer(each, "u1") for of, each in states.items()}


async def stored_state(worker: Worker, name: str, rank: int) -> memoryview | None:
    """Return the state of a rank, from any worker; None if all of its copies are lost."""
    for which in (_OWN, _COPY):
        key = (name, rank, which)
        who_has = await worker.scheduler.who_has(keys=[key])
        data, *_ = await gather_from_workers(who_has, rpc=worker.rpc)
        if key in data:
            return memoryview(data[key])
    return None


def _index(rank: int, of: int) -> Index:
    return (of, _OWN if of == rank else _COPY)
