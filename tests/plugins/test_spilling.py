"""Stores that spill: blocks are found on each level, and stay there."""

import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from types import ModuleType

import dask
import numpy as np
import pytest
from distributed.spill import SpillBuffer
from zict import Buffer, Func

from dask_p2p.plugins import storage as spilling
from dask_p2p.plugins.storage import (
    find_in_memory,
    holds,
    is_mapped,
    is_spilled,
    on_spilled,
    read_spilled,
)

LIMIT_BYTES = 3000
BLOCK_BYTES = 1000


class DeviceBlock:
    """Stands for a CuPy array."""

    nbytes = BLOCK_BYTES

    def __init__(self, number):
        self.number = number


class DeviceSerialized:
    def __init__(self, block):
        self.number = block.number


class DeviceHostFile:
    """As dask-cuda's: device, host and disk, of which the last two serialise device blocks."""

    def __init__(self):
        weight = {"weight": lambda key, value: BLOCK_BYTES}
        self.others, self.device_keys = {}, set()
        self.host_func, self.device_func, self.disk = {}, {}, {}
        to_disk = Func(lambda value: [value], lambda pieces: pieces[0], self.disk)
        self.host_buffer = Buffer(self.host_func, to_disk, LIMIT_BYTES, **weight)
        to_host = Func(DeviceSerialized, host_to_device, self.host_buffer)
        self.device_buffer = Buffer(self.device_func, to_host, LIMIT_BYTES, **weight)
        self.device, self.host = self.device_buffer.fast.d, self.host_buffer.fast.d

    def __setitem__(self, key, value):
        if isinstance(value, DeviceBlock):
            self.device_keys.add(key)
            self.device_buffer[key] = value
        else:
            self.host_buffer[key] = value

    def __getitem__(self, key):
        return self.device_buffer[key] if key in self.device_keys else self.host_buffer[key]


def host_to_device(serialized):
    return DeviceBlock(serialized.number)


@pytest.fixture
def device_host_file(monkeypatch):
    module = ModuleType("dask_cuda.device_host_file")
    module.DeviceHostFile, module.DeviceSerialized = DeviceHostFile, DeviceSerialized
    module.host_to_device = host_to_device
    monkeypatch.setitem(sys.modules, module.__name__, module)

    monkeypatch.setattr(spilling, "private_stream", nullcontext)
    return DeviceHostFile()


def levels(data):
    return {name: sorted(getattr(data, name), key=str) for name in ("device", "host", "disk")}


def test_a_plain_store():
    data = {"a": 1}
    assert find_in_memory(data, "a") == 1
    assert not is_spilled(data, "a")
    assert not is_spilled(data, "b")
    with pytest.raises(KeyError):
        find_in_memory(data, "b")


def test_dasks_own_store(tmp_path):
    data = SpillBuffer(str(tmp_path), target=10 * BLOCK_BYTES)
    for number in range(20):
        data[number] = np.full(BLOCK_BYTES, number, "u1")
    spilled = [number for number in range(20) if is_spilled(data, number)]
    assert set(spilled) == set(data.disk) != set()
    for number in range(20):
        read = read_spilled if number in spilled else find_in_memory
        assert (read(data, number) == number).all()
        with pytest.raises(KeyError):
            (find_in_memory if number in spilled else read_spilled)(data.disk, "other")
    assert [number for number in range(20) if is_spilled(data, number)] == spilled


@pytest.fixture
def all_on_disk(tmp_path):
    """A store of Dask's, all of whose blocks go to the disk at once."""
    return SpillBuffer(str(tmp_path), target=1)


