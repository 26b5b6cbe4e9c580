"""Imports that import-linter cannot see: modules of this package that code names by strings."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "dask_p2p"
#: Functions that import modules of this package by name, each with its reason in the module.
ALLOWED = {
    "dask_p2p/backends/cupy.py": 1,  # kernels, which import CuPy
    "dask_p2p/cli/__init__.py": 1,  # commands, at their first use
    "dask_p2p/loading.py": 2,  # public functions, at their first use
}


def is_by_name(call: ast.Call) -> bool:
    """Return true if a call may import a module of this package by its name."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in ("import_module", "__import__") or not call.args:
        return False
    module = call.args[0]
    if isinstance(module, ast.JoinedStr):
        module = module.values[0]
    text = module.value if isinstance(module, ast.Constant) else None
    return text is None or str(text).startswith("dask_p2p")


def test_imports_by_string_are_listed() -> None:
    calls = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        number = sum(isinstance(node, ast.Call) and is_by_name(node) for node in ast.walk(tree))
        if number:
            calls[str(path.relative_to(PACKAGE.parent))] = number
    others = {"dask_p2p/ops/fft/local.py": 2, "dask_p2p/tools/dropin.py": 1}  # NumPy, SciPy, Dask
    assert calls == ALLOWED | others
