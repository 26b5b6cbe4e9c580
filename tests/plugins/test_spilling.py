"""Stores that spill: blocks are found on each level, and stay there."""

from __future__ import annotations

import sys
import threading
from types import ModuleType

import numpy as np
import pytest
from distributed.spill import SpillBuffer
from zict import Buffer, Func

from dask_p2p.plugins import spilling
from dask_p2p.plugins.spilling import find_in_memory, is_spilled, read_spilled

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
        to_disk = Func(lambda value: [value], lambda kept: kept[0], self.disk)
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

    class Stream:
        def __enter__(self):
            return self

        def __exit__(self, *exc):
            pass

    monkeypatch.setattr(spilling, "private_stream", Stream)
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
    assert spilled
    assert set(spilled) == set(data.disk)
    for number in range(20):
        read = read_spilled if number in spilled else find_in_memory
        assert (read(data, number) == number).all()
        with pytest.raises(KeyError):
            (find_in_memory if number in spilled else read_spilled)(data.disk, "other")
    assert [number for number in range(20) if is_spilled(data, number)] == spilled


def test_the_three_levels_of_dask_cudas_store(device_host_file):
    data = device_host_file
    for number in range(8):
        data[number] = DeviceBlock(number)
    data["numpy"] = np.ones(3)
    before = levels(data)
    assert all(before.values()), "something is on each level"
    for number in range(8):
        assert is_spilled(data, number) == (number not in data.device)
        read = read_spilled if is_spilled(data, number) else find_in_memory
        block = read(data, number)
        assert isinstance(block, DeviceBlock)
        assert block.number == number
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

    def serve():
        while not stop.is_set():
            for number in range(8):
                for _ in range(10):
                    for read in (find_in_memory, read_spilled):
                        try:
                            assert read(data, number).number == number
                        except KeyError:
                            continue
                        break
                    else:
                        continue
                    break
                else:
                    missed.append(number)

    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for round_ in range(3000):
            assert data[round_ % 8].number == round_ % 8
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert missed == []
