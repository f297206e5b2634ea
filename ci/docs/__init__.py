"""Pages made of contracts, modules and results: ``python -m ci.docs [--check] [--site FOLDER]``.

Committed pages have tables between two markers (:mod:`ci.docs.tables`), which ``make docs`` fills.
Pages of operators, modules, losses and verification are written with the site, which mkdocs builds
(:mod:`ci.docs.site`). A module has what pages say of its subject.
"""

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
NOTE = "<!-- generated; edit the docstrings instead -->"
