"""Checkpoints in files of a state: values that change in a loop of `Context.steps`.

Arrays of the local block's shape are parts of one array of the store, so any number of ranks may
resume. Numbers are the same on all ranks. Other values, such as series and generators, are stored
once if they are the same on all ranks. If they differ, as many ranks must resume.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_p2p.errors import InputError
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.context.state import Leaf, State
from dask_p2p.sections.iterate.output.checkpoint_folder import ATTRIBUTES, CheckpointFolder
from dask_p2p.sections.iterate.output.fingerprints import Parts, fingerprint, fingerprint_of_same
from dask_p2p.sections.iterate.output.folders import Folder
from dask_p2p.sections.iterate.output.groups import create_arrays, created, plain
from dask_p2p.sections.iterate.output.specs import store_chunks

if TYPE_CHECKING:
    from dask_p2p.sections.iterate.output.specs import CheckpointArguments

DIVIDED, NUMBER, OWN = "divided", "number", "of each rank"


class StateValues:
    """The values of a rank's state, with names for a store.

    Parameters
    ----------
    ctx : Context
        The rank.
    state : State
        The values.
    """

    def __init__(self, ctx: Context, state: State) -> None:
        self._ctx, self._state, self.grid = ctx, state, ctx.grid_of().ranks
        leaves = state.leaves()
        self.names = _array_names([*leaves])
        divided = np.array([self._is_divided(each) for each in leaves.values()], bool)
        on_all = ctx.allreduce(divided, "all") if divided.size else divided
        self.kinds = [
            DIVIDED if is_divided else NUMBER if each.kind in ("number", "python") else OWN
            for each, is_divided in zip(leaves.values(), on_all, strict=True)
        ]

    def _is_divided(self, leaf: Leaf) -> bool:
        return leaf.kind == "array" and leaf.array.shape == self.grid.shape(self._ctx.rank)

    def leaves(self) -> dict[str, Leaf]:
        """Return the current values by name. Raises `InputError` if one has another kind now."""
        leaves = self._state.leaves()
        for (text, leaf), kind in zip(leaves.items(), self.kinds, strict=True):
            if kind == DIVIDED and not self._is_divided(leaf):
                raise InputError(
                    f"state: expected {text} of the local block's shape, "
                    f"{self.grid.shape(self._ctx.rank)}, as before the first step, got "
                    f"{leaf.array.shape}. Keep its shape."
                )
        return dict(zip(self.names, leaves.values(), strict=True))

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return copies of the current values in host memory, by name."""
        found = {}
        for name, leaf in self.leaves().items():
            found[name] = np.empty(leaf.array.shape, leaf.array.dtype)
            self._ctx.device.copy_to_host(found[name], leaf.array)
        return found

    def fingerprints(self) -> dict[str, np.uint64]:
        """Return fingerprints of this rank's parts, by name; none of values of each rank."""
        found, ctx = {}, self._ctx
        for (name, leaf), kind in zip(self.leaves().items(), self.kinds, strict=True):
            if kind == DIVIDED:
                found[name] = fingerprint(ctx.device, leaf.array, ctx.box)
            elif kind == NUMBER:
                found[name] = fingerprint_of_same(ctx.device, leaf.array, ctx.rank)
        return found


