"""Frames of a state: values that change in a loop of `Context.steps`.

A thread of each rank writes its part of a frame while the next steps run, as for `iterate`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from dask_p2p.errors import InputError
from dask_p2p.sections.context.context import Context
from dask_p2p.sections.context.state import State
from dask_p2p.sections.iterate.output.frames import BackgroundFrames, Frames
from dask_p2p.sections.iterate.output.specs import checked_frames
from dask_p2p.sections.iterate.output.state_files import DIVIDED, NUMBER, StateValues

if TYPE_CHECKING:
    from dask_p2p.sections.iterate.output.specs import SaveArguments


class _StateReader:
    """Values of a state, read by `Frames` as fields and numbers."""

    def __init__(self, ctx: Context, values: StateValues) -> None:
        self._device, self._state = ctx.device, values
        kinds = dict(zip(values.names, values.kinds, strict=True))
        self._numbers = [name for name, kind in kinds.items() if kind == NUMBER]
        self.fields = {
            name: _StateArray(ctx, values, name) for name in kinds if kinds[name] == DIVIDED
        }

    @property
    def values(self) -> dict[str, Any]:
        """The numbers."""
        leaves = self._state.leaves()
        return {name: self._device.to_host(leaves[name].array)[()] for name in self._numbers}


class _StateArray:
    """One array of a state."""

    def __init__(self, ctx: Context, values: StateValues, name: str) -> None:
        self._values, self._name = values, name
        self.shape, self.box = tuple(map(sum, values.grid.chunks)), ctx.box

    @property
    def newest(self) -> Any:
        """The local block, as `inner`."""
        return SimpleNamespace(inner=self._values.leaves()[self._name].array)

    @property
    def spec(self) -> Any:
        """The dtype."""
        return SimpleNamespace(dtype=np.dtype(self.newest.inner.dtype))


class StateFrames:
    """The frames of one rank's state.

    Parameters
    ----------
    save : Save
        The arguments, without computed fields.
    ctx : Context
        The rank.
    state : State
        The values.
    steps : int or None
        Number of steps of the loop.

    Raises
    ------
    InputError
        If the number of steps is unknown, or `save` has other fields than the state.
    """

    def __init__(self, save: SaveArguments, ctx: Context, state: State, steps: int | None) -> None:
        if steps is None or save.compute:
            raise InputError(
                "save: expected a number of steps, and a Save without computed fields, got "
                f"{'ctx.steps(None)' if steps is None else 'compute='}. Give the number of steps, "
                "and keep computed values in the state."
            )
        values = StateValues(ctx, state)
        current: Any = _StateReader(ctx, values)
        names = [*current.fields, *current.values]
        if not current.fields:
            raise InputError(
                "save: expected a state with an array of the local block's shape, got none. Give "
                "ctx.state the array."
            )
        self._frames = Frames(
            checked_frames(save, names, (), values.grid.chunks), ctx, current, current, steps
        )
        self._written = BackgroundFrames(ctx, [self._frames])

    def resumed(self, first: int, steps: int | None) -> int:
        """Open the group for frames after a first step, which is returned."""
        self._frames.open(first, None)
        return first

    def is_due(self, step: int) -> bool:
        """Return whether a frame is due after a step."""
        return self._frames.is_due(step)

    def write(self, step: int, flush: Callable[[], None]) -> None:
        """Begin to write a frame."""
        self._written.write(step, lambda due: None)

    def flush(self) -> None:
        """Wait until all ranks have written all frames; rank 0 records them."""
        self._written.flush()

    def close(self) -> None:
        """End the thread."""
        self._written.close()
