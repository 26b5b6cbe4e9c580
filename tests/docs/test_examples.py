"""The code in the documentation runs: each page from its top, as a reader would type it.

Sphinx runs the notebooks, and fails where a cell does.
"""

import doctest
import importlib
import re
import shlex
import warnings
from functools import cache

import dask.array as da
import pytest
import xarray as xr
import yaml
from click.testing import CliRunner
from distributed import Client
from jsonschema import Draft7Validator
from xarray.namedarray.parallelcompat import list_chunkmanagers

import dask_p2p
from dask_p2p.cli import p2p
from tests.docs.pages import (
    GALLERY,
    OTHERS,
    PAGES,
    READ,
    README,
    ROOT,
    RUN,
    Block,
    blocks_of,
    run_program,
)

pytestmark = pytest.mark.programs

BLOCKS = {page: blocks_of(page) for page in (README, *PAGES)}
#: Libraries that only some pages need, which say so.
LIBRARIES = ("jax", "torch")
CONSOLIDATED = "Consolidated metadata is currently not part in the Zarr"  # xarray writes it
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# Blocks that need what the machine that runs the tests may lack. Each says so in its page too.
NOT_RUN = {
    "docs/how-to/cluster.md": 5,
    "docs/how-to/files.md": 1,
    "docs/how-to/gpu-cluster.md": 2,
    "docs/how-to/xarray.md": 2,
}


def name(page):
    return str(page.relative_to(ROOT))


def has_code(page):
    return any(block.language in RUN and not block.not_run for block in BLOCKS[page])


def run(block, names):
    {"python": run_python, "pycon": run_session, "console": run_commands}[block.language](
        block, names
    )


def run_python(block, names):
    lines_above = "\n" * (block.line - 1)  # so that tracebacks name the page's line
    exec(compile(lines_above + block.text, str(block.page), "exec"), names)


def run_session(block, names):
    """Run lines after ``>>>``, and compare what they give with what the page says."""
    session = doctest.DocTestParser().get_doctest(
        block.text, names, block.where, str(block.page), block.line - 1
    )
    assert session.examples, block.where
    printed = []
    result = doctest.DocTestRunner(optionflags=FLAGS).run(
        session, out=printed.append, clear_globs=False
    )
    assert result.failed == 0, "".join(printed)
    names.update(session.globs)


