from __future__ import annotations

import json
import os
import pickle
import pkgutil
import re
import sys
from importlib.metadata import version
from importlib.resources import files

import pytest
from click.testing import CliRunner
from distributed.core import error_message

import dask_p2p
from dask_p2p import errors, results
from dask_p2p.cli import p2p
from tests.docs.pages import DOCS, README, blocks_of
from tests.support import output_of

LOOK = """
import json, os, sys
before = dict(os.environ)
import dask_p2p, dask_p2p.cli
light = sorted(sys.modules)
import distributed
by_distributed = sorted(sys.modules)
dask_p2p.transpose, dask_p2p.register, dask_p2p.local_cluster
import dask_p2p.cli.files, dask_p2p.tools.check, dask_p2p.plugins.worker, dask_p2p.preload
import dask_p2p.ops.rechunk
assert callable(dask_p2p.transpose) and callable(dask_p2p.register), "a module took its name"
print(json.dumps({
    "light": light,
    "by distributed": by_distributed,
    "modules": sorted(sys.modules),
    "environment": {k: v for k, v in os.environ.items() if before.get(k) != v},
}))
"""


def test_importing_loads_no_gpu_library_and_sets_no_variable():
    state = json.loads(output_of("-c", LOOK))
    top, light, by_distributed = (
        {name.partition(".")[0] for name in state[when]}
        for when in ("modules", "light", "by distributed")
    )
    assert light.isdisjoint({"distributed", "numpy"}), "`dask` pays for this at each start"
    # Without these nothing can have made a CUDA context. Some of them distributed itself loads
    # where they are installed.
    loaded = top & {"cupy", "cupy_backends", "ucxx", "cuda", "rmm", "dask_cuda", "pynvml"}
    assert loaded <= by_distributed - {"cupy", "ucxx", "dask_cuda"}
    assert state["environment"] == {}


def test_all_is_what_is_there():
    assert list(dask_p2p.__all__) == sorted(dask_p2p.__all__)
    for name in dask_p2p.__all__:
        assert callable(getattr(dask_p2p, name))
    with pytest.raises(AttributeError, match="nothing"):
        dask_p2p.nothing  # noqa: B018


def test_completion_shows_what_is_public():
    import dask_p2p.ops.rechunk

    assert callable(dask_p2p.transpose)  # and so is kept there
    public = sorted([*dask_p2p.__all__, "fft"])
    assert [name for name in dir(dask_p2p) if not name.startswith("__")] == public
    assert [name for name in dir(dask_p2p.fft) if not name.startswith("__")] == dask_p2p.fft.__all__
    assert {"__version__", "__doc__", "__all__", "__path__"} <= set(dir(dask_p2p))


def test_classes_of_results_can_be_imported():
    """Those of the reference, for annotations of users' functions."""
    page = DOCS / "reference" / "api.rst"
    _, _, section = page.read_text("utf-8").partition("Return values and arguments of functions")
    names = re.findall(r"^   [~.\w]*?(\w+)$", section.partition("Errors and warnings")[0], re.M)
    assert "HaloArray" in names
    for name in names:
        assert getattr(results, name).__name__ == name
        assert name in results.__all__


USE = """
from typing import assert_type
import dask.array as da
import dask_p2p
from dask_p2p.tools.check import Report
from dask_p2p.tools.dropin import Installation
from dask_p2p.monitoring.runs import RunTable
from dask_p2p.results import Context, HaloArray, Run
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
assert_type(dask_p2p.last_runs(client, n=3), RunTable)
assert_type(dask_p2p.last_runs(n=3), RunTable)
assert_type(dask_p2p.last_runs()[0], Run)
dask_p2p.register(client)

def step(ctx: Context, x: da.Array) -> None:
    assert_type(ctx.with_halo(x), HaloArray)

async def ask(client: AsynchronousClient) -> None:
    await dask_p2p.register(client)
    assert_type(await dask_p2p.check(client), Report)
    assert_type(await dask_p2p.last_runs(client), RunTable)
"""


USE_SECTIONS = """
from collections.abc import Sequence
from typing import Any, assert_type
import dask.array as da
import dask_p2p

def use(func: Any, x: da.Array, fields: Sequence[da.Array], n: int) -> None:
    dask_p2p.iterate(func, x, {0: 1}, steps=3, boundary="none", until=bool, weight=2.0).compute()
    newest, before = dask_p2p.iterate(func, fields, [1, 0], 3)
    fields_by_name = {"u": dask_p2p.Field(x, depth=1), "v": [x, x]}
    dask_p2p.iterate([func, func], fields_by_name, {"u": 1, "*": 0}, 3, constants={"c": x})
    dask_p2p.spmd(func, x, x, outputs=n, ranks=2, partition=[0], per_rank=[0.0], weight=2.0)
    dask_p2p.spmd(func, x, outputs={"u": dask_p2p.LocalBlock()})
    assert_type(dask_p2p.fused(x), da.Array)
    assert_type(dask_p2p.fused(x, x, ranks=2), tuple[da.Array, ...])
"""

