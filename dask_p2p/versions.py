"""The versions of this package and of Dask that work together.

Clients, scheduler and workers of one cluster run the same version of the package. It is checked
once, when a plugin arrives at the scheduler or at a worker (`dask_p2p.plugins.registration`): a
plugin travels with the version that sends it.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Any

from dask_p2p.errors import RegistrationError
from dask_p2p.loading import load_module

#: Releases of Dask that pass the tests, as in pyproject.toml. Other releases are unsupported,
#: because the plugins replace private parts of Dask (see tests/plugins/test_canary.py).
DASK_RELEASES = ">=2025.12,<2026.9"

#: Releases of the package dask-array that pass the tests, as in pyproject.toml. Private parts of it
#: are used in dask_p2p/graph.py.
DASK_ARRAY_RELEASES = ">=0.7.1,<0.8"


def pickled_plugin(cls: type) -> tuple[Any, ...]:
    """Return the pickled form of a new plugin of a class, for `__reduce__`."""
    return plugin_of_version, (own_version(), cls.__module__, cls.__qualname__)


def plugin_of_version(version: str, module: str, name: str) -> Any:
    """Return the plugin that a process of this version has sent; all versions keep this signature.

    Raises `RegistrationError` for another version.
    """
    check_version(version)
    return getattr(load_module(module), name)()


def check_version(version: str) -> None:
    """Raise `RegistrationError` if the sender's version differs from this one."""
    if version != own_version():
        raise RegistrationError(
            f"expected values of {this_version()}, got values of dask_p2p {version}. Install the "
            f"same version on clients, scheduler and workers."
        )


def this_version() -> str:
    """Return this package's name and version."""
    return f"dask_p2p {own_version()}"


@cache
def own_version() -> str:
    """Return the version of this package."""
    try:
        return metadata.version("dask-p2p")
    except metadata.PackageNotFoundError:  # not installed: it runs from a folder
        return "unknown"


def check_dask() -> None:
    """Raise `RegistrationError` if this process runs an unsupported release of Dask."""
    _check_release("distributed", DASK_RELEASES, "distributed", "dask")


@cache
def check_dask_array() -> None:
    """Raise `RegistrationError` if this process runs an unsupported release of dask-array."""
    _check_release("dask-array", DASK_ARRAY_RELEASES, "dask-array")


def _check_release(package: str, releases: str, *to_install: str) -> None:
    from packaging.specifiers import SpecifierSet

    installed = metadata.version(package)
    if not SpecifierSet(releases).contains(installed, prereleases=True):
        requirements = " ".join(f"'{name}{releases}'" for name in to_install)
        raise RegistrationError(
            f"expected {package} {releases} with dask_p2p {own_version()}, got {package} "
            f"{installed}. On clients, scheduler and workers: pip install {requirements}, or "
            f"another release of dask-p2p."
        )
