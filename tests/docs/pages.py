"""The documents, and the blocks of code in them."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask_p2p

ROOT = Path(dask_p2p.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
DOCS = ROOT / "docs"
REPOSITORY = "https://github.com/dask-p2p/dask-p2p"

# What a page is made of; others are built or fetched.
PAGES = sorted(
    path
    for path in DOCS.rglob("*.md")
    if not path.relative_to(DOCS).parts[0].startswith("_")  # built, not written
)
GALLERY = sorted((DOCS / "gallery").glob("*.py"))
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
README = ROOT / "README.md"
OTHERS = [
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    *sorted((ROOT / "deploy").rglob("*.md")),
]

RUN = ("python", "pycon", "console")
READ = ("sh", "text", "yaml")  # and MyST's directives, in braces
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    page: Path
    line: int  # of its first line of text, from 1
    language: str
    text: str
    not_run: str = ""  # why

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    blocks, inside, before = [], None, ""
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        if inside is None and line.startswith("```"):
            reason = _NOT_RUN.fullmatch(before)
            inside = (number + 1, line.strip("`").strip(), [], reason[1] if reason else "")
        elif inside is not None and line == "```":
            first, language, lines, reason = inside
            blocks.append(Block(page, first, language, "\n".join(lines) + "\n", reason))
            inside = None
        elif inside is not None:
            inside[2].append(line)
        before = line
    assert inside is None, f"{page}: a block is not closed"
    return blocks


def run_program(path: Path) -> Any:
    """Run a program of the gallery in the present cluster; return its result."""
    names = {"__name__": path.stem}
    exec(compile(path.read_text("utf-8"), str(path), "exec"), names)
    return names["main"]()