USE_XARRAY = """
from typing import Any, assert_type
import xarray as xr
from dask_p2p.xarray import P2PAccessor

def use(a: xr.DataArray, ds: xr.Dataset, func: Any) -> None:
    ds.p2p.chunk(time=-1, lat=30).to_zarr("series.zarr")
    assert_type(P2PAccessor(ds).chunk(time=-1, lat=30), xr.Dataset)
    assert_type(P2PAccessor(a).chunk({"time": -1}), xr.DataArray)
    assert_type(P2PAccessor(a).transpose("y", ..., chunks={"y": 2}), xr.DataArray)
    assert_type(P2PAccessor(ds).map_overlap(func, {"x": 1}, "none"), xr.Dataset)
    newest, before = P2PAccessor(a).iterate(func, {"x": 1}, 3, fields=[a], weight=2.0)
    assert_type(P2PAccessor(a).fft("x").p2p, Any)
    assert_type(P2PAccessor(a).ifft(real_dim="freq_x"), xr.DataArray)
"""

CHECKERS = {
    "mypy": lambda folder: ["--config-file=", f"--cache-dir={folder}", "--warn-unused-ignores"],
    "pyright": lambda folder: ["--pythonpath", sys.executable, "--project", str(folder)],
}


@pytest.mark.programs
@pytest.mark.parametrize("checker", ["pyright", pytest.param("mypy", marks=pytest.mark.long)])
def test_types_as_a_checker_sees_them(tmp_path, checker):
    pytest.importorskip(checker)
    (readme,) = (block.text for block in blocks_of(README) if block.language == "python")
    uses = {"functions": USE, "sections": USE_SECTIONS, "with_xarray": USE_XARRAY, "readme": readme}
    programs = [tmp_path / f"use_{name}.py" for name in uses]
    for program, text in zip(programs, uses.values(), strict=True):
        program.write_text(text)
    package = os.path.dirname(os.path.dirname(dask_p2p.__file__))
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [package]}))
    # A new version is not looked for.
    variables = {"MYPYPATH": package, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    output_of("-m", checker, *CHECKERS[checker](tmp_path), *programs, cwd=tmp_path, **variables)


def test_no_module_hides_a_function():
    modules = {module.name for module in pkgutil.iter_modules(dask_p2p.__path__)}
    assert modules.isdisjoint(dask_p2p.__all__)


CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type)]
ERRORS = [cls for cls in CLASSES if issubclass(cls, Exception)]


def test_errors_are_of_one_tree_and_few_are_public():
    assert len(errors.__all__) == 10
    for name in errors.__all__:
        assert getattr(dask_p2p, name) is getattr(errors, name)
    for cls in {*ERRORS} - {errors.P2PWarning}:
        assert issubclass(cls, errors.P2PError)
        assert cls.__name__ in errors.__all__ or cls.__base__ is not Exception


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_errors_cross_the_boundaries_of_processes(cls):
    obstacle = errors.Obstacle("code", "text", "remedy")
    details = {
        errors.TransferError: {"reason": "why", "obstacle": obstacle, "scope": "block"},
        errors.MemoryLimitError: {"needed_bytes": 7, "missing_bytes": 3},
        errors.MissingPackageError: {"name": "zarr"},
    }
    error = cls("expected, got, do", **details.get(cls, {}))
    by_dask = pickle.loads(error_message(error)["exception"].data)
    for again in (pickle.loads(pickle.dumps(error)), by_dask):
        assert type(again) is cls
        assert str(again) == "expected, got, do"
        assert vars(again) == vars(error)
        assert getattr(again, "name", None) == getattr(error, "name", None)


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.InputError, ValueError),
        (errors.InputError, TypeError),
        (errors.UnsupportedArrayError, ValueError),
        (errors.BlockMismatchError, ValueError),
        (errors.ConfigError, ValueError),
        (errors.MemoryLimitError, MemoryError),
        (errors.FileError, OSError),
        (errors.MissingPackageError, ImportError),
    ],
)
def test_errors_are_those_of_python_too(cls, builtin):
    with pytest.raises(builtin, match="expected"):
        raise cls("expected")


def test_the_version_and_the_types_are_there():
    assert dask_p2p.__version__ == version("dask-p2p")
    result = CliRunner().invoke(p2p, ["--version"])
    assert result.output == f"dask p2p, version {dask_p2p.__version__}\n"
    assert files("dask_p2p").joinpath("py.typed").is_file()
