"""``python -m ci.bench``."""

import sys

from ci.bench import main

sys.exit(main())