class StateFiles(CheckpointFolder):
    """The checkpoints in files of one rank's state."""

    def __init__(self, spec: CheckpointArguments, ctx: Context, state: State) -> None:
        self._state, self._values = state, StateValues(ctx, state)
        super().__init__(spec, ctx, self._values.fingerprints())
        self._kinds = dict(zip(self._values.names, self._values.kinds, strict=True))
        self._chunks = store_chunks(self._values.grid.chunks)
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}  # copies for the next checkpoint
        self._differing = set[str]()  # names of those that differ between ranks

    def _shapes(self) -> dict[str, Any]:
        """Return the shape in the store, and the dtype, of each value."""
        whole, kinds = tuple(map(sum, self._values.grid.chunks)), self._kinds
        return {
            name: (whole if kinds[name] == DIVIDED else (), leaf.array.dtype)
            for name, leaf in self._values.leaves().items()
        }

    def _program(self) -> dict[str, Any]:
        shapes, kinds = self._shapes(), self._kinds
        divided = {name: each for name, each in shapes.items() if kinds[name] == DIVIDED}
        return {"format": ATTRIBUTES["format"], "values": kinds, "arrays": plain(divided)}

    def _details(self) -> dict[str, Any]:
        return {"ranks": self.ctx.size if self._differing else None, "own": [*self._differing]}

    def _check(self, record: Mapping[str, Any]) -> None:
        if record["ranks"] not in (None, self.ctx.size):
            raise InputError(
                f"ranks: expected {record['ranks']} ranks, as the checkpoint at {self} has values "
                f"that differ between ranks, got {self.ctx.size}. Give ranks={record['ranks']}."
            )

    def _load(self, group: Any, record: Mapping[str, Any]) -> np.uint64:
        parts, values = Parts(), []
        for name, kind in self._kinds.items():
            if kind == DIVIDED:
                values.append(parts.read(group, name, self.ctx.box))
            elif name in record["own"]:
                values.append(parts.read(group, self._own(name)))
            else:
                values.append(parts.read(group, name, counts=self.ctx.rank == 0))
        self._state.fill(values)
        return parts.fingerprint

    def _prepare(self) -> None:
        """Copy the values. Raises `InputError` for numbers that differ between ranks."""
        self._arrays = self._values.arrays()
        self._differing = self._compared()
        for name, number in self._arrays.items():
            if self._kinds[name] != NUMBER:
                continue
            every = self.ctx.allgather(np.frombuffer(number.tobytes(), np.uint8), ragged=True)
            if any(own.tobytes() != every[0].tobytes() for own in every):
                raise InputError(
                    f"state: expected numbers that are the same on all ranks, as checkpoint= "
                    f"requires, got {name}, which differs. Give an array of one element, "
                    f"np.array([...]): each rank has its own."
                )

    def _compared(self) -> set[str]:
        """Return the names of values of each rank that are not the same on all of them."""
        values = {n: array for n, array in self._arrays.items() if self._kinds[n] == OWN}
        if not values:
            return set()
        digests = [
            blake2b(f"{a.dtype.str}{a.shape}".encode() + a.tobytes(), digest_size=16).digest()
            for a in values.values()
        ]
        own = np.frombuffer(b"".join(digests), np.uint8).reshape(len(values), -1)
        every = self.ctx.allgather(own)
        is_same = (every == every[0]).all(axis=(0, 2)).tolist()
        return {name for name, same in zip(values, is_same, strict=True) if not same}

    def _create(self, folder: Folder) -> None:
        shapes = self._shapes()
        divided = {name: of for name, of in shapes.items() if self._kinds[name] == DIVIDED}
        create_arrays(created(folder, shapes, ATTRIBUTES), divided, self._chunks)

    def _fill(self, group: Any) -> np.uint64:
        parts = Parts()
        for name, array in self._arrays.items():
            if self._kinds[name] == DIVIDED:
                parts.write(group, name, array, self.ctx.box)
            elif name in self._differing:
                parts.create(group, self._own(name), array)
            elif self.ctx.rank == 0:
                parts.create(group, name, array)
        self._arrays = {}
        return parts.fingerprint

    def _own(self, name: str) -> str:
        return f"{name}.rank-{self.ctx.rank}"


def _array_names(texts: list[str]) -> list[str]:
    """Return names of arrays in a store for the texts of a state's values.

    >>> _array_names(["u", "v[0]", "fields['h']"])
    ['u', 'v.0', 'fields.h']
    """
    found = [re.sub(r"\W+", ".", text).strip(".") for text in texts]
    is_unique = len({*found}) == len(found) and all(found)
    return found if is_unique else [f"value-{number}" for number, _ in enumerate(texts)]
