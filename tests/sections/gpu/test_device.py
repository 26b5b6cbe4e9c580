"""Ranks with local blocks on a GPU: data that goes through the host, and waits."""

from __future__ import annotations

import gc
import time
from functools import partial
from types import SimpleNamespace
from weakref import ref

import dask.array as da
import numpy as np
import pytest

from dask_p2p import estimate, iterate, spmd
from dask_p2p.backends import cupy as cupy_backend
from dask_p2p.errors import (
    BlockMismatchError,
    DeviceLostError,
    InputError,
    MemoryLimitError,
    UnsupportedArrayError,
)
from dask_p2p.sections.gpu import streams as gpu_streams
from dask_p2p.sections.gpu.device import Gpu
from dask_p2p.sections.iterate import capture as overlap
from tests.sections.emulated import emulated_gpu, kernel, on_gpu, run_section
from tests.sections.iterate.test_iterate import X as LARGE
from tests.sections.iterate.test_iterate import star
from tests.support import tune
from tests.transports.loopback import wait_until

X = np.random.default_rng(0).normal(size=(8, 6))


def array(gpu, x=X, chunks=(2, 3)):
    return on_gpu(gpu, da.from_array(x, chunks=chunks))


def by_sections(gpu, function, *xs, ranks=4, **kwargs):
    y = spmd(function, *(array(gpu, x) for x in xs), ranks=ranks, **kwargs)
    return run_section(gpu, y[0] if isinstance(y, tuple) else y, xs)


# --- whole sections


@pytest.mark.parametrize("returned", [np.ones((8, 6)), None, 3])
def test_what_is_no_array_of_the_device(gpu, returned):
    with pytest.raises(
        BlockMismatchError, match=r"from the function.*, got .*(numpy\.|builtins\.)"
    ):
        by_sections(gpu, lambda ctx, x: returned, X, ranks=1)
    with pytest.raises(BlockMismatchError, match=r"from the function, got (numpy\.|builtins\.)"):
        run_section(gpu, iterate(lambda u: returned, array(gpu), 0, 1, ranks=1), [X])


def test_auto_hides_halos_of_other_ranks(gpu, monkeypatch):
    """But not of one host, or for small blocks: the function is called three times in a step."""
    # The emulated kernel records its calls. The second step computes the whole block, too.
    monkeypatch.setattr(overlap, "is_replayable", lambda function: True)
    calls = []

    def counted(u, out):
        calls.append(out.shape)
        out[:] = u[1:-1, 1:-1]

    often = 2 * (1 + 1 + 2 * 3)
    cases = (1, 0, False, 3), (2, LARGE.nbytes, False, 6), (2, 0, True, 6), (2, 0, False, often)
    for ranks, least_bytes, has_windows, count in cases:
        tune(monkeypatch, gpu_overlap_bytes=least_bytes)
        calls.clear()
        y = iterate(kernel(gpu, counted), array(gpu, LARGE, (12, 30)), 1, 3, ranks=ranks)
        run_section(gpu, y, [LARGE], device=partial(Gpu, has_windows=has_windows))
        assert len(calls) == count
    assert {*calls} == {(12, 30), (10, 30), (1, 30)}


# --- failures


def test_arrays_of_two_kinds(gpu):
    x, y = array(gpu), da.from_array(X, chunks=(2, 3))
    for first, second, title in ((x, y, "NumPy"), (y, x, "CuPy")):
        match = rf"got an array of {title}: .* x.map_blocks\(cupy.as"
        with pytest.raises(UnsupportedArrayError, match=match):
            iterate(lambda u, v: u, (first, second), 0, 1)
        with pytest.raises(UnsupportedArrayError, match=match):
            spmd(lambda ctx, u, v: u, first, second)
        with pytest.raises(UnsupportedArrayError, match=f"got a constant of {title}"):
            iterate(lambda u, c: u, first, 0, 1, constants=(second,))
    with pytest.raises(UnsupportedArrayError, match=r"a constant of NumPy.* cupy.asarray\(x\)"):
        iterate(lambda u, c: u, x, 0, 1, constants=(np.ones(3),))
    iterate(lambda u, c: u, x, 0, 1, constants=(np.float64(2), 3, "c"))


