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
default_role = "py:obj"  # of names in docstrings
autodoc_typehints = "none"  # the docstrings contain more
autodoc_member_order = "bysource"
numpydoc_show_class_members = False  # autodoc does
# The build fails if a public function or class lacks parameters, the returned
# value, an example or related functions.
numpydoc_validation_checks = {
    "EX01",
    "PR01",
    "PR02",
    "RT01",
    "SA01",
    "YD01",
}
numpydoc_validation_exclude = {
    r"\.[A-Z]\w*\.",  # methods
    r"\.errors(\.|$)",
    r"\.results\.",
    r"\.(CompiledFunction|Handle|MemoryEstimate|ResidentGang)$",  # results, too
}

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


# Methods and properties of public classes that only this package reads.
METHODS = {
    "arrays",
    "blocks",
    "cancel_receive",
    "check",
    "check_returned",
    "checksums",
    "chunks",
    "close_stores",
    "fill",
    "fill_ends",
    "fill_unread",
    "flush_stores",
    "halo_exchange",
    "indices",
    "leaves",
    "load",
    "of_state",
    "part",
    "restore_state",
    "size_bytes",
    "span_s",
    "step_for",
    "watched",
    "with_indices",
}
PROPERTIES = {
    "host_need",
    "need",
    "reduces_by_messages",
}


def link_deploy(_: Any, __: str, source: list[str]) -> None:
    """Make links to the folder ``deploy`` lead to its pages in the site."""
    source[0] = deploy_pages.linked(source[0])


def skip_internal(
    _: Any, __: str, name: str, member: Any, ___: bool, ____: Any
) -> bool | None:
    """Leave out the members that only this package reads."""
    is_internal = name in (METHODS if callable(member) else PROPERTIES)
    return True if is_internal else None


def hide_signature(
    _: Any,
    what: str,
    __: str,
    thing: Any,
    ___: Any,
    args: Any,
    returns: Any,
) -> tuple[str, Any] | None:
    """Hide how classes are called that users only receive."""
    is_class = args and what in ("class", "exception")
    is_result = is_class and "Parameters\n" not in (thing.__doc__ or "")
    return ("", returns) if is_result else None


def setup(app: Any) -> None:
    """Connect the functions of this file."""
    app.connect("source-read", link_deploy)
    app.connect("autodoc-skip-member", skip_internal)
    app.connect("autodoc-process-signature", hide_signature)
