"""NVTX ranges around tasks, and around what they do for each holder."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import dask
import dask.array as da
import pytest

import dask_p2p
from dask_p2p.monitoring.ranges import ranges
from tests.support import BOUND_S, own_client, persisted

#: Variables by which a profiler is loaded into a process.
INJECTIONS = ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH")


@pytest.fixture
def seen(monkeypatch):
    """Ranges, by how deep they lie in others, in the order in which they begin."""
    found = []
    depth = [0]

    @contextmanager
    def annotate(message, domain):
        assert domain == "dask_p2p"
        found.append((depth[0], message))
        depth[0] += 1
        yield
        depth[0] -= 1

    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=annotate))
    return found


def test_they_are_made_where_an_option_or_a_profiler_asks_for_it(seen, monkeypatch):
    for name in INJECTIONS:
        monkeypatch.delenv(name, raising=False)
    with ranges(False)("no"):
        pass
    with ranges(True)("wait", 7):
        pass
    assert seen == [(0, "wait 7")]
    for name in INJECTIONS:
        with monkeypatch.context() as patch:
            patch.setenv(name, "/opt/nvidia/libToolsInjection64.so")
            with ranges(False)("profiled"):
                pass
    assert seen[1:] == [(0, "profiled")] * 2


def test_without_nvtx(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    assert type(ranges(True)("no")) is nullcontext


def test_with_nvtx_itself():
    pytest.importorskip("nvtx")
    with ranges(True)("outer"), ranges(True)("inner", ("x", 0)):
        pass


def test_a_task_and_its_stages(seen):

    with (
        dask.config.set({"p2p.nvtx": True}),
        own_client(processes=False) as client,
    ):
        dask_p2p.register(client)
        first, second = sorted(client.nthreads())
        slabs = [
            client.persist(da.full((2, 6), worker, chunks=(2, 6)), workers=[worker])
            for worker in (first, second)
        ]
        x = persisted(client, da.concatenate(slabs))
        y = dask_p2p.transpose(x)[:3]
        client.compute(y, workers=[first]).result(timeout=BOUND_S)
    (_, task), *stages = seen
    assert task.startswith("('p2p-transpose-")
    assert stages == [
        (1, f"ask {second} by comm"),
        (1, "own blocks"),
        (1, f"wait {second} by comm"),
        (1, f"write {second} by comm"),
    ]
