"""The documentation is true: the names in it are there, and its links lead somewhere."""

import ast
import doctest
import pkgutil
import re
import runpy
from functools import cache
from importlib import import_module

import pytest
import yaml
from packaging.requirements import Requirement

import dask_p2p
from tests.docs.pages import (
    DOCS,
    NOTEBOOKS,
    OTHERS,
    PAGES,
    PROJECT,
    README,
    REPOSITORY,
    ROOT,
    blocks_of,
)

GPU_LIBRARIES = {"cuda", "cupy", "cupy_backends", "dask_cuda", "pynvml", "rmm", "ucxx"}


def with_examples():
    """Return the modules that have examples, by folder of the package."""
    modules = {}
    for package in ("dask_p2p", "benchmarks"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if ">>> " in path.read_text("utf-8"):
                module = path.relative_to(ROOT).with_suffix("")
                parts = module.parts[:-1] if path.name == "__init__.py" else module.parts
                modules.setdefault(".".join(parts[:2]), []).append(".".join(parts))
    return modules


@pytest.mark.parametrize(("room", "names"), with_examples().items())
def test_examples_in_docstrings(room, names):
    example_count = 0
    for name in names:
        try:
            module = import_module(name)
        except ImportError as exc:
            if (exc.name or "").partition(".")[0] not in GPU_LIBRARIES:
                raise
            continue
        result = doctest.testmod(module)
        assert result.failed == 0, name
        example_count += result.attempted
    assert example_count > 0, f"no module of {room} can be imported here"


_PARAMETERS = re.compile(r"^Parameters\n-+\n(.*?)(?=\n\n?[A-Z][\w ]+\n---|\Z)", re.M | re.S)


CLASSES = {
    node.name: node
    for path in (ROOT / "dask_p2p").rglob("*.py")
    for node in ast.parse(path.read_text("utf-8")).body
    if isinstance(node, ast.ClassDef)
}


def documented(node):
    section = _PARAMETERS.search(ast.get_docstring(node) or "")
    lines = [line for line in section[1].splitlines() if line[:1].strip()] if section else []
    names = (name for line in lines for name in line.partition(" : ")[0].split(","))
    return {name.strip().lstrip("*") for name in names}


def parameters_of(node):
    if isinstance(node, ast.ClassDef):
        inits = (n for n in node.body if getattr(n, "name", "") == "__init__")
        fields = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}
        bases = [CLASSES[base.id] for base in node.bases if getattr(base, "id", "") in CLASSES]
        return fields.union(*map(parameters_of, [*inits, *bases]))
    return {n.arg for n in ast.walk(node.args) if isinstance(n, ast.arg)}


def test_docstrings_name_parameters_that_there_are():
    kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
    checked = 0
    for path in sorted((ROOT / "dask_p2p").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, kinds) and (names := documented(node)):
                assert names <= parameters_of(node), (path, node.name)
                checked += 1
    assert checked > 40


def test_every_module_is_named():
    text = (DOCS / "design.md").read_text("utf-8")
    _, _, *rows = text.partition("| module ")[2].partition("\n\n")[0].splitlines()
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == {module.name for module in pkgutil.iter_modules(dask_p2p.__path__)}


def test_the_reference_names_all_that_is_public():
    """Beside it only what these functions return, and xarray's accessor; errors list themselves."""
    text = (DOCS / "reference" / "api.rst").read_text("utf-8")
    listed = re.findall(r"^   ~?([\w.]+)$", text, flags=re.MULTILINE)
    assert len(listed) == len(set(listed))
    public = set(dask_p2p.__all__) - set(dask_p2p.errors.__all__)
    assert {name for name in listed if "." not in name} == public
    transforms = {name.partition(".")[2] for name in listed if name.startswith("fft.")}
    assert transforms == set(dask_p2p.fft.__all__)
    assert ".. automodule:: dask_p2p.errors\n   :members:" in text


