"""NumPy blocks: their memory, and the queue of an output block."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dask_p2p.backends import backend_named
from dask_p2p.backends import numpy as module
from dask_p2p.backends.device_queue import DeviceQueue
from dask_p2p.backends.host_queue import HostQueue
from dask_p2p.backends.numpy import NUMPY
from dask_p2p.backends.pipelines import host_through_device
from dask_p2p.backends.pipelines.host_through_device import HostThroughDeviceQueue
from dask_p2p.config import options
from dask_p2p.errors import NoDeviceError
from tests.support import tune

NBYTES = 128  # of an output block of 16 items of f8


def test_empty_gives_c_order():
    assert NUMPY.empty([2, 3], ">f4").flags.c_contiguous
    assert NUMPY.empty((), "f4").shape == ()
    assert NUMPY.empty((2, 0), ">f4").dtype == np.dtype(">f4")


def chosen(by, dtype="f8", kind="numpy"):
    nbytes, given = NBYTES * np.dtype(dtype).itemsize // 8, replace(options(), permute_numpy=by)
    return backend_named(kind).queue_for(nbytes, np.dtype(dtype), given, "worker b", pytest.fail)


def test_the_permute_option_chooses_the_queue(gpu):
    assert type(chosen("gpu")) is HostThroughDeviceQueue
    assert type(chosen("gpu", "O")) is HostQueue
    assert type(chosen("gpu", kind="cupy")) is DeviceQueue


def test_a_worker_without_a_gpu_reports_it(monkeypatch):
    monkeypatch.setattr(module, "gpu_obstacle", lambda: "no GPU is visible")
    with pytest.raises(NoDeviceError) as caught:
        chosen("gpu")
    for words in ("on worker b no GPU is visible", "gpus=True", "p2p.permute-numpy to cpu"):
        assert words in str(caught.value)
    assert type(chosen("gpu", "O")) is HostQueue, "it is left to the CPU anyway"
    tune(monkeypatch, permute_on_gpu_bytes=0)
    monkeypatch.setattr(host_through_device, "on_gpu", lambda: True)
    assert type(chosen("auto")) is HostQueue


def test_memory_of_the_queue_is_that_of_its_slots():
    by_cpu, by_gpu = (replace(options(), permute_numpy=by) for by in ("cpu", "gpu"))
    slots_bytes = host_through_device.slots_bytes(by_gpu.staging_limit_bytes)
    assert (NUMPY.queue_bytes(by_cpu), NUMPY.queue_bytes(by_gpu)) == (0, slots_bytes)
    assert backend_named("cupy").queue_bytes(by_gpu) == 0
