"""Metadata, workflows and templates: what a package index and a forge show and run."""

import re
from datetime import date

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from dask_p2p.versions import DASK_RELEASES
from tests.deploy.support import BIN, is_valid
from tests.docs.pages import PROJECT, ROOT
from tests.support import output_of, run_command

pytestmark = pytest.mark.programs

GITHUB = ROOT / ".github"
TEXT = (ROOT / "deploy" / "conda" / "recipe.yaml").read_text()
RECIPE, CITATION = yaml.safe_load(TEXT), yaml.safe_load((ROOT / "CITATION.cff").read_text())
SCHEMAS = {
    ".github/workflows/ci.yml": "github-workflows",
    ".github/workflows/release.yml": "github-workflows",
    ".github/ISSUE_TEMPLATE/bug.yml": "github-issue-forms",
    ".github/ISSUE_TEMPLATE/wish.yml": "github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "github-issue-config",
    "CITATION.cff": "citation-file-format",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_files_are_what_their_readers_take(name, tmp_path):
    path = ROOT / name
    assert is_valid(path, SCHEMAS[name])
    (tmp_path / path.name).write_text(f"{path.read_text()}\nunknown: 1\n")
    assert not is_valid(tmp_path / path.name, SCHEMAS[name])


def test_all_files_are_held_against_a_schema():
    workflows = {str(path.relative_to(ROOT)) for path in GITHUB.rglob("*.yml")}
    assert workflows == {name for name in SCHEMAS if name.startswith(".github")}


GPU_EXTRAS = {"cuda12": "12", "cuda13": "13"}


def test_the_extras_for_gpus_are_the_same_but_for_cuda():
    listed = [
        {
            re.sub(rf"(cu|cuda){cuda}(x?)\b", r"\1\2", requirement)
            for requirement in PROJECT["optional-dependencies"][extra]
            if not requirement.startswith("cuda-bindings")
        }
        for extra, cuda in GPU_EXTRAS.items()
    ]
    assert listed[0] == listed[1]
    assert all(requirement("cuda-bindings", e).contains(f"{n}.9") for e, n in GPU_EXTRAS.items())


@pytest.mark.parametrize("extra", GPU_EXTRAS)
def test_the_extras_for_gpus_can_be_resolved(extra):
    """Nothing is installed: uv finds releases that go with each other."""
    command = [BIN / "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += [f"--extra={extra}", "--python-version=3.11", "--python-platform=linux"]
    process = run_command(*command, "pyproject.toml", cwd=ROOT)
    if "error sending request" in process.stderr or "dns error" in process.stderr:
        pytest.skip("no package index can be reached")
    assert process.returncode == 0, process.stderr
    versions = dict(line.split("==") for line in process.stdout.splitlines())
    cuda = GPU_EXTRAS[extra]
    assert versions["cuda-bindings"].startswith(f"{cuda}.")
    for name in (f"cupy-cuda{cuda}x", f"rmm-cu{cuda}", f"ucxx-cu{cuda}", f"libucx-cu{cuda}"):
        assert name in versions
    (other_cuda,) = {*GPU_EXTRAS.values()} - {cuda}
    assert not [name for name in versions if re.search(rf"-cu(da)?{other_cuda}x?$", name)]


def requirement(name, extra=None):
    lines = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    (match,) = [candidate for candidate in map(Requirement, lines) if candidate.name == name]
    return match.specifier


def test_the_range_of_dask_is_the_same_everywhere():
    releases = SpecifierSet(DASK_RELEASES)
    for name in ("dask", "distributed"):
        assert requirement(name) == releases
        for extra in GPU_EXTRAS:
            (pinned,) = requirement(name, extra)
            assert releases.contains(pinned.version), "what dask-cuda needs is inside"
            assert f"dask-cuda names, {pinned.version}" in (ROOT / "README.md").read_text()
    run = RECIPE["requirements"]["run"]
    for name in ("dask-core", "distributed"):
        assert f"{name} {DASK_RELEASES}" in run


def test_the_conda_recipe_is_one():
    """By the program that builds it."""
    rattler_build = pytest.importorskip("rattler_build", reason="py-rattler-build is not installed")
    (variant,) = rattler_build.Stage0Recipe.from_yaml(TEXT).render(rattler_build.VariantConfig())
    recipe = variant.recipe.to_dict()
    assert recipe["package"] == {"name": "dask-p2p", "version": PROJECT["version"]}
    names = {Requirement(dependency).name for dependency in PROJECT["dependencies"]} - {"dask"}
    run_names = {dependency.split()[0] for dependency in recipe["requirements"]["run"]}
    assert run_names == {*names, "dask-core", "python"}
    with pytest.raises(rattler_build.RecipeParseError, match="unknown field"):
        rattler_build.Stage0Recipe.from_yaml(TEXT.replace("pip_check", "pip_cheque"))


def test_the_version_is_the_same_everywhere():
    version = PROJECT["version"]
    assert RECIPE["context"]["version"] == version
    assert str(CITATION["version"]) == version
    changes = (ROOT / "CHANGELOG.md").read_text()
    newest, when = re.findall(r"^## (\S+)(?:, (.*))?$", changes, flags=re.MULTILINE)[0]
    assert newest == version
    if when != "not released yet":
        date.fromisoformat(when)


def test_one_address_of_the_repository():
    repository = PROJECT["urls"]["Source"]
    assert CITATION["repository-code"] == RECIPE["about"]["repository"] == repository
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text()
        for owner in re.findall(r"github\.com/([\w-]+)/dask-p2p", text):
            assert f"https://github.com/{owner}/dask-p2p" == repository, name


def test_each_python_is_tested_and_named():
    workflow = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    tested = {job["python"] for job in matrix}
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    supported = SpecifierSet(PROJECT["requires-python"])
    assert tested == set(named) == {f"3.{n}" for n in range(30) if supported.contains(f"3.{n}")}
    assert {"oldest", "newest"} <= {job["dask"] for job in matrix}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("oldest", "dask==2025.12"),
        ("2026.7.1", "dask==2026.7.1\ndistributed==2026.7.1\n"),
        ("newest", "dask>=2025.12,<2026"),
    ],
)
def test_constraints(kind, expected):
    output = output_of(ROOT / ".ci" / "constraints.py", kind)
    assert output.startswith(expected)
    if kind != "2026.7.1":
        names = {re.split("[=<>]", line)[0] for line in output.splitlines()}
        assert names == {Requirement(dependency).name for dependency in PROJECT["dependencies"]}
