"""Make the README's links absolute: a package index shows it without the repository around it.

    python docs/_site/absolute_links.py https://github.com/OWNER/NAME v1.2.3

rewrites README.md in place. The release workflow runs it before it builds; in the repository links stay
relative, so that they lead to the pages of the same commit.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"
# An image or a link of Markdown: an exclamation mark for an image, the text, and a relative target.
LINK = re.compile(r"(!?)(\[[^]]*\])\((?!https?:|mailto:|#)([^)\s]+)\)")


def absolute(text: str, repository: str, tag: str) -> str:
    """``text`` with links to the files of ``repository`` at ``tag``, and images to their bytes."""

    def moved(match: re.Match[str]) -> str:
        image, words, target = match.groups()
        return f"{image}{words}({repository}/{'raw' if image else 'blob'}/{tag}/{target})"

    return LINK.sub(moved, text)


if __name__ == "__main__":
    README.write_text(absolute(README.read_text("utf-8"), *sys.argv[1:3]), encoding="utf-8")
