"""Sphinx builds these pages with ``sphinx-build -W docs docs/_build``; a test does the same."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "meshtape"
author = "the meshtape authors"
copyright = "2026, the meshtape authors; Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "generated"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
# Headings of generated pages start where their subject does.
suppress_warnings = ["myst.header"]
exclude_patterns = ["_build", "_ext", "pictures"]

# A name in single backticks is a link where it is known, and code where it is not.
default_role = "py:obj"
autodoc_typehints = "none"
autodoc_use_type_comments = False  # there are none, and looking for them parses every source again
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
add_module_names = False
# Each heading's table lists its functions; in the tree of every page they cost a quarter of the build.
toc_object_entries = False
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = "meshtape"
html_static_path = ["_static"]
html_favicon = "_static/icon.svg"
html_css_files = ["docs.css"]
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0f6b78", "color-brand-content": "#0f6b78"},
    "dark_css_variables": {"color-brand-primary": "#62bcc7", "color-brand-content": "#62bcc7"},
}