def test_blocks_of_another_kind_than_declared(gpu):
    y = spmd(lambda ctx, x: x, da.from_array(X, chunks=-1).map_blocks(gpu.written, meta=X[:0, :0]))
    with pytest.raises(InputError, match=r"block .*: expected an array of numpy, .*cupy.asnumpy"):
        y.compute(scheduler="sync")


def test_what_does_not_fit_into_the_gpu_is_refused(gpu, monkeypatch):
    y = iterate(kernel(gpu, star), array(gpu), 1, 2, ranks=1)
    memory_estimate = estimate(y)
    monkeypatch.setattr(
        cupy_backend, "_total_bytes", lambda device: memory_estimate.total_bytes - 1
    )
    with pytest.raises(MemoryLimitError, match=r"fits into .* of the GPU of this process"):
        run_section(gpu, y, [X])
    monkeypatch.setattr(cupy_backend, "_total_bytes", lambda device: memory_estimate.total_bytes)
    run_section(gpu, y, [X])


def test_a_gpu_that_waits_for_a_lost_rank(gpu, monkeypatch):
    """Its wait cannot be cancelled: the process has to end."""
    tune(monkeypatch, lost_gpu_s=0.05)
    connections = SimpleNamespace(has_ended=False, is_alone=True)
    device = Gpu(connections)
    query_results, waited = iter([600, 600, 0]), []

    def run():
        with device.running([]):
            gpu.cupy.cuda.runtime.streamQuery = lambda stream: next(query_results)
            device.wait()  # for a long kernel, in an attempt that continues
            waited.append(device)
            connections.has_ended = True
            gpu.cupy.cuda.runtime.streamQuery = lambda stream: 600

    with pytest.raises(DeviceLostError, match=r"has waited 0\.05 s for a lost rank"):
        run()
    assert waited
    gpu.cupy.cuda.runtime.streamQuery = lambda stream: 0
    with (second_gpu := Gpu()).running([]):
        assert second_gpu.stream is not device.stream, "which no other device uses"


@pytest.mark.parametrize("ended", [(True, True), (True, False)])
def test_windows_of_an_attempt_go_with_the_last_process_that_read_them(gpu, ended):
    """The next attempt may need their memory."""
    device = Gpu()
    device.peers.extend(SimpleNamespace(has_ended=has_ended) for has_ended in ended)
    device.exported.append(gpu.empty((100,), "f8"))
    used = gpu.live_bytes
    device.let_go(is_orderly=False)
    if not all(ended):
        time.sleep(3 * gpu_streams._LOOK_S)
        assert gpu.live_bytes == used
        device.peers[1].has_ended = True
    wait_until(lambda: gpu.live_bytes < used)


def test_streams_outlive_memory_of_a_function_that_raised(monkeypatch):
    """RMM frees memory on its stream. The garbage collector could drop the stream before."""
    runtime, queues = emulated_gpu(monkeypatch).cupy.cuda.runtime, []

    def work(error=None, query=lambda stream: 0):
        device = Gpu()
        with device.running([]):
            queues.append(ref(device.queue))
            runtime.streamQuery = query
            if error is not None:
                raise error

    def lost(stream):
        raise ValueError("the GPU is lost")

    with pytest.raises(ValueError, match="no more"):
        work(ValueError("no more"))
    with pytest.raises(ValueError, match="the GPU is lost"):
        work(query=lost)
    work()
    gc.collect()
    of_first, of_second, of_third = (queue() for queue in queues)
    assert of_first is of_second, "with its streams"
    assert None not in (of_second, of_third)
    assert of_third is not of_second, "no device gets its streams any more"
