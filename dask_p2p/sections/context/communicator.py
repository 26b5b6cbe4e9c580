"""Communicators: some ranks of a section, with messages and collective operations of their own."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from dask_p2p.errors import InputError, MissingPackageError
from dask_p2p.inputs import nearest_name
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.context.collectives import Reductions
from dask_p2p.sections.exchange.device import Host
from dask_p2p.sections.exchange.redistribution import Partitions
from dask_p2p.sections.wire.connections import Connections, GroupConnections

#: Names of mpi4py that are others here, not in lower case alone.
_OF_MPI = {
    "Get_rank": "rank",
    "Get_size": "size",
    "Allgatherv": "allgather(value, ragged=True)",
    "Gatherv": "gather(value, ragged=True)",
    "Scatterv": "scatter",
    "Alltoallv": "alltoall",
    "Alltoallw": "alltoall",
    "Ibcast": "bcast",
    "Ssend": "send",
    "Sendrecv_replace": "sendrecv",
    "Cart_create": "grid, the ranks along each axis",
    "Get_coords": "box, the position of the local block",
    "Get_topo": "grid",
    "Shift": "along(axis), whose neighbours are rank - 1 and rank + 1",
    "Sub": "along(axis)",
    "Split_type": "split",
}


class Communicator(Reductions):
    """Some of the ranks of a section, from `split` or `along`, as a communicator of MPI.

    All of its ranks must call the same methods in the same order.

    Attributes
    ----------
    rank, size : int
        This rank in the communicator, and the number of its ranks.
    """

    def __init__(
        self,
        rank: int,  # this rank
        size: int,  # number of ranks
        connections: Connections,  # connections to the other ranks
        device: Host,  # of the arrays
        name: str = "",  # the same on its ranks; "" for all ranks of the section
    ) -> None:
        super().__init__(rank, size, connections, device)
        self._name, self._splits = name, 0
        self.communicator = crc32(name.encode())

    if not TYPE_CHECKING:  # type checkers name unknown attributes

        def __getattr__(self, name: str) -> Any:
            names = [*(public for public in dir(type(self)) if public[0] != "_"), "rank", "size"]
            remedy = _OF_MPI.get(name, name.lower())
            if remedy.partition("(")[0].partition(",")[0] not in [*names, "grid", "box"]:
                remedy = nearest_name(name, names)
            raise AttributeError(
                f"expected an attribute of the context, got {name!r}. Use ctx.{remedy}.", name=name
            )

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Divide the ranks into communicators: one for each color. All ranks must call this.

        Parameters
        ----------
        color : int or None
            Ranks with the same number are in one communicator. A rank with None is in none.
        key : int, optional
            Order of the ranks in the communicator. Ranks with the same key keep their order.

        Returns
        -------
        Communicator or None
            The communicator of this rank's color. It has ``rank``, ``size``, messages and
            collective operations.

        Raises
        ------
        InputError
            If `color` or `key` is no integer.
        SectionError
            If the ranks made different calls.
        """
        try:
            choice = (color is not None, 0 if color is None else index(color), index(key))
        except TypeError:
            raise InputError(
                f"expected integers as color and key, got {color!r} and {key!r}. Give color=None "
                f"for a rank without a communicator."
            ) from None
        self._splits += 1
        choices = [
            (bool(is_in), group, at)
            for is_in, group, at in self.allgather(np.array(choice)).tolist()
        ]
        if color is None:
            return None
        members = [
            (at, rank)
            for rank, (is_in, group, at) in enumerate(choices)
            if is_in and group == choice[1]
        ]
        ranks = [rank for _, rank in sorted(members)]
        return self._group(ranks, f"split {self._splits}, color {choice[1]}")

    def nccl_id(self) -> bytes | tuple[int, ...]:
        """Return a new identifier for a communicator of NCCL, the same on all ranks.

        For example ``nccl.NcclCommunicator(ctx.size, ctx.nccl_id(), ctx.rank)`` after ``from
        cupy.cuda import nccl``. The function must destroy that communicator before it returns. All
        ranks must call this.

        Returns
        -------
        bytes or tuple of int
            The identifier, as `cupy.cuda.nccl.get_unique_id` returns it on rank 0: bytes from CuPy
            14 on.

        Raises
        ------
        MissingPackageError
            If rank 0 has no CuPy, or one without NCCL.
        SectionError
            If the ranks made different calls.
        """
        message = None
        if self.rank == 0:
            message = np.array([isinstance(nccl_id := _new_nccl_id(), bytes), *nccl_id], np.int64)
        is_bytes, *values = self.bcast(message).tolist()
        return bytes(values) if is_bytes else tuple(values)

    def _group(self, ranks: list[int], name: str) -> Communicator:
        full_name = f"{name} of {self._name}" if self._name else name
        connections = GroupConnections(self._connections, ranks, name)
        at, size = connections.rank_and_size
        group = Communicator(at, size, connections, self.device, full_name)
        group.reads_memory = self.reads_memory
        group.reduces_by_messages = self.device.backend.on_device
        if not group.reduces_by_messages:
            options = connections, self.reads_memory, self.device
            group._partitions = Partitions(RankGrid.in_line(size), at, *options)
        return group


def _new_nccl_id() -> Any:
    try:
        from cupy.cuda import nccl

        if nccl.available:
            return nccl.get_unique_id()
    except ImportError:
        pass
    raise MissingPackageError(
        "nccl_id: expected CuPy with NCCL on the worker of rank 0, got none. Install CuPy there, "
        "for example by pip install cupy-cuda13x, and nvidia-nccl-cu13 for NCCL.",
        name="cupy",
    )
