from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
import threading
import typing
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from importlib.resources import files

import pytest
from click.testing import CliRunner

import dask_p2p
from dask_p2p import errors
from dask_p2p.cli import p2p

LOOK = """
import json, os, sys
before = dict(os.environ)
import dask_p2p, dask_p2p.cli
light = sorted(sys.modules)
import distributed
by_distributed = sorted(sys.modules)
dask_p2p.transpose, dask_p2p.register, dask_p2p.local_cluster
import dask_p2p.tools.files, dask_p2p.tools.check, dask_p2p.plugins.worker, dask_p2p.preload
import dask_p2p.ops.transpose
assert callable(dask_p2p.transpose) and callable(dask_p2p.register), "a module took its name"
print(json.dumps({
    "light": light,
    "by distributed": by_distributed,
    "modules": sorted(sys.modules),
    "environment": {k: v for k, v in os.environ.items() if before.get(k) != v},
}))
"""


def test_importing_loads_no_gpu_library_and_sets_no_variable():
    done = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, check=True, timeout=250
    )
    seen = json.loads(done.stdout)
    top, light, by_distributed = (
        {name.partition(".")[0] for name in seen[when]}
        for when in ("modules", "light", "by distributed")
    )
    assert light.isdisjoint({"distributed", "numpy"}), "`dask` pays for this at each start"
    # Without these nothing can have made a CUDA context. Some of them distributed itself loads
    # where they are installed.
    loaded = top & {"cupy", "cupy_backends", "ucxx", "cuda", "rmm", "dask_cuda", "pynvml"}
    assert loaded <= by_distributed - {"cupy", "ucxx", "dask_cuda"}
    assert seen["environment"] == {}


def test_all_is_what_is_there():
    assert list(dask_p2p.__all__) == sorted(dask_p2p.__all__)
    for name in dask_p2p.__all__:
        assert callable(getattr(dask_p2p, name))
    with pytest.raises(AttributeError, match="nothing"):
        dask_p2p.nothing  # noqa: B018


def test_threads_load_one_after_the_other(monkeypatch):
    """Python fails, now and then, where threads import modules of one package at once."""
    together = threading.Barrier(2)
    met = []

    def import_module(name):
        with suppress(threading.BrokenBarrierError):
            together.wait(0.2)
            met.append(name)
        return original(name)

    original = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", import_module)
    names = ["fft", "transpose"]
    with ThreadPoolExecutor(2) as threads:
        fft, transpose = threads.map(dask_p2p.__getattr__, names)
    assert (fft, transpose) == (dask_p2p.fft, dask_p2p.transpose)
    assert not met


def test_completion_shows_what_is_public():
    import dask_p2p.ops.transpose

    assert callable(dask_p2p.transpose)  # and so is kept there
    assert [name for name in dir(dask_p2p) if not name.startswith("__")] == dask_p2p.__all__
    assert {"__version__", "__doc__", "__all__", "__path__"} <= set(dir(dask_p2p))


FUNCTIONS = [name for name in dask_p2p.__all__ if inspect.isfunction(getattr(dask_p2p, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_says_what_it_returns(name):
    function = getattr(dask_p2p, name)
    for each in typing.get_overloads(function) or [function]:
        signature = inspect.signature(each)
        assert signature.return_annotation not in ("Any", inspect.Signature.empty)
        for chunks in signature.parameters.keys() & {"chunks"}:
            assert signature.parameters[chunks].annotation == "ChunksLike"


USE = """
from typing import assert_type
import dask.array as da
import dask_p2p
from dask_p2p.tools.check import Report
from dask_p2p.tools.dropin import Installation
from dask_p2p.monitoring.runs import Runs
from dask_p2p.types import AsynchronousClient
from distributed import Client, LocalCluster

x = da.ones((8, 6), chunks=(2, 6))
assert_type(dask_p2p.transpose(x, 1, 0, chunks=(3, -1)), da.Array)
assert_type(dask_p2p.rechunk(x, {0: -1, 1: "auto"}, balance=True), da.Array)
assert_type(dask_p2p.rechunk(x, ((4, 4), None)), da.Array)
assert_type(dask_p2p.map_overlap(abs, x, depth={0: 1}), da.Array)
assert_type(dask_p2p.estimate(x), dask_p2p.MemoryEstimate)
assert_type(dask_p2p.fft.rfftn(x, norm="ortho", chunks={0: -1}), da.Array)
assert_type(dask_p2p.install(), Installation)
assert_type(dask_p2p.local_cluster(2), LocalCluster)
client = Client()
assert_type(dask_p2p.check(), Report)
assert_type(dask_p2p.check(client), Report)
assert_type(dask_p2p.last_runs(client, n=3), Runs)
assert_type(dask_p2p.last_runs(n=3), Runs)
dask_p2p.register(client)

async def ask(client: AsynchronousClient) -> None:
    await dask_p2p.register(client)
    assert_type(await dask_p2p.check(client), Report)
    assert_type(await dask_p2p.last_runs(client), Runs)
"""


@pytest.mark.programs
def test_types_as_a_checker_sees_them(tmp_path):
    program = tmp_path / "use.py"
    program.write_text(USE)
    options = ["--config-file=", f"--cache-dir={tmp_path}", "--warn-unused-ignores"]
    command = [sys.executable, "-m", "mypy", *options, str(program)]
    env = {**os.environ, "MYPYPATH": os.path.dirname(os.path.dirname(dask_p2p.__file__))}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout


def test_no_module_hides_a_function():
    import pkgutil

    modules = {module.name for module in pkgutil.iter_modules(dask_p2p.__path__)}
    assert modules.isdisjoint(dask_p2p.__all__)


def test_every_error_is_public_and_of_one_tree():
    for name in set(errors.__all__) - {"Obstacle"}:  # which errors have
        assert getattr(dask_p2p, name) is getattr(errors, name)
        if name != "P2PWarning":
            assert issubclass(getattr(errors, name), errors.P2PError)


def test_the_version_and_the_types_are_there():
    assert dask_p2p.__version__ == version("dask-p2p")
    result = CliRunner().invoke(p2p, ["--version"])
    assert result.output == f"dask p2p, version {dask_p2p.__version__}\n"
    assert files("dask_p2p").joinpath("py.typed").is_file()