@pytest.mark.parametrize("dtype", ["f8", ">i4", "M8[ns]", "?", "c16", "U3", "V7", [("a", "i1")]])
@pytest.mark.parametrize("order", ["C", "F"])
def test_blocks_of_numpy_are_mapped(all_on_disk, dtype, order):
    """A region of a block costs no more than what it lies on."""
    bits = np.arange(30 * 40 * np.dtype(dtype).itemsize, dtype="u1") % 2
    values = np.asarray(bits.view(dtype).reshape(30, 40), order=order)
    all_on_disk["key"] = values.copy(order="K")  # or Dask would have a reference to it
    restored = read_spilled(all_on_disk, "key")
    assert is_mapped(restored)
    assert (restored.dtype, restored.strides) == (values.dtype, values.strides)
    assert restored.tobytes() == values.tobytes()
    assert "key" in all_on_disk.disk


def test_a_large_block_that_dask_writes_in_pieces_is_mapped(all_on_disk):
    values = np.arange(2**24).reshape(1024, -1)  # twice the size of Dask's pieces
    all_on_disk["key"] = values.copy(order="K")  # or Dask would have a reference to it
    restored = read_spilled(all_on_disk, "key")
    assert is_mapped(restored)
    np.testing.assert_array_equal(restored[:, 7:9], values[:, 7:9])


def test_a_mapped_block_outlives_its_file(all_on_disk, tmp_path):
    """Dask may bring the block back, or forget it, while it is read."""
    values = np.arange(30_000.0)
    all_on_disk["key"] = values.copy(order="K")  # or Dask would have a reference to it
    restored = read_spilled(all_on_disk, "key")
    restored[0] = -1.0  # which is a private copy
    again = read_spilled(all_on_disk, "key")
    del all_on_disk["key"]
    assert not list(tmp_path.iterdir())
    np.testing.assert_array_equal(again, values)
    with pytest.raises(KeyError):
        read_spilled(all_on_disk, "key")


def test_blocks_that_cannot_be_mapped_are_read(tmp_path):
    with dask.config.set({"distributed.worker.memory.spill-compression": "zlib"}):
        data = SpillBuffer(str(tmp_path), target=1)
    objects = np.array([None, (1, 2), "three"], dtype=object)
    zeros = np.zeros(100_000)
    data["objects"], data["compressed"] = objects, zeros
    assert read_spilled(data, "objects").tolist() == objects.tolist()
    restored = read_spilled(data, "compressed")
    assert not is_mapped(restored)
    np.testing.assert_array_equal(restored, zeros)


def test_a_block_that_is_in_use_is_not_read_twice(all_on_disk):
    values = np.ones(1000)
    all_on_disk["key"] = values
    assert read_spilled(all_on_disk, "key") is values, "Dask has a weak reference to it"


def test_spilled_blocks_are_told_of_at_once(tmp_path):
    """Whoever keeps one lets go of it then: it is freed before Dask looks at its memory again."""
    data = SpillBuffer(str(tmp_path), target=10**9)
    data["key"] = np.ones(1000)
    data["other"] = np.ones(1000)
    blocks, events = {key: data[key] for key in ("key", "other")}, []
    reference = weakref.ref(blocks["key"])

    def let_go(key, block):
        events.append(key)
        del blocks[key]

    end = on_spilled(data, let_go)
    data.evict()
    assert events == ["key"]
    assert reference() is None
    end()
    data.evict()
    assert events == ["key"]
    on_spilled({}, let_go)()


def test_blocks_that_a_gpu_has_no_room_for_are_told_of(device_host_file):
    events = []
    end = on_spilled(device_host_file, lambda key, block: events.append(key))
    for number in range(8):
        device_host_file[number] = DeviceBlock(number)
    end()
    assert sorted(set(events)) == [n for n in range(8) if n not in device_host_file.device]


