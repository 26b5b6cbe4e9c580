"""All outputs of a section: checks of the argument, and the division of returned values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dask_p2p.errors import BlockMismatchError, InputError
from dask_p2p.plans.ranks import RankGrid
from dask_p2p.sections.api.output_kinds import LocalBlock, Output, PerRank, checked_dtype


@dataclass(frozen=True)
class Outputs:
    """The outputs of a function: one, several in order, or several by name."""

    each: tuple[Output, ...]
    names: tuple[str, ...] | None = None  # None: the function returns the only output, or a tuple
    labels: tuple[str, ...] = ("the output",)  # for errors, without names
    is_sequence: bool = False  # the caller gave a sequence of outputs

    def values(self, ctx: Any, returned: Any) -> Sequence[Any]:
        """Return the values for the outputs. Raises `BlockMismatchError` if they differ."""
        if self.names is None:
            return self._in_order(ctx, returned)
        found = set(returned) if isinstance(returned, Mapping) else set()
        if found != {*self.names}:
            given = sorted(map(str, found)) if found else type(returned).__name__
            raise BlockMismatchError(
                f"expected a dict of {', '.join(self.names)} from the function on rank {ctx.rank}, "
                f"got {given}. Return a value for each name in outputs=."
            )
        return [returned[name] for name in self.names]

    def _in_order(self, ctx: Any, returned: Any) -> Sequence[Any]:
        """Return the values from a tuple, or the rows of an array; or the only value."""
        count, is_array = len(self.each), isinstance(returned, ctx.device.module.ndarray)
        if count == 1 and not self.is_sequence:
            return [returned]
        has_rows = is_array and returned.shape[:1] == (count,) and not self.is_sequence
        found = returned if has_rows or isinstance(returned, (tuple, list)) else (returned,)
        if len(found) != count:
            raise BlockMismatchError(
                f"expected a tuple of {', '.join(self.labels)} from the function on rank "
                f"{ctx.rank}, got {len(found)} in all. Return all of them in one tuple."
            )
        return found

    def blocks(self, ctx: Any, ranks: RankGrid, returned: Any) -> list[list[Any]]:
        """Return a rank's blocks, by output."""
        values, names = self.values(ctx, returned), self.names or self.labels
        of_each = zip(self.each, values, names, strict=True)
        return [output.blocks(ctx, ranks, value, name) for output, value, name in of_each]


def checked_outputs(outputs: Any, dtypes: Sequence[Any]) -> Outputs:
    """Return outputs with their dtypes; `dtypes` are those of the section's arrays.

    Raises `InputError` if `outputs` is no output, and no mapping or sequence of outputs.
    """
    if isinstance(outputs, Output):
        return Outputs((_with_dtype(outputs, 0, dtypes),))
    is_sequence = isinstance(outputs, (list, tuple)) and outputs
    if is_sequence and all(isinstance(output, Output) for output in outputs):
        in_order = tuple(_with_dtype(output, at, dtypes) for at, output in enumerate(outputs))
        labels = tuple(f"output {number}" for number, _ in enumerate(outputs))
        return Outputs(in_order, labels=labels, is_sequence=True)
    given = dict(outputs) if isinstance(outputs, Mapping) else {}
    if not given or not all(
        isinstance(name, str) and isinstance(each, Output) for name, each in given.items()
    ):
        raise InputError(
            f"outputs: expected a number of outputs, one of LocalBlock, Array, Rows, PerRank, "
            f"Same, or a list of these, or a dict of these by name, got {outputs!r}. Give one, "
            f'{{"u": LocalBlock()}}.'
        )
    each = [_with_dtype(output, at, dtypes) for at, output in enumerate(given.values())]
    return Outputs(tuple(each), tuple(given))


def outputs_in_order(dtypes: Sequence[Any], converts: bool, examples: Sequence[Any]) -> Outputs:
    """Return outputs of local blocks by dtype, and then of values that are like examples.

    Without `converts`, the local blocks may only change the precision of floats.
    """
    each = [_local_block(dtype, converts) for dtype in dtypes]
    labels = [f"output {number}" for number, _ in enumerate(dtypes)]
    labels += [f"per_rank[{number}]" for number, _ in enumerate(examples)]
    return Outputs((*each, *map(PerRank, examples)), labels=tuple(labels))


def _with_dtype(output: Output, position: int, dtypes: Sequence[Any]) -> Output:
    if not isinstance(output, LocalBlock):
        return output
    if not dtypes:
        raise InputError(
            "outputs: expected Array, Rows, PerRank or Same without arrays, got LocalBlock. Give "
            "the shape, Array(shape, dtype)."
        )
    if output.dtype is not None:
        return replace(output, dtype=checked_dtype(output.dtype))
    return _local_block(dtypes[position if position < len(dtypes) else 0], converts=False)


def _local_block(dtype: Any, converts: bool) -> LocalBlock:
    made = LocalBlock(np.dtype(dtype))
    object.__setattr__(made, "converts", converts)
    return made