def test_the_table_of_options_is_whole():
    rows = list(runpy.run_path(str(DOCS / "options_table.py"))["rows"]())
    defaults = yaml.safe_load((ROOT / "dask_p2p" / "p2p.yaml").read_text("utf-8"))

    def leaves(prefix, value):
        if not isinstance(value, dict):
            return {prefix}
        return set().union(*(leaves(f"{prefix}.{part}", branch) for part, branch in value.items()))

    assert {name for name, *_ in rows} == leaves("p2p", defaults["p2p"])
    assert all(values and text for _, _, values, text in rows)


def numbers(requirement):
    return re.findall(r"[\d.]+\d", str(requirement.specifier))


def test_the_tables_of_versions_are_whole():
    """They name each package that a user may have to install, with its range."""
    table_module = runpy.run_path(str(DOCS / "versions_table.py"))
    extras = PROJECT["optional-dependencies"]
    assert {*table_module["EXTRAS"], *table_module["OTHERS"]} == set(extras)
    rows = [line.split(" | ") for line in table_module["tables"]().splitlines()]
    for requirement in map(Requirement, PROJECT["dependencies"]):
        (row,) = [row for row in rows if row[0] == f"| {requirement.name}"]
        assert all(number in row[1] for number in numbers(requirement)), row
    for column, extra in enumerate(table_module["GPUS"], start=2):
        for package in map(Requirement, extras[extra]):
            names = package.name, table_module["_shared"](package.name)
            (row,) = [row for row in rows if row[0][2:] in names]
            assert all(number in row[column] for number in numbers(package)), row
    for extra in table_module["EXTRAS"]:
        ((*_, listed),) = [row for row in rows if row[0] == f"| `{extra}`"]
        for package in map(Requirement, extras[extra]):
            (cell,) = [cell for cell in listed.split(", ") if cell.startswith(f"{package.name} ")]
            assert all(number in cell for number in numbers(package)), cell
    assert dask_p2p.__version__ in table_module["setups"]()["CPUs"]["dask-p2p"]
    assert ["| 3.11", "oldest |"] in rows


def test_the_pages_of_deploy_are_in_the_site():
    pages_module = runpy.run_path(str(DOCS / "deploy_pages.py"))
    pages = pages_module["pages"]()
    folders = {path.parent.name for path in (ROOT / "deploy").glob("*/README.md")}
    assert pages.keys() == {*folders, "index"}
    assert "\nslurm\n" in pages["index"].partition("{toctree}")[2]
    targets = re.findall(r"\]\(([^)\s]+)", "\n".join(pages.values()))
    own_links = {f"/_generated/deploy/{name}.md" for name in pages}
    assert {target for target in targets if not target.startswith(("https:", "#"))} == own_links
    assert all(exists(target, ROOT) for target in targets if target.startswith(REPOSITORY))
    page = (DOCS / "how-to" / "cluster.md").read_text("utf-8")
    assert f"{REPOSITORY}/tree/main/deploy" not in pages_module["linked"](page)
    other_link = f"[{REPOSITORY}]({REPOSITORY}/tree/main/benchmarks)"
    assert pages_module["linked"](other_link) == other_link


def test_the_picture_of_the_stages_is_what_the_script_draws():
    drawn = runpy.run_path(str(DOCS / "draw_stages.py"))["picture"]()
    assert (DOCS / "images" / "stages.svg").read_text("utf-8") == drawn


DOCUMENTS = [README, *OTHERS, *PAGES, *NOTEBOOKS]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    text = path.read_text("utf-8")
    for target in re.findall(r"\]\(\s*([^)#\s]+)", text):
        assert exists(target, path.parent), (path.name, target)


def exists(target, folder):
    """Tell whether there is what a link to this checkout leads to; others are taken as they are."""
    own_page = re.match(rf"{REPOSITORY}/(?:blob|tree|raw)/main/(.*)", target)
    if own_page:
        return (ROOT / own_page[1]).exists()
    return target.startswith("http") or any((folder / f"{target}{e}").exists() for e in ("", ".md"))


