"""What the site adds to the pages of docs/: the README as its first page, and files that pages link to.

Pages link to files of the repository as ``../results/…`` or ``../src/…``, so that links work where
the repository is read. For the site, a linked Markdown file becomes a page, a linked source file
becomes a page that shows it, and any other linked file is copied. A link to a folder leads to its
README.md. Links are changed to match.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
# A link or an image of Markdown: the text before its target, the target, and an anchor.
LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]*)?(?=\))")
FENCED = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
# Pages of the site that lie outside docs/.
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
}
SOURCE = {".py": "python", ".cff": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/, and all files that some page links to."""
    pages = [Path(file.abs_src_path) for file in files if file.is_documentation_page()]
    pages += [ROOT / name for name in MOVED]
    seen: set[str] = set()
    while pages:
        page = pages.pop()
        name = page.relative_to(ROOT).as_posix()
        if name in seen:
            continue
        seen.add(name)
        if not name.startswith("docs/"):
            _add(files, config, name)
        if page.suffix == ".md":
            targets = (_target(name, match[2]) for match in LINK.finditer(_prose(page.read_text())))
            pages += [ROOT / target for target in targets if target]
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to files of the repository lead to their places on the site, and examples be read.

    ``<BLANKLINE>`` in the output of an example is for the test that runs the page.
    """
    name = _in_repository(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        target = _target(name, match[2])
        if target is None:
            return match[0]
        start = posixpath.dirname(page.file.src_uri) or "."
        return f"{match[1]}{posixpath.relpath(_on_site(target), start)}{match[3] or ''}"

    parts = FENCED.split(markdown.replace("\n<BLANKLINE>\n", "\n\n"))
    return "".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts)


def _prose(text: str) -> str:
    """Markdown without its blocks of code."""
    return "".join(part for part in FENCED.split(text) if not part.startswith("```"))


def _target(page: str, link: str) -> str | None:
    """The path in the repository that a link of a page leads to; None if there is no such file."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    if (ROOT / path).is_dir():
        path = f"{path}/README.md"
    return path if (ROOT / path).is_file() else None


def _on_site(path: str) -> str:
    """Where a file of the repository is on the site, as a path of a source file of the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if Path(path).suffix in SOURCE:
        return f"source/{path}.md"
    return MOVED.get(path, path)


def _in_repository(src_uri: str) -> str:
    """The path in the repository of a source file of the site; the inverse of :func:`_on_site`."""
    for path, there in MOVED.items():
        if src_uri == there:
            return path
    if src_uri.startswith("source/"):
        return src_uri.removeprefix("source/").removesuffix(".md")
    return src_uri if (ROOT / src_uri).is_file() else f"docs/{src_uri}"


def _add(files: Files, config: MkDocsConfig, path: str) -> None:
    """Add a file of the repository to the site's; sources as pages that show them."""
    uri = _on_site(path)
    if Path(path).suffix in SOURCE:
        language = SOURCE[Path(path).suffix]
        text = f"# {path}\n\n```{language}\n{(ROOT / path).read_text()}\n```\n"
        file = File.generated(config, uri, content=text)
    else:
        file = File.generated(config, uri, abs_src_path=str(ROOT / path))
    file.inclusion = InclusionLevel.NOT_IN_NAV if path not in MOVED else InclusionLevel.INCLUDED
    files.append(file)
