from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest

from dask_p2p.errors import FileError
from dask_p2p.files import npy
from dask_p2p.files.npy import create_npy, open_npy
from tests.files.support import refused


def whole(array):
    return tuple(slice(0, n) for n in array.shape)


def saved(folder, array):
    path = folder / "in.npy"
    np.save(path, array)
    return str(path)


ARRAYS = {
    "C": np.arange(60.0).reshape(3, 4, 5),
    "F": np.asfortranarray(np.arange(60).reshape(3, 4, 5)),
    "0-d": np.array(7.5),
    "1-d": np.arange(9, dtype=np.int16),
    "empty": np.empty((3, 0, 2), np.float32),
    "big-endian": np.arange(6, dtype=">f8").reshape(2, 3),
    "datetime": np.arange(6).astype("M8[ns]").reshape(2, 3),
    "structured": np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
    "unicode field": np.array([(1,)], dtype=[("\u20ac", "<i4")]),
    "text": np.array([["a", "bcd"]]),
    "half": np.arange(6, dtype=np.float16).reshape(2, 3),
    "bool": np.array([[True, False, True]]),
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.filterwarnings("ignore:Stored array in format 3.0")
def test_read_and_write_are_exact(tmp_path, monkeypatch, name):
    monkeypatch.setattr(npy, "_WINDOW_BYTES", 20)  # many small maps
    array = ARRAYS[name]
    source = open_npy(saved(tmp_path, array))
    block = source[whole(source)] if array.size else np.empty(source.shape, source.dtype)
    read = block.T if source.fortran else block
    np.testing.assert_array_equal(read, array)
    assert read.dtype == array.dtype

    target = create_npy(tmp_path / "out", "out", array.shape, array.dtype)
    if array.size:
        target[whole(array)] = array
    expected = io.BytesIO()
    np.save(expected, np.ascontiguousarray(array).reshape(array.shape))
    assert (tmp_path / "out").read_bytes() == expected.getvalue()


@pytest.mark.parametrize("window_bytes", [1, 24, 160, 1 << 20])
def test_read_a_box(tmp_path, monkeypatch, window_bytes):
    monkeypatch.setattr(npy, "_WINDOW_BYTES", window_bytes)
    array = np.arange(4 * 5 * 6).reshape(4, 5, 6)
    source = open_npy(saved(tmp_path, array))
    place = np.s_[1:3, 2:5, 0:4]
    np.testing.assert_array_equal(source[place], array[place])


@pytest.mark.parametrize(
    "place", [np.s_[1:3, 0:5, 0:6], np.s_[0:4, 2:5, 0:6], np.s_[1:3, 2:5, 1:4]]
)
@pytest.mark.parametrize("window_bytes", [1, 24, 160, 1 << 20])
def test_write_a_box(tmp_path, monkeypatch, place, window_bytes):
    monkeypatch.setattr(npy, "_WINDOW_BYTES", window_bytes)
    expected = np.zeros((4, 5, 6), np.int32)
    expected[place] = np.arange(1, 1 + expected[place].size).reshape(expected[place].shape)
    target = create_npy(tmp_path / "out", "out", (4, 5, 6), np.dtype(np.int32))
    target[place] = expected[place]
    np.testing.assert_array_equal(np.load(tmp_path / "out"), expected)


@pytest.mark.parametrize("shape", [(1 << 19, 8), (8, 1 << 19)])
def test_little_of_a_file_is_mapped_at_a_time(tmp_path, monkeypatch, shape):
    monkeypatch.setattr(npy, "_WINDOW_BYTES", 1 << 20)
    source = open_npy(saved(tmp_path, np.zeros(shape)))
    target = create_npy(tmp_path / "out", "out", shape, source.dtype)
    mapped_bytes = []

    def count(path, mode):
        mapped_bytes.append(resident_bytes(tmp_path))
        return before(path, mode)

    before = npy._map
    monkeypatch.setattr(npy, "_map", count)
    target[whole(source)] = source[whole(source)]
    assert len(mapped_bytes) >= 2 * 32
    assert max(mapped_bytes) < 6 << 20


def resident_bytes(folder):
    """Memory that the mapped files in a folder take of this process."""
    total_bytes, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            counts = words[-1].startswith(str(folder))
        elif words[0] == "Rss:" and counts:
            total_bytes += 1024 * int(words[1])
    return total_bytes


def test_write_keeps_the_byte_order_of_the_file(tmp_path):
    target = create_npy(tmp_path / "out", "out", (3,), np.dtype(">i4"))
    target[0:3,] = np.arange(3, dtype="<i4")
    np.testing.assert_array_equal(np.load(tmp_path / "out"), [0, 1, 2])


def test_only_the_path_and_the_shape_travel(tmp_path):
    source = open_npy(saved(tmp_path, np.zeros(100_000)))
    assert len(pickle.dumps(source)) < 1000


def test_truncated(tmp_path):
    path = saved(tmp_path, np.zeros((10, 10)))
    os.truncate(path, 500)
    refused(open_npy, path, "truncated", "928", "500")


def header(text):
    body = text.encode() + b" " * 60 + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "no .npy file"),
        (b"hello, world", "no .npy file"),
        (b"\x93NUMPY", "header"),
        (b"\x93NUMPY\x09\x00", "header"),
        (b"\x93NUMPY\x01\x00\xff\xff{", "header"),
        (header("{'descr': '<f8', 'shape': (3"), "header"),
        (header("[1, 2]"), "header"),
        (header("{'descr': 'what', 'fortran_order': False, 'shape': (3,)}"), "header"),
        (header("{'descr': '<f8', 'fortran_order': False, 'shape': (-3,)}"), "impossible"),
        (
            header("{'descr': '<f8', 'fortran_order': False, 'shape': (4294967296, 4294967296)}"),
            "truncated",
        ),
    ],
)
def test_garbage(tmp_path, content, word):
    path = tmp_path / "in.npy"
    path.write_bytes(content)
    refused(open_npy, path, word)


