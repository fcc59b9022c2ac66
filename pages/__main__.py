"""``python -m pages``."""

from __future__ import annotations

import sys

from pages.write import main

sys.exit(main())
