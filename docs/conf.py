"""Configuration of Sphinx: ``sphinx-build -W --keep-going -b html docs docs/_build/html``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# This checkout, then the scripts of docs.
sys.path[:0] = [str(HERE.parent), str(HERE)]

import deploy_pages  # noqa: E402
import options_table  # noqa: E402
import versions_table  # noqa: E402

import dask_p2p  # noqa: E402

project = "dask-p2p"
project_copyright = "the dask-p2p developers"
release = version = dask_p2p.__version__

extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "_generated/*.md"]
# autosummary writes its pages with the first suffix.
source_suffix = {
    ".rst": "restructuredtext",
    ".md": "myst-nb",
    ".ipynb": "myst-nb",
}
templates_path = ["_templates"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# The repository has the notebook without outputs. Each build runs it; its errors fail the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120

toc_object_entries = False  # a page has one object
autodoc_typehints = "none"  # the docstrings contain more
autodoc_member_order = "bysource"
numpydoc_show_class_members = False  # autodoc does

copybutton_exclude = ".gp, .go"  # prompts and printed results

html_theme = "pydata_sphinx_theme"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = "dask-p2p"
html_theme_options = {
    "github_url": "https://github.com/dask-p2p/dask-p2p",
    "header_links_before_dropdown": 5,
    "navigation_with_keys": False,
    "show_toc_level": 2,
}
# Pages without pages below them have no sidebar.
html_sidebars = {
    page: []
    for page in (
        "benchmarks",
        "coming-from",
        "gallery/index",
        "security",
        "when",
    )
}

generated = HERE / "_generated"
(generated / "deploy").mkdir(parents=True, exist_ok=True)
(generated / "options.md").write_text(options_table.table(), "utf-8")
(generated / "versions.md").write_text(versions_table.tables(), "utf-8")
for _name, _text in deploy_pages.pages().items():
    (generated / "deploy" / f"{_name}.md").write_text(_text, "utf-8")


def setup(app: Any) -> None:
    """Make links to the folder ``deploy`` lead to its pages in the site."""

    def read(_: Any, __: str, source: list[str]) -> None:
        source[0] = deploy_pages.linked(source[0])

    app.connect("source-read", read)
