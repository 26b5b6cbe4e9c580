"""Print constraints for pip: python .ci/constraints.py oldest, newest, or a release of Dask."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

FILE = Path(__file__).parents[1] / "pyproject.toml"
PROJECT = tomllib.loads(FILE.read_text("utf-8"))["project"]


def bounds() -> dict[str, str]:
    """Return the releases that may be, of each package that is always needed."""
    found = (re.match(r"([\w-]+)(?:\[.*\])?(.*)", each) for each in PROJECT["dependencies"])
    return {match[1]: match[2] for match in found if match}


if __name__ == "__main__":
    (which,) = sys.argv[1:]
    if which == "oldest":
        pins = {name: each.split(",")[0].replace(">=", "==") for name, each in bounds().items()}
    elif which == "newest":  # what pip takes by itself
        pins = bounds()
    else:
        pins = dict.fromkeys(("dask", "distributed"), f"=={which}")
    for name, releases in pins.items():
        print(name + releases)  # noqa: T201  # that is what it is for
