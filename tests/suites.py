"""Suites of other packages, with this package's functions; tests that cannot pass then."""

from __future__ import annotations

import os

import pytest

from tests.support import output_of


def output_of_suite(plugin, folder, *arguments, **variables):
    """Return the output of pytest with a plugin, without options of this project or checkout."""
    options = ["-m", "pytest", "-q", "-p", plugin, "-c", os.devnull, "--rootdir", folder]
    options += ["-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    return output_of(*options, cwd=folder, **variables)


def expect_failures(items, reasons, optional=()):
    """Mark the tests of a module that fail, by name: with parameters, or for all of them.

    Tests may also pass for the reasons in `optional`.
    """
    missing = reasons.keys() - {name for item in items for name in (item.name, item.originalname)}
    if missing:
        raise pytest.UsageError(f"there are no tests {missing} any more")
    for item in items:
        reason = reasons.get(item.name) or reasons.get(item.originalname)
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=reason not in optional))


def module_of(item):
    """Return the last name of a test's module."""
    return item.module.__name__.rpartition(".")[2]
