"""The tables of supported versions, from ``pyproject.toml`` and the workflow of the tests."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

__all__ = ["EXTRAS", "OTHERS", "setups", "tables", "tested"]

ROOT = Path(__file__).parents[1]
GPUS = {
    "cuda13": "13",
    "cuda12": "12",
}  # major release of CUDA by extra
EXTRAS = {
    "cuda13": "GPUs with a driver of CUDA 13",
    "cuda12": "GPUs with a driver of CUDA 12 (untested)",
    "ucx": "UCX between CPU workers",
    "dashboard": "the dashboard, with the page `/p2p`",
    "metrics": "figures for Prometheus",
    "xarray": "the accessor `p2p` of xarray",
    "dask-array": "arrays as expressions, of the package `dask-array`",
    "zarr": "Zarr arrays on the command line, and `p2p.to_zarr`",
}
OTHERS = ("bench", "docs", "test")  # for contributors


def project() -> dict[str, Any]:
    """Return the section ``[project]`` of ``pyproject.toml``."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    table: dict[str, Any] = tomllib.loads(text)["project"]
    return table


def setups() -> dict[str, dict[str, str]]:
    """Return the releases of each package, by setup: on CPUs, and by extra for GPUs."""
    project_table = project()
    base = {
        "dask-p2p": project_table["version"],
        "Python": _pythons(project_table),
    }
    base |= _releases(project_table["dependencies"])
    extras = project_table["optional-dependencies"]
    return {"CPUs": base} | {
        f"`{extra}`": {**base, "CUDA": cuda, **_releases(extras[extra])}
        for extra, cuda in GPUS.items()
    }


def tested() -> list[tuple[str, str]]:
    """Return the pairs of Python and Dask that the workflow runs the tests with."""
    path = ROOT / ".github" / "workflows" / "ci.yml"
    strategy = yaml.safe_load(path.read_text("utf-8"))["jobs"]["test"][
        "strategy"
    ]
    return [
        (job["python"], job["dask"])
        for job in strategy["matrix"]["include"]
    ]


def tables() -> str:
    """Return the tables as Markdown: setups, extras, tested pairs."""
    columns = setups()
    names = dict.fromkeys(
        name for column in columns.values() for name in column
    )
    by_setup = [
        (
            name,
            *(column.get(name, "none") for column in columns.values()),
        )
        for name in names
    ]
    extras = project()["optional-dependencies"]
    by_extra = [
        (f"`{extra}`", purpose, _listed(extras[extra]))
        for extra, purpose in EXTRAS.items()
    ]
    return "\n".join(
        [
            *_table(("package", *columns), by_setup),
            "",
            *_table(("extra", "for", "packages"), by_extra),
            "",
            *_table(("tested with Python", "Dask"), tested()),
            "",
        ]
    )


def _pythons(project_table: dict[str, Any]) -> str:
    found = re.findall(
        r"Python :: 3\.(\d+)", "\n".join(project_table["classifiers"])
    )
    minors = sorted(map(int, found))
    return f"3.{minors[0]} to 3.{minors[-1]}"


def _releases(requirements: list[str]) -> dict[str, str]:
    """Return the releases by package; those for one CUDA release share a name."""
    parsed = map(Requirement, requirements)
    return {
        _shared(requirement.name): _plain(requirement.specifier)
        for requirement in parsed
    }


def _shared(name: str) -> str:
    return re.sub(r"-cu(da)?\d+x?$", "", name)


def _plain(releases: SpecifierSet) -> str:
    """Return a range in words.

    >>> _plain(SpecifierSet(">=3.1,<3.9")), _plain(SpecifierSet("==26.10.*"))
    ('3.1 to below 3.9', '26.10')
    """
    least, below, exact = "", "", ""
    for release in releases:
        if release.operator == ">=":
            least = release.version
        elif release.operator == "<":
            below = release.version
        elif release.operator == "==":
            exact = release.version.removesuffix(".*")
        else:
            raise ValueError(
                f"expected a range with >=, < or ==, got {releases}."
            )
    return (
        exact or f"{least} to below {below}"
        if exact or below
        else f"from {least}"
    )


def _listed(requirements: list[str]) -> str:
    parsed = map(Requirement, requirements)
    return ", ".join(
        f"{requirement.name} {_plain(requirement.specifier)}"
        for requirement in parsed
    )


def _table(
    head: tuple[str, ...], rows: list[tuple[str, ...]]
) -> list[str]:
    lines = [head, ("---",) * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
