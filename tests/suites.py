"""Suites of other packages, with this package's functions; tests that cannot pass then."""

import os

import pytest

from tests.support import output_of


def output_of_suite(plugin, folder, *arguments, **variables):
    """Return the output of pytest with a plugin, without options of this project or checkout."""
    options = ["-m", "pytest", "-q", "-p", plugin, "-c", os.devnull, "--rootdir", folder]
    options += ["-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    return output_of(*options, cwd=folder, **variables)


def expect_failures(items, reasons, optional=()):
    """Mark the tests that fail, by module and name: with parameters, or for all of them.

    Tests may also pass for the reasons in `optional`.
    """
    missing = {
        (module, name) for module in map(module_of, items) for name in reasons.get(module, ())
    }
    for item in items:
        of_module = reasons.get(module_of(item), {})
        missing -= {(module_of(item), name) for name in (item.name, item.originalname)}
        reason = of_module.get(item.name) or of_module.get(item.originalname)
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=reason not in optional))
    if missing:
        raise pytest.UsageError(f"there are no tests {missing} any more")


def module_of(item):
    return item.module.__name__.rpartition(".")[2]
