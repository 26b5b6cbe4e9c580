"""Reads and writes ``.npy`` files and Zarr arrays as lazy Dask arrays; workers open the files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dask.array as da
import numpy as np
from dask.array.core import normalize_chunks
from numpy.lib.format import open_memmap

from dask_p2p.errors import FileError, MissingPackageError, P2PError, needs
from dask_p2p.ops.zarr_arrays import CONFIG, zarr_format
from dask_p2p.plugins.registration import workers_of
from dask_p2p.types import Array, DaskArray

BLOCK_BYTES = 16 << 20  # of an .npy file: small enough for many workers

_POLL_S = 0.02


@contextlib.contextmanager
def _errors(doing: str) -> Iterator[None]:
    """Return a context that turns any error into a one-line `FileError`: cannot ``doing``: ..."""
    try:
        yield
    except MissingPackageError as exc:
        raise FileError(f"cannot {doing}: {exc}") from None
    except P2PError:
        raise
    except Exception as exc:
        text = " ".join(str(exc).split()) or type(exc).__name__
        raise FileError(f"cannot {doing}: {text}") from exc


@dataclass(frozen=True)
class _NpyFile:
    """An ``.npy`` file; tasks hold this object in place of the data."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, slices: tuple[slice, ...]) -> Array:
        return np.array(open_memmap(self.path, "r")[slices])

    def __setitem__(self, slices: tuple[slice, ...], block: Array) -> None:
        mapped = open_memmap(self.path, "r+")
        mapped[slices] = block
        mapped.flush()  # raises if the disk fails


def opened(name: str) -> DaskArray:
    """Return the lazy array in an ``.npy`` file or the folder of a Zarr array.

    Blocks are the shards or chunks of a Zarr array, or about 16 MiB of an ``.npy`` file. Raises
    `FileError` for anything else.
    """
    with _errors(f"read {name}"):
        path = Path(name).resolve(strict=True)
        if path.is_dir():
            array = _open_zarr(name, path)
            chunks: Any = array.shards or array.chunks
        elif path.suffix == ".npy":
            mapped = open_memmap(path, "r")
            array = _NpyFile(str(path), mapped.shape, mapped.dtype)
            block_bytes = BLOCK_BYTES
            chunks = normalize_chunks("auto", array.shape, block_bytes, array.dtype)
        else:
            raise FileError(f"{name} has an unknown file type: pass an .npy file or a Zarr array")
        meta = np.empty((0,) * len(array.shape), array.dtype)
        # A unique name, since the file may have other values in a later run.
        return da.from_array(array, chunks, name=False, inline_array=True, meta=meta)


def _open_zarr(name: str, path: Path) -> Any:
    with needs("zarr", "zarr"):
        import zarr

    array = zarr.open(path, mode="r")
    if isinstance(array, zarr.Group):
        items = array.members(max_depth=None)
        names = sorted(f"{name}/{key}" for key, item in items if isinstance(item, zarr.Array))
        raise FileError(f"{name} is a Zarr group; pass one of its arrays: {', '.join(names)}")
    if array.dtype.hasobject:
        raise FileError(
            f"{name} holds Python objects or variable-length strings; pass an array of numbers"
        )
    return array


@contextlib.contextmanager
def output(name: str, *, overwrite: bool = False) -> Iterator[Path]:
    """Return a context with a temporary path, which is renamed to `name` at the end.

    After an exception the temporary path is removed.
    """
    final = Path(os.path.realpath(name))
    if final.suffix != ".npy" and all(Path(part).suffix != ".zarr" for part in final.parts):
        raise FileError(f"{name} has an unknown file type: end the name in .npy or .zarr")
    _check_free(name, final, overwrite)
    with (
        _errors(f"write {name}"),
        TemporaryDirectory(prefix=".dask-p2p-", suffix=".partial", dir=final.parent) as folder,
    ):
        path = Path(folder, final.name)
        yield path
        for part in filter(Path.is_file, (path, *path.rglob("*"))):
            with open(part, "rb") as file:  # data must reach the disk before the name
                os.fsync(file.fileno())
        _check_free(name, final, overwrite)
        if final.is_dir():
            final.rename(Path(folder, "replaced"))
        path.replace(final)


def _check_free(name: str, final: Path, overwrite: bool) -> None:
    if final.exists() and not overwrite:
        raise FileError(f"{name} is already there; --overwrite replaces it")
    if final.is_dir():
        opened(name)  # raises for folders that are not arrays: these are never replaced


def written(x: DaskArray, path: Path, client: Any, stopped: Callable[[], bool]) -> Iterator[None]:
    """Write an array, and yield after each block; blocks are equal except the last of an axis.

    Raises `KeyboardInterrupt` as soon as ``stopped()`` is true. After an exception no worker
    writes any more.
    """
    from distributed import futures_of

    if path.suffix == ".npy" and len({w["host"] for w in workers_of(client).values()}) > 1:
        raise FileError(f"hosts would undo each other's writes to {path.name}; write a Zarr array")
    stored = x.map_blocks(  # `dask.array.store` does not take arrays that are expressions
        _store,
        target=_create(path, x),
        chunks=tuple((1,) * len(sizes) for sizes in x.chunks),
        meta=np.empty((0,) * x.ndim, bool),
    )
    futures = futures_of(client.persist(stored))
    try:
        for future in futures:
            while not future.done():
                if stopped():
                    raise KeyboardInterrupt
                time.sleep(_POLL_S)
            future.result()
            yield
    except BaseException:
        client.cancel(futures, force=True)
        with contextlib.suppress(Exception):  # the first error is the one to report
            client.run(_wait_for, futures[0].key[0])
        raise


def _create(path: Path, x: DaskArray) -> Any:
    if path.suffix == ".npy":
        open_memmap(path, "w+", x.dtype, x.shape)
        with open(path, "r+b") as file:  # a write to a map on a full disk kills the process
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return _NpyFile(str(path), x.shape, x.dtype)
    with needs("zarr", "zarr"):
        import zarr

    return zarr.create_array(
        path,
        shape=x.shape,
        dtype=x.dtype,
        chunks=tuple(max(1, sizes[0]) for sizes in x.chunks),
        zarr_format=zarr_format([x.dtype]),
        config=CONFIG,
    )


def _store(block: Array, target: Any, block_info: Any = None) -> Array:
    target[tuple(slice(*side) for side in block_info[0]["array-location"])] = block
    return np.ones((1,) * block.ndim, bool)


async def _wait_for(name: str, dask_worker: Any) -> None:
    """Wait until a worker runs no task of this name, even a cancelled one."""
    for _ in range(1500):  # 30 s
        if any(task.key[0] == name for task in dask_worker.state.executing):
            await asyncio.sleep(_POLL_S)
