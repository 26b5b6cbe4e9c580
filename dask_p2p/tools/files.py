"""``.npy`` files and Zarr arrays, as lazy Dask arrays and back; workers open them themselves."""

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

from dask_p2p.errors import FileError, P2PError
from dask_p2p.plugins.registration import workers_of
from dask_p2p.types import Array, DaskArray

_NPY_BLOCK_BYTES = 16 << 20  # an .npy file has no chunks: these are enough for many workers
_POLL_S = 0.02


@contextlib.contextmanager
def _errors(doing: str) -> Iterator[None]:
    """Turn any error inside into a `FileError` of one line: cannot ``doing`` ..."""
    try:
        yield
    except P2PError:
        raise
    except Exception as exc:
        advice = "; pip install 'zarr>=3.1'" if isinstance(exc, ImportError) else ""
        text = " ".join(str(exc).split()) or type(exc).__name__
        raise FileError(f"cannot {doing}: {text}{advice}") from exc


@dataclass(frozen=True)
class _NpyFile:
    """An ``.npy`` file; tasks carry it in place of the data."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, place: tuple[slice, ...]) -> Array:
        return np.array(open_memmap(self.path, "r")[place])

    def __setitem__(self, place: tuple[slice, ...], block: Array) -> None:
        mapped = open_memmap(self.path, "r+")
        mapped[place] = block
        mapped.flush()  # else a disk that fails now would go unnoticed


def opened(name: str) -> DaskArray:
    """Return the array in an ``.npy`` file, or in the folder of a Zarr array; else a `FileError`.

    Its blocks are a Zarr array's chunks or shards, or about 16 MiB of an ``.npy`` file.
    """
    with _errors(f"read {name}"):
        path = Path(name).resolve(strict=True)
        if path.is_dir():
            array = _open_zarr(name, path)
            chunks: Any = array.shards or array.chunks
        elif path.suffix == ".npy":
            mapped = open_memmap(path, "r")
            array = _NpyFile(str(path), mapped.shape, mapped.dtype)
            chunks = normalize_chunks("auto", array.shape, _NPY_BLOCK_BYTES, array.dtype)
        else:
            raise FileError(f"{name} is of no known kind: give an .npy file or a Zarr array")
        meta = np.empty((0,) * len(array.shape), array.dtype)
        # A name of its own: another run may find other values in the file.
        return da.from_array(array, chunks, name=False, inline_array=True, meta=meta)


def _open_zarr(name: str, path: Path) -> Any:
    import zarr

    array = zarr.open(path, mode="r")
    if isinstance(array, zarr.Group):
        members = array.members(max_depth=None)
        names = sorted(f"{name}/{key}" for key, item in members if isinstance(item, zarr.Array))
        raise FileError(f"{name} is a Zarr group; give one of its arrays: {', '.join(names)}")
    if array.dtype.hasobject:
        raise FileError(f"{name} holds Python objects or texts of any length; give plain values")
    return array


@contextlib.contextmanager
def output(name: str, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a path to write to. It gets its name at the end, or is removed after an exception."""
    final = Path(os.path.realpath(name))
    if final.suffix != ".npy" and all(Path(part).suffix != ".zarr" for part in final.parts):
        raise FileError(f"{name} is of no known kind: end it in .npy or .zarr")
    _check_free(name, final, overwrite)
    with (
        _errors(f"write {name}"),
        TemporaryDirectory(prefix=".dask-p2p-", suffix=".partial", dir=final.parent) as folder,
    ):
        path = Path(folder, final.name)
        yield path
        for part in filter(Path.is_file, (path, *path.rglob("*"))):
            with open(part, "rb") as file:  # a crash must not leave the name without the data
                os.fsync(file.fileno())
        _check_free(name, final, overwrite)
        if final.is_dir():
            final.rename(Path(folder, "replaced"))
        path.replace(final)


def _check_free(name: str, final: Path, overwrite: bool) -> None:
    if final.exists() and not overwrite:
        raise FileError(f"{name} is already there; --overwrite replaces it")
    if final.is_dir():
        opened(name)  # of folders only an array is replaced


def written(x: DaskArray, path: Path, client: Any, stopped: Callable[[], bool]) -> Iterator[None]:
    """Write an array, whose blocks but the last of an axis are equal, and yield after each block.

    A `KeyboardInterrupt` comes as soon as ``stopped`` says so; after exceptions no worker writes.
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
        with open(path, "r+b") as file:  # a map to a full disk would kill its process
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return _NpyFile(str(path), x.shape, x.dtype)
    import zarr

    return zarr.create_array(
        path,
        shape=x.shape,
        dtype=x.dtype,
        chunks=tuple(max(1, sizes[0]) for sizes in x.chunks),
        # Version 3 has neither big-endian dtypes nor, in its specification, other kinds.
        zarr_format=3 if x.dtype.kind in "biufc" and x.dtype.isnative else 2,
        config={"write_empty_chunks": True},  # Zarr takes -0j for the fill value 0j
    )


def _store(block: Array, target: Any, block_info: Any = None) -> Array:
    target[tuple(slice(*side) for side in block_info[0]["array-location"])] = block
    return np.ones((1,) * block.ndim, bool)


async def _wait_for(name: str, dask_worker: Any) -> None:
    """Wait until no thread of a worker is at a task of this name, which may be cancelled."""
    for _ in range(1500):  # 30 s
        if any(task.key[0] == name for task in dask_worker.state.executing):
            await asyncio.sleep(_POLL_S)
