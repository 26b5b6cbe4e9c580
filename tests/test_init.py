from __future__ import annotations

import json
import subprocess
import sys

import dask_p2p
from dask_p2p import errors

LOOK = """
import json, os, sys
before = dict(os.environ)
import dask_p2p
print(json.dumps({
    "modules": sorted(sys.modules),
    "environment": {k: v for k, v in os.environ.items() if before.get(k) != v},
}))
"""


def test_importing_loads_no_gpu_library_and_sets_no_variable():
    done = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, check=True, timeout=60
    )
    seen = json.loads(done.stdout)
    top = {name.partition(".")[0] for name in seen["modules"]}
    # Without these nothing can have made a CUDA context.
    assert top.isdisjoint({"cupy", "cupy_backends", "ucxx", "cuda", "rmm", "dask_cuda", "pynvml"})
    assert seen["environment"] == {}


def test_all_is_what_is_there():
    public = {name for name in vars(dask_p2p) if not name.startswith("_")}
    modules = {name for name in public if isinstance(vars(dask_p2p)[name], type(sys))}
    assert set(dask_p2p.__all__) == public - modules
    assert list(dask_p2p.__all__) == sorted(dask_p2p.__all__)


def test_every_error_is_public_and_of_one_tree():
    for name in errors.__all__:
        assert getattr(dask_p2p, name) is getattr(errors, name)
        if name != "P2PWarning":
            assert issubclass(getattr(errors, name), errors.P2PError)