def run_commands(block, _):
    """Run lines after ``$``, and compare what they print, if the page says what that is."""
    first, *parts = re.split(r"^\$ dask p2p (.*)\n", block.text, flags=re.MULTILINE)
    assert not first, block.where
    assert parts, block.where
    for command, expected in zip(parts[::2], parts[1::2], strict=True):
        result = CliRunner().invoke(p2p, shlex.split(command))
        assert result.exit_code == 0, (block.where, result.output)
        same = doctest.OutputChecker().check_output(expected, result.stdout, FLAGS)
        assert same or not expected, (block.where, result.stdout)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder to write to, with a store to read; and afterwards Dask rechunks as before."""
    monkeypatch.chdir(tmp_path)
    days = da.zeros((4, 60, 6), chunks=(1, 60, 6))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", CONSOLIDATED)
        xr.DataArray(days, dims=("time", "lat", "lon"), name="t").to_zarr("days.zarr")
    yield
    dask_p2p.uninstall()
    list_chunkmanagers.cache_clear()  # a page may have registered another one


@pytest.mark.filterwarnings(f"ignore:{CONSOLIDATED}")
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("page", [page for page in BLOCKS if has_code(page)], ids=name)
def test_the_code_of_a_page_runs(page, request):
    """One block after another, in one namespace, in which nothing is: each page is read alone."""
    text = page.read_text("utf-8")
    if "import dask_array" in text:
        request.getfixturevalue("dask_array")
    for library in LIBRARIES:
        if f"import {library}\n" in text:
            pytest.importorskip(library)
    names = {"__name__": "__main__" if page == README else "docs"}
    try:
        for block in BLOCKS[page]:
            if block.language in RUN and not block.not_run:
                run(block, names)
    finally:
        for client in [member for member in names.values() if isinstance(member, Client)]:
            cluster = client.cluster
            client.close()
            if cluster is not None:
                cluster.close()


@pytest.mark.parametrize("program", GALLERY, ids=name)
def test_programs_of_the_gallery_have_the_same_values_on_several_ranks(program, client):
    """Each program compares its values with those of NumPy, or with what is known."""
    ranks = len(client.scheduler_info()["workers"])
    run_program(program)
    newest = dask_p2p.last_runs(client)[0]
    assert len({record.worker for record in newest.records}) == ranks > 1


def test_no_block_is_left_out_silently():
    left_out = {}
    for page, blocks in BLOCKS.items():
        text = page.read_text("utf-8")
        opened = re.findall(
            r"^[ >]*(?:`{3,}|~{3,})[ {]*(?=\S)(?:code|py|ipy|con|doctest)", text, re.M
        )
        code = [block for block in blocks if block.language in RUN]
        assert len(opened) == len(code), name(page)
        for block in blocks:
            assert block.language in (*RUN, *READ) or block.language[:1] == "{", block.where
        if count := sum(bool(block.not_run) for block in code):
            left_out[name(page)] = count
    assert left_out == NOT_RUN


def test_a_block_that_fails_is_a_failure():
    page = ROOT / "page.md"
    with pytest.raises(ZeroDivisionError):
        run(Block(page, 1, "python", "1 / 0\n"), {})
    with pytest.raises(AssertionError, match="Expected"):
        run(Block(page, 1, "pycon", ">>> 1 + 1\n3\n"), {})
    with pytest.raises(AssertionError):
        run(Block(page, 1, "console", "$ dask p2p --version\nno\n"), {})
    with pytest.raises(AssertionError):
        run(Block(page, 1, "console", "$ dask p2p rechunk\n"), {})


COMMANDS = [
    (block.where, words)
    for blocks in (*BLOCKS.values(), *map(blocks_of, OTHERS))
    for block in blocks
    if block.language in ("sh", "console")
    for line in block.text.splitlines()
    if "dask p2p" in line
    for words in [shlex.split(line.partition("dask p2p")[2], comments=True)]
]


@pytest.mark.parametrize(("where", "words"), COMMANDS, ids=[where for where, _ in COMMANDS])
def test_commands_have_the_options_that_are_shown(where, words):
    command = p2p.get_command(None, words[0])
    assert command is not None, where
    flags = {flag for option in command.params for flag in option.opts}
    assert {word for word in words if word.startswith("--")} <= flags


PROGRAMS = sorted(
    {
        (module, option)
        for blocks in (*BLOCKS.values(), *map(blocks_of, OTHERS))
        for block in blocks
        if block.language == "sh"
        for module, arguments in re.findall(r"python -m (benchmarks\S*)(.*)", block.text)
        for option in re.findall(r"--[\w-]+", arguments)
    }
)


@cache
def help_of(module):
    name, main = ("benchmarks.bench", "bench") if module == "benchmarks" else (module, "main")
    command = getattr(importlib.import_module(name), main)
    return CliRunner().invoke(command, ["--help"]).output


@pytest.mark.parametrize(("module", "option"), PROGRAMS)
def test_programs_that_measure_have_the_options_that_are_shown(module, option):
    assert re.search(rf"{option}\b", help_of(module))


SETTINGS = [block for blocks in BLOCKS.values() for block in blocks if block.language == "yaml"]


@pytest.mark.parametrize("block", SETTINGS, ids=[block.where for block in SETTINGS])
def test_configuration_that_is_shown_is_right(block):
    schema = yaml.safe_load((ROOT / "dask_p2p" / "p2p-schema.yaml").read_text("utf-8"))
    settings = yaml.safe_load(block.text)
    assert list(Draft7Validator(schema).iter_errors(settings)) == []
    assert settings.keys() <= {"p2p", "distributed"}