def test_the_three_levels_of_dask_cudas_store(device_host_file):
    data = device_host_file
    for number in range(8):
        data[number] = DeviceBlock(number)
    data["numpy"] = np.ones(3)
    before = levels(data)
    assert all(before.values()), "something is on each level"
    assert all(holds(data, key) for key in (*range(8), "numpy"))
    assert not holds(data, "missing")
    for number in range(8):
        assert is_spilled(data, number) == (number not in data.device)
        read = read_spilled if is_spilled(data, number) else find_in_memory
        block = read(data, number)
        assert (type(block), block.number) == (DeviceBlock, number)
    assert not is_spilled(data, "numpy")
    assert find_in_memory(data, "numpy").sum() == 3
    assert not is_spilled(data, "missing")
    with pytest.raises(KeyError):
        read_spilled(data, "missing")
    assert levels(data) == before, "nothing was moved"


def test_reading_beside_dask_misses_nothing(device_host_file):
    """Dask's own way there does: of two threads that bring a block back one finds no key."""
    data, stop, missed = device_host_file, threading.Event(), []
    for number in range(8):
        data[number] = DeviceBlock(number)

    def find(number):
        for read in 10 * (find_in_memory, read_spilled):
            with suppress(KeyError):
                return read(data, number).number
        return None

    def serve():
        while not stop.is_set():
            missed.extend(number for number in range(8) if find(number) != number)

    with ThreadPoolExecutor(3) as threads:
        serving = [threads.submit(serve) for _ in range(3)]
        try:
            for round_ in range(3000):
                assert data[round_ % 8].number == round_ % 8
        finally:
            stop.set()
    assert [thread.result() for thread in serving] == [None] * 3
    assert missed == []


def serialized(values, **changes):
    """A CuPy block as dask-cuda keeps it in host memory, made by `distributed.protocol`."""
    frame = memoryview(values.ravel(order="K").view("u1"))
    interface = {"shape": values.shape, "typestr": values.dtype.str, "strides": values.strides}
    header = {"type": "cupy.ndarray", "serializer": "dask", "sub-header": interface}
    block = DeviceSerialized(DeviceBlock(0))
    block.header, block.frames = {**header, **changes}, [frame]
    return block


@pytest.mark.parametrize("dtype", ["f8", "i2", "c16", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("level", ["host", "disk"])
def test_spilled_cupy_blocks_are_read_where_they_lie(device_host_file, level, order, dtype):
    data = device_host_file
    values = np.asarray(np.arange(12).reshape(3, 4), dtype, order=order)
    block = serialized(values)
    if level == "host":
        data.host["key"] = block
    else:
        data.disk["key"] = [block]
    data.device_keys.add("key")
    assert is_spilled(data, "key")
    with pytest.raises(KeyError):
        find_in_memory(data, "key")
    for _ in range(2):
        restored = read_spilled(data, "key")
        assert type(restored) is np.ndarray
        assert np.shares_memory(restored, np.frombuffer(block.frames[0], "u1")), "it is no copy"
        assert (restored.dtype, restored.strides) == (values.dtype, values.strides)
        np.testing.assert_array_equal(restored, values)
        assert not restored.flags.writeable
    assert "key" not in data.device


@pytest.mark.parametrize(
    "changes",
    [
        {"serializer": "pickle"},
        {"type": "cudf.core.buffer.Buffer"},
        {"type": "sparse.ndarray"},
        {"sub-header": {"shape": (3,), "typestr": "<f8", "strides": (8,)}},  # not all of it
        {"sub-header": {"shape": (30, 4), "typestr": "<f8", "strides": (32, 8)}},  # more than it
        {"sub-header": {"shape": (3, 4), "typestr": "<f8"}},
        {"sub-header": None},
    ],
    ids=str,
)
def test_what_is_serialized_otherwise_is_made_anew_on_the_gpu(device_host_file, changes):
    block = serialized(np.arange(12.0).reshape(3, 4), **changes)
    device_host_file.host["key"] = block
    assert isinstance(read_spilled(device_host_file, "key"), DeviceBlock)
    block = serialized(np.arange(12.0))
    block.frames = 2 * block.frames
    device_host_file.host["key"] = block
    assert isinstance(read_spilled(device_host_file, "key"), DeviceBlock)
