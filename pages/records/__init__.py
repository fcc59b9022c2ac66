"""What the pages say is read here, from the records under ``results/``.

runs       runs of ``polarstep``, and the figure of each seed
costs      times, memory, and γ and ν of single steps
quality    perplexity of the runs of ``frontier.py``, and the rates that were chosen
maps       the maps of the tables and figures, each with its rows in ``costs`` and ``quality``
curves     the runs of ``frontier.py`` over the time of training
scaling    the gap to full space over tokens and width
long_run   one pass over 73 million tokens
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pages import ROOT


def read_json(record: str | Path) -> Any:
    """What a JSON file holds; ``record`` is its path in the repository."""
    return json.loads((ROOT / record).read_text(encoding="utf-8"))
