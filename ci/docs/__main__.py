"""``python -m ci.docs``."""

from ci.docs import main

raise SystemExit(main())
