"""CUDA sources that are compiled at their first use, with an emulated compiler."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tests.support import BOUND_S, loaded_anew

THREADS = 4


class WaitForAll(dict):
    """Kernels by device; `all_asked` is set when all threads have looked for one."""

    def __init__(self):
        self.lookups, self.all_asked = 0, threading.Event()
        self.lock = threading.Lock()

    def get(self, device_id):
        value = super().get(device_id)
        with self.lock:
            self.lookups += 1
            if self.lookups >= THREADS:
                self.all_asked.set()
        return value


@pytest.fixture
def compiled():
    """Options of all compilations."""
    return []


@pytest.fixture
def module(monkeypatch, compiled):
    def raw_module(code, options):
        compiled.append(options)
        return SimpleNamespace(code=code)

    cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 3), Device=nullcontext)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(RawModule=raw_module, cuda=cuda))
    return loaded_anew("dask_p2p.backends.kernels.cuda")


def test_each_device_loads_the_source_once(module, compiled):
    source = module.CudaSource("regions.cu", lambda compiled: compiled.code, "-DX=1")
    assert "copy_regions" in source.on(0)
    assert source.on(0) is source.on(0)
    assert compiled == [("--std=c++17", "-DX=1")]
    source.on(1)
    assert len(compiled) == 2


def test_threads_compile_once(module, compiled):
    kernels = WaitForAll()

    def load(compiled):
        assert kernels.all_asked.wait(BOUND_S)
        return compiled

    source = module.CudaSource("transpose.cu", load)
    source._loaded = kernels
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in range(THREADS):
            threads.submit(source.on, 0)
    assert len(compiled) == 1
    assert [*kernels] == [0]


def test_sources_load_at_the_same_time(module):
    barrier = threading.Barrier(2)

    def load(compiled):
        barrier.wait(BOUND_S)
        return compiled.code

    sources = [module.CudaSource(f"{name}.cu", load) for name in ("regions", "checksums")]
    module.load_all(sources)
    assert [[*source._loaded] for source in sources] == [[3], [3]]


def test_a_source_that_cannot_be_compiled_is_an_error(module):
    def load(compiled):
        raise ValueError("no compiler")

    with pytest.raises(ValueError, match="no compiler"):
        module.load_all([module.CudaSource("regions.cu", load)])
