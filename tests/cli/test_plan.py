from __future__ import annotations

import re
import subprocess
import sys

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_p2p.cli import p2p
from dask_p2p.cli.plan import readers, slab_plan


def run(*args):
    return CliRunner().invoke(p2p, ["plan", *args])


def rows(text):
    """Return the cells of the rows of the table of stages."""
    return [re.split(r"\s*│\s*", line)[1:-1] for line in text.splitlines() if line[:1] == "│"]


def fact(text, name):
    return next(
        re.split(r"\s{2,}", line.strip())[1] for line in text.splitlines() if line.startswith(name)
    )


def test_the_figure_of_the_article():
    """1024 x 768 elements with x fastest, four devices."""
    result = run("--shape", "768x1024", "--workers", "4")
    assert (result.exit_code, result.stderr) == (0, "")
    assert fact(result.stdout, "input slabs") == "4 of 192 x 1024"
    assert fact(result.stdout, "output slabs") == "4 of 256 x 768"
    assert fact(result.stdout, "tiles") == "16 of 192 x 256"
    assert fact(result.stdout, "stages") == "4; nothing moves in stage 0"
    assert fact(result.stdout, "moved") == "2.25 MiB of 3.00 MiB"
    sizes = ["576.00 kiB", "192.00 kiB", "768.00 kiB"]
    assert rows(result.stdout) == [
        ["0", "0", "1", "2", "3", *sizes],
        ["1", "1", "2", "3", "0", *sizes],
        ["2", "2", "3", "0", "1", *sizes],
        ["3", "3", "0", "1", "2", *sizes],
    ]


def test_uneven_slabs_other_axes_and_dtypes():
    result = run("--shape", "10x7x3", "--workers", "4", "--axes", "1,0,2", "--dtype", "complex128")
    assert fact(result.stdout, "input slabs") == "2 of 3 x 7 x 3, 2 of 2 x 7 x 3"
    assert fact(result.stdout, "output slabs") == "3 of 2 x 10 x 3, 1 of 1 x 10 x 3"
    assert "6 of 3 x 2 x 3" in fact(result.stdout, "tiles")
    assert fact(result.stdout, "array") == "10 x 7 x 3 complex128, 3.28 kiB"


def test_more_workers_than_rows():
    result = run("--shape", "3x5", "--workers", "4", "--dtype", "i1")
    assert fact(result.stdout, "input slabs") == "3 of 1 x 5, 1 of 0 x 5"
    assert rows(result.stdout)[-1] == ["3", "-", "0", "1", "2", "3 B", "0 B", "3 B"]


def test_a_result_with_fewer_rows_than_workers_is_cut_along_both_axes():
    result = run("--shape", "60x3", "--workers", "6", "--dtype", "i1")
    assert fact(result.stdout, "workers") == "6"
    assert fact(result.stdout, "output slabs") == "6 of 1 x 30"
    table = rows(result.stdout)
    assert [row[0] for row in table] == [*"012345"]
    assert [row[1:4] for row in table[2:4]] == [["2", "0", "1"], ["3", "4", "5"]]


def test_what_moves_nothing():
    result = run("--shape", "8x3x5", "--workers", "2", "--axes", "0,2,1", "--dtype", "u1")
    assert rows(result.stdout) == [
        ["0", "0", "0 B", "60 B", "60 B"],
        ["1", "1", "0 B", "60 B", "60 B"],
    ]


def test_many_workers_are_abbreviated():
    result = run("--shape", "1000x1000", "--workers", "100")
    table = rows(result.stdout)
    assert [row[0] for row in table] == ["0", "1", "2", "...", "99"]
    assert table[-1][1:6] == ["99", "0", "1", "...", "98"]
    assert max(map(len, result.stdout.splitlines())) <= 100


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--shape", "768", "--workers", "0"], "0 is not in the range"),
        (["--shape", "768x0", "--workers", "2"], "lengths of at least 1"),
        (["--shape", "768xx3", "--workers", "2"], "lengths of at least 1"),
        (["--shape", "big", "--workers", "2"], "lengths of at least 1"),
        (["--shape", "6x6", "--workers", "2", "--axes", "0,0"], "in any order"),
        (["--shape", "6x6", "--workers", "2", "--axes", "0,1,2"], "in any order"),
        (["--shape", "6x6", "--workers", "2", "--axes", "a"], "commas between"),
        (["--shape", "6x6", "--workers", "2", "--dtype", "float31"], "NumPy has no dtype"),
        (["--shape", "6x6", "--workers", "2", "--dtype", "object"], "boolean, integer, float"),
        (["--shape", "6x6"], "--workers"),
        (["--workers", "2"], "--shape"),
    ],
)
def test_wrong_usage(args, words):
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr.splitlines()[-1]


def test_no_cluster_and_no_arrays_are_needed():
    code = (
        "import sys; from click.testing import CliRunner; from dask_p2p.cli.plan import plan;"
        "r = CliRunner().invoke(plan, ['--shape', '768x1024', '--workers', '4']);"
        "print(r.exit_code, {'cupy', 'dask_cuda'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "0 set()\n", done.stderr


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4).flatmap(
        lambda shape: st.tuples(st.just(tuple(shape)), st.permutations(range(len(shape))))
    ),
    st.integers(1, 13),
)
def test_every_element_is_received_or_kept(shape_and_axes, workers):
    shape, axes = shape_and_axes
    made = slab_plan(shape, tuple(axes), workers)
    parts = list(readers(made))
    elements = 1
    for length in shape:
        elements *= length
    assert len(parts) <= workers
    assert len(parts) == workers or shape[axes[0]] < workers
    assert sum(part.received_elements + part.kept_elements for part in parts) == elements
    for reader, part in enumerate(parts):
        assert part.holders[0] in (reader, None)
        assert len(set(part.holders)) == len(part.holders)
        if part.kept_elements:
            assert part.holders[0] == reader
