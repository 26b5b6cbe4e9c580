"""Configuration of Sphinx: ``sphinx-build -W --keep-going -b html docs docs/_build/html``."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # the package of this checkout, and what is beside

import options_table  # noqa: E402

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
    "sphinx_design",
]
exclude_patterns = ["_build", "_generated/*.md"]
# The first is that of the pages that autosummary makes.
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb", ".ipynb": "myst-nb"}
templates_path = ["_templates"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

# The notebook is kept without outputs. It runs at each build, and an error in it fails the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120

autodoc_typehints = "none"  # the docstrings say more
autodoc_member_order = "bysource"
numpydoc_show_class_members = False  # autodoc does

html_theme = "pydata_sphinx_theme"
html_title = "dask-p2p"
html_theme_options = {
    "github_url": "https://github.com/dask-p2p/dask-p2p",
    "navigation_with_keys": False,
    "show_toc_level": 2,
}
# No column of pages beside those that have none below them.
html_sidebars = {page: [] for page in ("benchmarks", "coming-from", "security", "when")}

generated = HERE / "_generated"
generated.mkdir(exist_ok=True)
(generated / "options.md").write_text(options_table.table(), "utf-8")
