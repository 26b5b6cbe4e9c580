"""Checkpoints in files of a state: values that change in a loop of `Context.steps`.

Arrays of the local block's shape are parts of one array of the store, so any number of ranks may
resume. Numbers are the same on all ranks. Each rank has other values, such as generators, for
itself: then as many ranks must resume.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from dask_p2p.errors import InputError
from dask_p2p.geometry import box_slices
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.context.state import Leaf, State
from dask_p2p.sections.gang.checkpoints import Period
from dask_p2p.sections.iterate.output.checkpoint_folder import CheckpointFolder
from dask_p2p.sections.iterate.output.folders import explained
from dask_p2p.sections.iterate.output.groups import (
    create_arrays,
    created,
    plain,
    seen_by_all,
    together,
)
from dask_p2p.sections.iterate.output.stores import Checkpoint, store_chunks

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


class StateFiles:
    """The checkpoints in files of one rank's state.

    Parameters
    ----------
    spec : Checkpoint
        Checked arguments.
    ctx : Context
        The rank.
    state : State
        The values.
    """

    def __init__(self, spec: Checkpoint, ctx: Context, state: State) -> None:
        self._ctx, self._state, self._values = ctx, state, StateValues(ctx, state)
        self._names, self._kinds = self._values.names, self._values.kinds
        self._folder, self._period = CheckpointFolder(spec, ctx), Period(spec.every)
        self._grid = self._values.grid
        self._chunks = store_chunks(self._grid.chunks)

    def _program(self, arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
        shape = tuple(map(sum, self._grid.chunks))
        kinds = dict(zip(arrays, self._kinds, strict=True))
        divided = {n: (shape, a.dtype) for n, a in arrays.items() if kinds[n] == DIVIDED}
        found: dict[str, Any] = {
            "format": "dask_p2p state 1",
            "values": kinds,
            "arrays": plain(divided),
        }
        if OWN in self._kinds:
            found["ranks"] = self._ctx.size
        return found

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step: the same on all ranks."""
        return self._ctx.has_ended(self._period, step)

    def resumed(self, first: int, steps: int | None) -> int:
        """Load the newest complete checkpoint if it is newer than a step; return the first step.

        Raises `InputError` if it has more steps than the run, or other values.
        """
        newest = self._folder.newest(first, steps)
        if newest <= first:
            return first
        group = self._folder.opened(newest, self._program(self._values.arrays()))
        values = []
        with explained(self._folder.of(newest)):
            for name, kind in zip(self._names, self._kinds, strict=True):
                array = group[self._own(name) if kind == OWN else name]
                where = box_slices(self._ctx.box) if kind == DIVIDED else ...
                values.append(np.asarray(array[where]))
        self._state.fill(values)
        return newest

    def write(self, step: int) -> None:
        """Write a checkpoint. Raises `InputError` for numbers that differ between ranks."""
        arrays, folder = self._values.arrays(), self._folder.of(step)
        kinds = dict(zip(self._names, self._kinds, strict=True))
        self._check_numbers({n: a for n, a in arrays.items() if kinds[n] == NUMBER})
        together(self._ctx, folder, lambda: self._create(step, arrays))
        group = seen_by_all(self._ctx, folder)
        with explained(folder):
            for name, array in arrays.items():
                if kinds[name] == DIVIDED and array.size:
                    group[name][box_slices(self._ctx.box)] = array
                elif kinds[name] == OWN:
                    group.create_array(self._own(name), data=array)
        self._ctx.barrier()
        together(self._ctx, folder, lambda: self._folder.complete(step))

    def _own(self, name: str) -> str:
        return f"{name}.rank-{self._ctx.rank}"

    def _create(self, step: int, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        folder = self._folder.of(step)
        folder.remove()  # of an attempt that has ended
        shape, kinds = tuple(map(sum, self._grid.chunks)), self._kinds
        shapes: dict[str, Any] = {
            name: (shape if kind == DIVIDED else (), array.dtype)
            for (name, array), kind in zip(arrays.items(), kinds, strict=True)
        }
        group = created(folder, shapes, {"program": self._program(arrays), "step": step})
        of_all = {n: s for (n, s), kind in zip(shapes.items(), kinds, strict=True) if kind != OWN}
        create_arrays(group, of_all, self._chunks)
        for name, array in arrays.items():
            if name in of_all and shapes[name][0] == ():
                group[name][()] = array

    def _check_numbers(self, numbers: dict[str, np.ndarray[Any, Any]]) -> None:
        for name, number in numbers.items():
            every = self._ctx.allgather(np.frombuffer(number.tobytes(), np.uint8), ragged=True)
            if any(own.tobytes() != every[0].tobytes() for own in every):
                raise InputError(
                    f"state: expected numbers that are the same on all ranks, as checkpoint= "
                    f"requires, got {name}, which differs. Give an array of one element, "
                    f"np.array([...]): each rank has its own."
                )


def _array_names(texts: list[str]) -> list[str]:
    """Return names of arrays in a store for the texts of a state's values.

    >>> _array_names(["u", "v[0]", "fields['h']"])
    ['u', 'v.0', 'fields.h']
    """
    found = [re.sub(r"\W+", ".", text).strip(".") for text in texts]
    is_unique = len({*found}) == len(found) and all(found)
    return found if is_unique else [f"value-{number}" for number, _ in enumerate(texts)]
