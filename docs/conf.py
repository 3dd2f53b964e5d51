"""Settings of the documentation: Sphinx with Markdown pages (MyST) and the furo theme."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

project = "tflms"
author = "The tflms authors"
copyright = f"2026, {author}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
suppress_warnings = ["toc.empty_glob"]

# Signatures are long; their types are shown once, in the text.
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Documentation can be built where none of these is installed.
autodoc_mock_imports = ["tensorflow", "keras", "nilearn", "nibabel"]

html_theme = "furo"
html_title = "tflms"