def test_one_way_to_install():
    """From a checkout in what is read there, from the repository elsewhere: in no package index."""
    extras, commands = PROJECT["optional-dependencies"], set()
    for path in [README, *OTHERS, *PAGES, *(ROOT / "deploy").rglob("*.yml")]:
        text = path.read_text("utf-8")
        for line in re.findall(r"pip install.*dask.p2p\[.*", text):
            (argument,) = re.findall(r"'(dask-p2p\[.*?)'", line) or [line]
            requirement = Requirement(argument)
            assert requirement.url == f"git+{REPOSITORY}", (path.name, line)
            assert requirement.extras <= set(extras), (path.name, line)
            commands.add(path.name)
        checkout = path.name in ("README.md", "CONTRIBUTING.md") and path.parent == ROOT
        assert checkout or "pip install -e" not in text, path.name
    assert commands >= {"README.md", "tutorial.md", "gpu-cluster.md"}


def test_the_readme_is_short_and_its_links_work_elsewhere():
    """A package index shows it, without the files beside it."""
    text = README.read_text("utf-8")
    assert len(text.splitlines()) < 100
    targets = re.findall(r"(?:\]\(\s*|(?:src|href)=\")([^)\s\"]+)", text)
    assert all(target.startswith("https://") and exists(target, ROOT) for target in targets)


PROGRAMS = ("dask_p2p", "deploy", "benchmarks")
QUOTING = [page for page in (README, *OTHERS, *PAGES) if page.name != "CHANGELOG.md"]
#: Blocks of text that are diagrams.
DIAGRAMS = [
    DOCS / name for name in ("design.md", "how-to/host-arrays.md", "how-to/streamed-fields.md")
]
#: Messages and titles of other programs.
FOREIGN = {
    "Aggregate time per action",
    "Fine performance metrics",
    "Host key is not trusted",
    "No such file or directory",
}


VALUE = "\0"  # stands for a value in a text


@cache
def patterns():
    """Return a pattern for each text in the programs, and the number of its letters.

    Parts between commas, and sentences, also count: a line may be put together from several.
    """
    texts = {text for folder in PROGRAMS for text in texts_of(ROOT / folder)}
    texts |= {part for text in texts for part in re.split(r", |\. ", text)}
    return [
        (re.compile(re.escape(text).replace(VALUE, ".*"), re.S), letters_in(text)) for text in texts
    ]


def texts_of(folder):
    for path in folder.rglob("*.sh"):
        yield from re.findall(r'"([^"\n]*)', path.read_text("utf-8"))
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    part.value if isinstance(part, ast.Constant) else VALUE for part in node.values
                )
                yield "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                # `print` may put a value after a colon.
                yield node.value + f" {VALUE}" * node.value.endswith(":")


def letters_in(text):
    return sum(map(str.isalpha, text))


def is_printed(text):
    letters = letters_in(text)
    return any(
        count
        and 3 * count >= letters
        and (pattern.fullmatch(text) or pattern.fullmatch(f"{text} "))  # the line may go on
        for pattern, count in patterns()
    )


def quoted_outputs():
    """Yield the lines of output that pages quote, in the parts that are printed together."""
    for page in QUOTING:
        for block in blocks_of(page):
            if block.language == "text" and page not in DIAGRAMS:
                is_row = False
                for line in block.text.splitlines():
                    cells = re.split(r"\s{2,}", line.strip())
                    if len(cells) < 3:
                        is_row, cells = False, line.split(", ")
                    elif is_row:
                        continue
                    else:
                        is_row = True  # the first line of a table has its titles
                    if not line.startswith((">>>", "...")):
                        yield from ((block.where, cell) for cell in cells if letters_in(cell))


def quoted_sentences():
    for page in QUOTING:
        text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.S | re.M)
        for sentence in re.findall(r"`([A-Z][a-z]*(?:\s[a-zA-Z,]+){2,}[.:]?)`", text):
            yield str(page.relative_to(ROOT)), " ".join(sentence.split())


@pytest.mark.parametrize("quotes", [quoted_outputs, quoted_sentences])
def test_what_pages_quote_is_printed(quotes):
    all_quotes = list(quotes())
    unknown = [(where, quote) for where, quote in all_quotes if not is_printed(quote)]
    assert {(where, quote) for where, quote in unknown if quote not in FOREIGN} == set()
    assert len(all_quotes) > len(unknown)


def test_texts_that_are_not_printed_are_unknown():
    assert not is_printed("Nothing is in the way.")
    assert not is_printed("exchange of one block")
