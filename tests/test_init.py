from __future__ import annotations

import json
import subprocess
import sys
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
dask_p2p.transpose, dask_p2p.register, dask_p2p.local_cluster
import dask_p2p.files, dask_p2p.measure, dask_p2p.worker, dask_p2p.preload
print(json.dumps({
    "light": light,
    "modules": sorted(sys.modules),
    "environment": {k: v for k, v in os.environ.items() if before.get(k) != v},
}))
"""


def loaded_by_distributed():
    program = "import sys, distributed; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return {name.partition(".")[0] for name in done.stdout.split()} - {"cupy", "ucxx", "dask_cuda"}


def test_importing_loads_no_gpu_library_and_sets_no_variable():
    done = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, check=True, timeout=60
    )
    seen = json.loads(done.stdout)
    top = {name.partition(".")[0] for name in seen["modules"]}
    light = {name.partition(".")[0] for name in seen["light"]}
    assert light.isdisjoint({"distributed", "numpy"}), "`dask` pays for this at each start"
    # Without these nothing can have made a CUDA context. Some of them distributed itself loads
    # where they are installed.
    loaded = top & {"cupy", "cupy_backends", "ucxx", "cuda", "rmm", "dask_cuda", "pynvml"}
    assert loaded <= loaded_by_distributed()
    assert seen["environment"] == {}


def test_all_is_what_is_there():
    assert list(dask_p2p.__all__) == sorted(dask_p2p.__all__)
    assert set(dask_p2p.__all__) <= set(dir(dask_p2p))
    for name in dask_p2p.__all__:
        assert callable(getattr(dask_p2p, name))
    with pytest.raises(AttributeError, match="nothing"):
        dask_p2p.nothing  # noqa: B018


def test_no_module_hides_a_function():
    import pkgutil

    modules = {module.name for module in pkgutil.iter_modules(dask_p2p.__path__)}
    assert modules.isdisjoint(dask_p2p.__all__)


def test_a_function_is_itself_after_its_module_is_imported():
    program = (
        "import dask_p2p.ops.transpose, dask_p2p.measure, dask_p2p, sys\n"
        "assert callable(dask_p2p.transpose) and callable(dask_p2p.register)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


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
