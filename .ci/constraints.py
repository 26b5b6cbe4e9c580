"""Print constraints for pip: python .ci/constraints.py oldest, newest, or a release of Dask."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))


def oldest() -> dict[str, str]:
    """Return the oldest release of each package that is always needed."""
    found = (
        re.match(r"([\w-]+).*?>=([\d.]+)", requirement)
        for requirement in PROJECT["project"]["dependencies"]
    )
    return {match[1]: match[2] for match in found if match}


if __name__ == "__main__":
    (which,) = sys.argv[1:]
    if which == "oldest":
        pins = oldest()
    elif which == "newest":  # what pip takes by itself
        pins = {}
    else:
        pins = {"dask": which, "distributed": which}
    for name, release in pins.items():
        print(f"{name}=={release}")  # noqa: T201  # that is what it is for
