"""``python -m ci.static``."""

from ci.static.table import main

raise SystemExit(main())
