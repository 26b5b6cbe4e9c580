from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from dask_p2p.fusing.late import after_import
from tests.support import import_path


def test_a_module_that_is_imported():
    called = []
    after_import("sys", lambda: called.append(1))
    assert called == [1]


def test_a_module_that_is_imported_later(tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text("value = 3")
    monkeypatch.syspath_prepend(tmp_path)
    called = []
    before = list(sys.meta_path)
    after_import("late_module", lambda: called.append(sys.modules["late_module"].value))
    import json  # noqa: F401  # another one

    assert not called
    import late_module

    assert called == [late_module.value]
    assert sys.meta_path == before


def test_a_program_that_first_looks_for_the_module(tmp_path, monkeypatch):
    (tmp_path / "looked_for.py").write_text("value = 3")
    monkeypatch.syspath_prepend(tmp_path)
    called, before = [], list(sys.meta_path)
    for number in range(2):
        after_import("looked_for", lambda number=number: called.append(number))
    assert find_spec("looked_for") is not None
    assert not called
    import looked_for  # noqa: F401

    assert sorted(called) == [0, 1]
    assert sys.meta_path == before


def test_a_module_that_is_missing():
    after_import("no_such_module", lambda: pytest.fail("called"))
    with pytest.raises(ModuleNotFoundError):
        import no_such_module  # noqa: F401


@pytest.mark.parametrize("imports", ["import dask_p2p, dask.array", "import dask.array, dask_p2p"])
def test_the_option_counts_in_any_order_of_imports(imports):
    check = (
        "from dask_p2p.fusing.option import Optimization\n"
        "assert isinstance(vars(dask.array.Array)['__dask_optimize__'], Optimization)\n"
        "import sys; assert 'distributed' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{imports}\n{check}"],
        env={"PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "imports",
    [
        "import dask_p2p, dask.array, distributed",
        "import dask.array, distributed, dask_p2p",
        "import distributed, dask_p2p, dask.array",
    ],
)
def test_the_option_of_expressions_counts_in_any_order_of_imports(imports):
    check = "assert hasattr(distributed.Client._graph_to_futures, '__wrapped__')\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{imports}\n{check}"],
        env={"PYTHONPATH": import_path(), "DASK_ARRAY__QUERY_PLANNING": "True"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
