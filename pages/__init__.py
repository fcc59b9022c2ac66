"""What the pages say of measurements is made from the records here; README.md says how."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The repository."""
