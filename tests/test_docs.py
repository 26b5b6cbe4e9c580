"""The documentation is true: its examples run, and the names in it are there."""

from __future__ import annotations

import ast
import doctest
import pkgutil
import re
from importlib import import_module
from pathlib import Path

import dask.array as da
import pytest

import dask_p2p

ROOT = Path(dask_p2p.__file__).parents[1]
MODULES = sorted(
    module.name for module in pkgutil.walk_packages(dask_p2p.__path__, prefix="dask_p2p.")
)
GPU_LIBRARIES = {"cuda", "cupy", "cupy_backends", "dask_cuda", "pynvml", "rmm", "ucxx"}


@pytest.mark.parametrize("name", ["dask_p2p", *MODULES])
def test_examples_in_docstrings(name):
    try:
        module = import_module(name)
    except ImportError as exc:
        if (exc.name or "").partition(".")[0] not in GPU_LIBRARIES:
            raise
        pytest.skip(f"needs {exc.name}")
    assert doctest.testmod(module).failed == 0


WALK = (ROOT / "docs" / "walk.md").read_text("utf-8")
STEPS = re.findall(r"^ *(\d+)  (\S+) +(\S+)", WALK, flags=re.MULTILINE)


def functions_of(module):
    """Return the qualified names of a module's functions; it may need a GPU to be imported."""
    tree = ast.parse((ROOT / "dask_p2p" / f"{module}.py").read_text("utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        functions = (node for node in cls.body if isinstance(node, ast.FunctionDef))
        names |= {f"{cls.name}.{function.name}" for function in functions}
    return names


def test_the_walk_is_made_of_functions_that_there_are():
    assert [int(number) for number, _, _ in STEPS] == list(range(1, len(STEPS) + 1))
    for _, module, name in STEPS:
        assert name in functions_of(module), (module, name)


def test_the_walk_is_counted():
    modules = {module for _, module, _ in STEPS}
    assert f"These are {len(STEPS)} functions in {len(modules)} modules" in WALK
    records = re.findall(r"`(\w+)`", WALK.partition("## Records")[2])
    assert f"These are {len(records)}." in WALK
    classes = {
        node.name
        for path in (ROOT / "dask_p2p").rglob("*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    assert set(records) <= classes


README = (ROOT / "README.md").read_text("utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_the_readme_names_every_module():
    table = README.partition("| module |")[2].partition("\n\n")[0]
    named = {
        name
        for row in table.splitlines()
        for name in re.findall(r"`(\w+)`", row[: row.find("|", 2)])
    }
    assert named == {module.name for module in pkgutil.iter_modules(dask_p2p.__path__)}


@pytest.mark.cluster
def test_the_readmes_examples_run():
    """One after another, as a reader would run them, with an array that is there."""
    names = {"__name__": "readme", "x": da.ones((20, 30), chunks=(5, 30))}
    assert len(EXAMPLES) == 3
    for example in EXAMPLES:
        exec(compile(example, "README.md", "exec"), names)
    assert names["s"].shape == (4000, 4000)
    assert names["z"].chunks == ((4000,), (1000,) * 4)


def test_links_between_documents_lead_somewhere():
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)", path.read_text("utf-8")):
            assert (path.parent / target.strip()).exists(), (path.name, target)
