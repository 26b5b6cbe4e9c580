import gc
import importlib.util
import json
import os
import pickle
import pkgutil
import re
import sys
from importlib.metadata import version
from importlib.resources import files
from textwrap import indent

import pytest
from click.testing import CliRunner
from distributed.core import error_message

import dask_p2p
from dask_p2p import errors, results
from dask_p2p.cli import p2p
from dask_p2p.errors import MissingPackageError, install_command, needs
from dask_p2p.loading import call_when_imported, is_library, load_module
from tests.docs.pages import DOCS, README, blocks_of
from tests.support import import_path, output_of, ran

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
        assert (type(again), str(again)) == (cls, "expected, got, do")
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


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Give a function that makes a module of a text, and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write_module(text):
        (tmp_path / "made_for_loading.py").write_text(text)
        return "made_for_loading"

    yield write_module
    sys.modules.pop("made_for_loading", None)


@pytest.fixture
def _collections():
    """Collections are on, with Python's thresholds."""
    was_on, thresholds = gc.isenabled(), gc.get_threshold()
    gc.enable()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*thresholds)
    if not was_on:
        gc.disable()


@pytest.mark.usefixtures("_collections")
def test_a_threshold_that_an_import_sets_stays(module):
    load_module(module("import gc\ngc.set_threshold(5000)"))
    assert gc.get_threshold()[0] == 5000


@pytest.mark.usefixtures("_collections")
def test_collections_go_on_after_an_import_that_fails(module):
    with pytest.raises(ZeroDivisionError):
        load_module(module("1 / 0"))
    assert gc.get_threshold() == (700, 10, 10)


SLICED = """
import gc
import dask_p2p
dask_p2p.transpose
import dask.array as da
da.ones((4, 4), chunks=2)[1:, 2]
print(gc.isenabled(), gc.get_threshold()[0] > 0)
"""


@pytest.mark.slow
def test_collections_are_on_after_the_import_of_dask():
    """Dask turns them off in slices, and then on if they were on at its import."""
    assert output_of("-c", SLICED) == "True True\n"


@pytest.fixture
def _finders():
    """There are no more finders after a test than before."""
    before = [*sys.meta_path]
    yield
    assert sys.meta_path == before


def test_an_action_on_a_module_that_is_imported_already():
    modules = []
    call_when_imported("sys", modules.append)()
    assert modules == [sys]


@pytest.mark.usefixtures("_finders")
def test_an_action_on_a_module_that_does_not_exist():
    forget = call_when_imported("missing_in_a_test", lambda module: pytest.fail("called"))
    with pytest.raises(ModuleNotFoundError, match="missing_in_a_test"):
        importlib.import_module("missing_in_a_test")
    forget()


@pytest.mark.usefixtures("_finders")
def test_an_action_on_a_module_whose_first_import_fails(module):
    name, modules = module("import sys\nif not hasattr(sys, 'may_load'): 1 / 0"), []
    call_when_imported(name, modules.append)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(name)
    assert not modules
    sys.may_load = True
    try:
        assert modules == [importlib.import_module(name)]
    finally:
        del sys.may_load


@pytest.mark.parametrize("folder", ["data", "package-1.0.dist-info"])  # as by `pip --target`
def test_libraries_lie_beside_metadata(module, tmp_path, folder):
    (tmp_path / folder).mkdir()
    importlib.import_module(name := module(""))
    assert is_library(name) == (folder != "data")


# Python imports it at each start, also in workers.
WITHOUT = """
import os
from importlib.machinery import PathFinder

found = PathFinder.find_spec
missing = os.environ["MISSING_PACKAGES"].split(",")

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in missing else found(name, path, target)

PathFinder.find_spec = find_spec
"""