class Trap:
    def __reduce__(self):
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("dtype", [object, [("a", object)]])
def test_pickles_are_refused_and_never_loaded(tmp_path, dtype):
    trap = Trap()
    trap.folder = str(tmp_path / "sprung")
    array = np.empty(1, dtype)
    array[0] = trap if dtype is object else (trap,)
    path = tmp_path / "in.npy"
    np.save(path, array, allow_pickle=True)
    refused(open_npy, path, "Python objects")
    path.write_bytes(pickle.dumps(trap))
    refused(open_npy, path, "no .npy file")
    assert not (tmp_path / "sprung").exists()


def test_npz(tmp_path):
    np.savez(tmp_path / "in.npz", a=np.zeros(3))
    refused(open_npy, tmp_path / "in.npz", ".npz", "numpy.save")


def test_device():
    refused(open_npy, "/dev/null", "no regular file")


def test_missing(tmp_path):
    refused(open_npy, tmp_path / "none.npy", "No such file")


@contextlib.contextmanager
def ordinary_user():
    """No permission stops root, so be nobody for a while."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_unreadable():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = saved(Path(folder), np.zeros(3))
        os.chmod(path, 0)
        with ordinary_user():
            refused(open_npy, path, "Permission denied", "check the permissions")


@pytest.mark.parametrize("change", ["append", "truncate", "remove"])
def test_a_file_that_changes_after_it_was_opened(tmp_path, change):
    path = saved(tmp_path, np.zeros(1000))
    source = open_npy(path)
    if change == "append":
        with open(path, "ab") as file:
            file.write(b"more")
    elif change == "truncate":
        os.truncate(path, 4000)
    else:
        os.remove(path)
    with pytest.raises(FileError, match="workers must see" if change == "remove" else "changed"):
        source[0:1000,]


def test_space_is_reserved_before_the_work(tmp_path):
    create_npy(tmp_path / "out", "out", (1000, 1000), np.dtype(float))
    assert (tmp_path / "out").stat().st_blocks * 512 >= 8_000_000


@pytest.mark.parametrize("how", ["reserved", "no reserving here"])
def test_full_disk(tmp_path, monkeypatch, how):
    number = errno.ENOSPC if how == "reserved" else errno.EOPNOTSUPP

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    free = npy.shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(npy.shutil, "disk_usage", lambda _: free)
    with pytest.raises(FileError, match=r"out\.npy: it needs .* 100 B are free"):
        create_npy(tmp_path / "partial", "out.npy", (1000,), np.dtype(float))


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, None])
def test_a_file_system_that_cannot_reserve(tmp_path, monkeypatch, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    if number is None:
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", fail)
    target = create_npy(tmp_path / "out", "out", (3,), np.dtype(float))
    target[0:3,] = np.arange(3.0)
    np.testing.assert_array_equal(np.load(tmp_path / "out"), [0, 1, 2])


def test_other_trouble_with_reserving_is_told(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(FileError, match=r"cannot write out: Input/output error"):
        create_npy(tmp_path / "partial", "out", (1000,), np.dtype(float))
