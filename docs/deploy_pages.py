"""The pages of the folder ``deploy``, as pages of the site."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["linked", "pages"]

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/dask-p2p/dask-p2p"
FOLDER = "/_generated/deploy"  # absolute paths start at the folder of the pages


def pages() -> dict[str, str]:
    """Return the text of each page by its name in the site: "index", "slurm"."""
    paths = sorted((ROOT / "deploy").rglob("README.md"))
    texts = {_name(page): _moved(page) for page in paths}
    other_names = "\n".join(name for name in texts if name != "index")
    texts["index"] += (
        f"\n```{{toctree}}\n:hidden:\n\n{other_names}\n```\n"
    )
    return texts


def linked(text: str) -> str:
    """Return a page whose links to folders of ``deploy`` lead to pages of the site.

    >>> linked(f"[files]({REPOSITORY}/tree/main/deploy/slurm)")
    '[files](/_generated/deploy/slurm.md)'
    """

    def page(link: re.Match[str]) -> str:
        folder = ROOT / "deploy" / (link[1] or "")
        readme = folder / "README.md"
        return (
            f"]({FOLDER}/{_name(readme)}.md)"
            if readme.exists()
            else link[0]
        )

    return re.sub(
        rf"\]\({REPOSITORY}/tree/main/deploy/?(\w+)?\)", page, text
    )


def _name(readme: Path) -> str:
    folder = readme.parent.name
    return "index" if folder == "deploy" else folder


def _moved(readme: Path) -> str:
    """Return a page with links that hold in another folder."""

    def link(match: re.Match[str]) -> str:
        if match[1].startswith(("http", "#")):
            return match[0]
        path = (readme.parent / match[1]).resolve()
        if path.name == "README.md" and ROOT / "deploy" in path.parents:
            return f"]({FOLDER}/{_name(path)}.md{match[2] or ''})"
        kind = "tree" if path.is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{path.relative_to(ROOT)}{match[2] or ''})"

    text = readme.read_text("utf-8")
    return re.sub(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", link, text)
