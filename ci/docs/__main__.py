"""The command: ``python -m ci.docs``."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path

from ci.docs import ROOT, site
from ci.docs.tables import stale


def main() -> int:
    """Write the pages, or with ``--check`` say which are stale."""
    parser = argparse.ArgumentParser(prog="python -m ci.docs", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if one is stale")
    parser.add_argument("--site", type=Path, metavar="FOLDER", help="where the site's pages go")
    options = parser.parse_args()
    pages = stale()
    for path, (old, new) in pages.items():
        name = path.relative_to(ROOT)
        if options.check:
            before, after = old.splitlines(True), new.splitlines(True)
            print("".join(difflib.unified_diff(before, after, str(name), "generated", n=0)))
            print(f"{name} is stale: run `make docs`")
        else:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {name}")
    if options.site:
        site.build(options.site)
    return int(options.check and bool(pages))


if __name__ == "__main__":
    raise SystemExit(main())
