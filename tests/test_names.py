"""Each class name of the package stands for one thing, and each folder is small."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

import dask_p2p

MOST_FILES = 16


def classes_by_name(root):
    """Return the files of all classes by name, without leading underscores."""
    found = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(f"{path.relative_to(root)}:{node.lineno}")
    return found


def test_no_class_name_is_used_twice():
    found = classes_by_name(Path(dask_p2p.__file__).parent)
    assert len(found) > 200
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_a_name_that_is_used_twice_is_found(tmp_path):
    (tmp_path / "a.py").write_text("class Link:\n    class Part: ...\n")
    (tmp_path / "b.py").write_text("def f():\n    class _Link: ...\n")
    found = classes_by_name(tmp_path)
    assert found == {"Link": ["a.py:1", "b.py:2"], "Part": ["a.py:2"]}


def files_by_folder(root):
    """Return the number of Python files directly in each folder."""
    return Counter(str(path.parent.relative_to(root)) for path in root.rglob("*.py"))


def test_no_folder_has_more_files_than_one_reads_at_a_glance():
    counts = files_by_folder(Path(dask_p2p.__file__).parent)
    assert counts["sections/context"] > 10
    assert {folder: n for folder, n in counts.items() if n > MOST_FILES} == {}