# Missing packages, extra, program that says so.
PROGRAMS = {
    "xarray": ("xarray", "xarray", "import dask_p2p.xarray"),
    "zarr, to_zarr": (
        "zarr",
        "zarr",
        "import xarray as xr, dask_p2p.xarray\n"
        "xr.DataArray([1.0], dims='x', name='a').p2p.to_zarr('a.zarr')",
    ),
    "zarr, command": (
        "zarr",
        "zarr",
        "from dask_p2p.cli import p2p; p2p(['transpose', '.', 'out.zarr'])",
    ),
    "bokeh": (
        "bokeh",
        "dashboard",
        "from dask_p2p.cli import p2p; p2p(['demo', '--cpu', '--size', '64', '--workers', '1'])",
    ),
    "bokeh, page": (
        "bokeh",
        "dashboard",
        "from urllib.request import urlopen\n"
        "from distributed import Client\n"
        "import dask_p2p\n"
        "with dask_p2p.local_cluster(1, gpus=False, processes=False) as made, Client(made) as c:\n"
        "    dask_p2p.register(c)\n"
        "    with urlopen(c.dashboard_link.replace('status', 'p2p')) as page:\n"
        "        print(page.read().decode())",
    ),
    "prometheus_client": (
        "prometheus_client",
        "metrics",
        "import logging\n"
        "from distributed import Client\n"
        "import dask_p2p\n"
        "with Client(processes=False, silence_logs=logging.INFO) as c: dask_p2p.register(c)",
    ),
    "cupy": ("cupy", "cuda13", "import dask_p2p; dask_p2p.local_cluster(gpus=True)"),
    "cupy, map_on_gpu": (
        "cupy",
        "cuda13",
        "import dask.array as da, dask_p2p\n"
        "dask_p2p.map_on_gpu(abs, da.ones(4), dtype=float).compute()",
    ),
    "dask_cuda": ("dask_cuda", "cuda13", "import dask_p2p; dask_p2p.local_cluster(gpus=True)"),
    "distributed_ucxx": (
        "distributed_ucxx",
        "cuda13",
        "import dask_p2p; dask_p2p.local_cluster(1, gpus=False, protocol='ucx')",
    ),
    "ucxx": (
        "ucxx",
        "ucx",
        "from dask_p2p.transports.ucx_messenger import ucxx_obstacle\n"
        "print(ucxx_obstacle().full_text)",
    ),
    "rich": ("rich", "bench", "import runpy; runpy.run_module('benchmarks', run_name='__main__')"),
}


def output_without(missing, folder, program):
    (folder / "sitecustomize.py").write_text(WITHOUT)
    (folder / "program.py").write_text("if __name__ == '__main__':\n" + indent(program, "    "))
    variables = {"PYTHONPATH": f"{folder}:{import_path()}", "MISSING_PACKAGES": missing}
    process = ran(folder / "program.py", cwd=folder, **variables)
    return process.stdout + process.stderr


@pytest.mark.programs
@pytest.mark.parametrize("case", PROGRAMS)
def test_a_missing_package(tmp_path, case):
    missing, extra, program = PROGRAMS[case]
    assert install_command(extra) in output_without(missing, tmp_path, program)


@pytest.mark.programs
def test_the_package_without_any_extra(tmp_path):
    """The others work without them."""
    names = {name for name, _, _ in PROGRAMS.values()}
    program = (
        "import dask.array as da, dask_p2p\n"
        "x = da.arange(12, chunks=3).reshape(4, 3)\n"
        "print(dask_p2p.transpose(x).compute().tolist())"
    )
    output = output_without(",".join(sorted(names)), tmp_path, program)
    assert output == "[[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]\n"


def test_errors_of_packages_that_are_there():
    with pytest.raises(ModuleNotFoundError, match="other") as caught, needs("zarr", "zarr"):
        raise ModuleNotFoundError("No module named 'other'", name="other")
    assert not isinstance(caught.value, MissingPackageError)
    with pytest.raises(MissingPackageError, match="package zarr") as caught, needs("zarr", "zarr"):
        raise ModuleNotFoundError("No module named 'zarr.core'", name="zarr.core")
    assert caught.value.name == "zarr"
