"""The numbers that tests replace."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

import dask_p2p
from dask_p2p import tuning
from dask_p2p.tuning import Tuning
from tests.support import tune

NAMES = {field.name for field in fields(Tuning)}
PACKAGE, TESTS = Path(dask_p2p.__file__).parent, Path(__file__).parent


def nodes_of(folder, word):
    """Yield the nodes of all files with a word."""
    for path in sorted(folder.rglob("*.py")):
        if word in (text := path.read_text()):
            for node in ast.walk(ast.parse(text)):
                yield path.relative_to(folder), node


def test_the_package_reads_each_number():
    read = {node.attr for _, node in nodes_of(PACKAGE, "tuning") if isinstance(node, ast.Attribute)}
    assert NAMES - read == set()


def test_tests_replace_each_number():
    replaced = {
        keyword.arg
        for path, node in nodes_of(TESTS, "tune")
        if path.name != Path(__file__).name
        and isinstance(node, ast.Call)
        and getattr(node.func, "id", None) in ("tune", "tune_here")
        for keyword in node.keywords
    }
    assert NAMES - replaced == set()


def read_at_import(module):
    """Return the lines of `tuning.current` outside of functions, and in defaults of arguments."""
    within = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            within |= {id(each) for line in node.body for each in ast.walk(line)}
    return [
        node.lineno
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) == "tuning.current"
        and id(node) not in within
    ]


def test_no_number_is_read_at_import():
    """A test would replace it in vain."""
    for path, node in nodes_of(PACKAGE, "tuning"):
        if isinstance(node, ast.Module):
            assert read_at_import(node) == [], path
        if isinstance(node, ast.ImportFrom) and node.module == "dask_p2p.tuning":
            assert [each.name for each in node.names] == ["Tuning"], path


def test_a_number_that_is_read_at_import_is_found():
    text = "a = tuning.current.a\ndef f(b=tuning.current.b):\n    return tuning.current.c\n"
    assert read_at_import(ast.parse(text)) == [1, 2]


def test_numbers_are_replaced_for_a_test():
    before = tuning.current
    with pytest.MonkeyPatch.context() as patch:
        tune(patch, spin_s=7.0)
        tune(patch, close_s=8.0)
        assert (tuning.current.spin_s, tuning.current.close_s) == (7.0, 8.0)
        with pytest.raises(TypeError, match="spin_seconds"):
            tune(patch, spin_seconds=1.0)
    assert tuning.current is before
