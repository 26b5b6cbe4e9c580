from __future__ import annotations

import asyncio
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dask_p2p.errors import FileError
from dask_p2p.files.zarr_io import _writing, create_zarr, stop_writers


def stop(path):
    asyncio.run(stop_writers(str(path)))


def test_whoever_stops_writers_waits_for_them(tmp_path):
    begun, go_on = threading.Event(), threading.Event()

    def write():
        with _writing(str(tmp_path)):
            begun.set()
            assert go_on.wait(60)

    with ThreadPoolExecutor(2) as threads:
        writer = threads.submit(write)
        assert begun.wait(60)
        stopping = threads.submit(stop, tmp_path)
        with pytest.raises(TimeoutError):
            stopping.result(timeout=0.2)
        go_on.set()
        writer.result(60)
        stopping.result(60)


def test_nobody_begins_to_write_after_that(tmp_path):
    stop(tmp_path)
    with pytest.raises(FileError, match="not written any more"), _writing(str(tmp_path)):
        pass
    with _writing(str(tmp_path / "another")):
        pass


def test_chunks_that_zarr_goes_on_to_write_after_an_error(tmp_path, monkeypatch):
    zarr = pytest.importorskip("zarr", minversion="3")
    path = tmp_path / "out.partial"
    target = create_zarr(path, "out.zarr", (4,), np.dtype(int), (1,))
    failed, go_on = threading.Event(), threading.Event()
    put = zarr.storage._local._put

    def slow_but_for_one_that_fails(place, *args, **kwargs):
        if place.name == "0":
            failed.set()
            raise OSError(28, "No space left on device")
        assert go_on.wait(60)
        return put(place, *args, **kwargs)

    monkeypatch.setattr(zarr.storage._local, "_put", slow_but_for_one_that_fails)
    with pytest.raises(FileError, match="No space left"):
        target[0:4,] = np.arange(4)
    assert failed.is_set()
    with ThreadPoolExecutor(1) as threads:
        stopping = threads.submit(stop, path)
        with pytest.raises(TimeoutError):
            stopping.result(timeout=0.2)
        go_on.set()
        stopping.result(60)
    shutil.rmtree(path)
    with pytest.raises(FileError, match="not written any more"):
        target[0:4,] = np.arange(4)
    assert not path.exists()
