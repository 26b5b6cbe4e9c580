"""Zarr stores of `iterate`: frames and checkpoints that a run writes, and their checks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path
from typing import Any

from dask_p2p.errors import InputError, needs
from dask_p2p.geometry import Chunks, block_bounds
from dask_p2p.inputs import checked_count, checked_flag
from dask_p2p.sections.gang.checkpoints import checked_period

_MOST_PARTS = 16  # chunks of a store for each block of an array


@dataclass(frozen=True)
class Save:
    """Frames of fields, which `iterate` writes to a Zarr group while it runs.

    The group has an array (frame, ...) for each field, for all frames of the run. Its attribute
    `frames` is the number of frames that all ranks have written, and `steps` the step of the last
    one.

    Parameters
    ----------
    path : str or Path
        Folder of the group, which all workers can write.
    every : int
        Number of steps between frames.
    fields : sequence of str, optional
        Names of the fields, by default all. The newest level of a field is saved.
    """

    path: str | Path
    every: int
    fields: Sequence[str] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints in files, which `iterate` writes while it runs, and resumes from.

    A run begins at the newest complete checkpoint, with any number of ranks and any chunks.

    Parameters
    ----------
    path : str or Path
        Folder of the checkpoints, which all workers can write.
    every : int or str, optional
        Number of steps, or time, between checkpoints; by default "10 minutes".
    keep : int, optional
        Number of complete checkpoints that are kept, by default 2.
    resume : bool, optional
        If False, a folder that has checkpoints is refused.
    """

    path: str | Path
    every: int | str = "10 minutes"
    keep: int = 2
    resume: bool = True


@dataclass(frozen=True)
class StoreSpecs:
    """All stores of a run."""

    saves: tuple[Save, ...] = ()
    checkpoint: Checkpoint | None = None
    chunks: Chunks = ()  # of the stores' arrays, without the axis of frames

    def __bool__(self) -> bool:
        return bool(self.saves) or self.checkpoint is not None


def checked_stores(save: Any, checkpoint: Any, names: Sequence[str], chunks: Chunks) -> StoreSpecs:
    """Return the stores of a run with absolute paths.

    Raises `InputError` for anything else than stores of the fields, and `MissingPackageError`
    without Zarr.
    """
    saves = [save] if isinstance(save, Save) else list(save)
    if not saves and checkpoint is None:
        return StoreSpecs()
    with needs("zarr", "zarr"):
        import zarr  # noqa: F401
    found = []
    for each in saves:
        if not isinstance(each, Save):
            raise InputError(
                f"save: expected Save objects, got {type(each).__name__}. Give "
                f"[dask_p2p.Save('frames.zarr', every=100)]."
            )
        own = tuple(names if each.fields is None else each.fields)
        if not own or not {*own} <= {*names}:
            raise InputError(
                f"save: expected names of fields, {[*names]}, got {list(own)}. Rename them."
            )
        every = checked_count("steps between frames", every=each.every)
        found.append(Save(_absolute(each.path), every, own))
    if checkpoint is not None:
        if not isinstance(checkpoint, Checkpoint):
            raise InputError(
                f"checkpoint: expected a Checkpoint object, got {type(checkpoint).__name__}. Give "
                f"dask_p2p.Checkpoint('states')."
            )
        checkpoint = Checkpoint(
            _absolute(checkpoint.path),
            checked_period(checkpoint.every) or "10 minutes",
            checked_count("checkpoints", keep=checkpoint.keep),
            checked_flag("resume", checkpoint.resume),
        )
    paths = [each.path for each in (*found, *([checkpoint] if checkpoint else ()))]
    if len({*paths}) < len(paths):
        raise InputError("expected another path for each store, got one twice. Rename it.")
    return StoreSpecs(tuple(found), checkpoint, _store_chunks(chunks))


def _absolute(path: Any) -> str:
    if not isinstance(path, (str, Path)) or "://" in str(path):
        raise InputError(
            f"expected the path of a folder that all workers can write, got {path!r}. Give a local "
            f"path, or one of a shared file system."
        )
    return os.path.abspath(path)


def _store_chunks(chunks: Chunks) -> Chunks:
    """Return chunks of a store: of one size along each axis, and whole ones in each block."""
    sizes = []
    for along in chunks:
        own = max(1, along[0])
        if any(size != own for size in along[:-1]) or along[-1] > own:
            own = gcd(*block_bounds(along)[1:-1]) or 1
        sizes.append(own)
    count = prod(-(-sum(along) // own) for along, own in zip(chunks, sizes, strict=True))
    if count > _MOST_PARTS * prod(map(len, chunks)):
        raise InputError(
            f"expected fields with chunks that divide into chunks of one size, which Zarr needs, "
            f"got {chunks}. Rechunk them first, dask_p2p.rechunk(x, ...)."
        )
    return tuple((own,) for own in sizes)
