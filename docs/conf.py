"""The site of docs/: `make docs`. Everything in it is local; formulas are MathML."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS / "_extensions"))

import figures  # noqa: E402

import vitkit  # noqa: E402

figures.configure_kernels(ROOT / "build" / "ipython")


def digest_of_what_chapters_use() -> str:
    """Results of cells are kept until the library, the drawing or the measurements change."""
    used = [
        *(ROOT / "src/vitkit").rglob("*.py"),
        *(ROOT / "src/vitkit").rglob("*.toml"),
        *(DOCS / "tutorial").glob("*.py"),
        *(DOCS / "tutorial/results").glob("*.json"),
        DOCS / "_extensions/figures.py",
    ]
    whole = hashlib.sha256()
    for path in sorted(path for path in used if not path.name[0].isdigit()):
        whole.update(path.read_bytes())
    return whole.hexdigest()[:12]


project = "vitkit"
author = "the vitkit authors"
version = release = vitkit.__version__
extensions = [
    "myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "mathml",
    "accessible", "chapters", "docstrings", "drawings", "figures", "interactive", "notebooks",
]  # fmt: skip
exclude_patterns = ["_extensions", "conf.py", "tutorial/[!0-9]*.py", "tutorial/results"]

myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3
nb_custom_formats = {".py": "chapters.read"}
nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build/cells" / digest_of_what_chapters_use())
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_output_stderr = "warn"
nb_ipywidgets_js: dict[str, dict[str, str]] = {}

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_display_short_literal_types = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False

html_title = f"vitkit {version}"
html_theme = "furo"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("tables.js", {"defer": "defer"}), ("scrolling.js", {"defer": "defer"})]
copybutton_exclude = ".linenos, .gp, .go"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
