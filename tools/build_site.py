"""Build the pages of mkdocs.yml.

`python -m tools.build_site` writes docs/reference/commands.md from what `--help` says, builds the
pages in `site`, and follows their links; a warning or a link that leads nowhere is an error. It
needs `pip install '.[docs]'`.
"""

import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import typer
from typer.cli import get_docs_for_click

from raymoe.cli import COMMANDS, load_command

ROOT = Path(__file__).parent.parent
COMMAND_PAGE = ROOT / "docs" / "reference" / "commands.md"
BEGIN = """# Commands

Every command also has `--debug`, which prints the traceback of an error. `raymoe --version` prints
the version; `raymoe --install-completion` completes commands and options in this shell. Exit codes:
0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""


def describe(name: str) -> str:
    """What `raymoe NAME --help` says, as Markdown."""
    command = load_command(name)
    context = typer.Context(command, info_name=f"raymoe {name}")
    text = get_docs_for_click(obj=command, ctx=context, name=f"raymoe {name}")
    return "#" + text.replace("```console\n$ ", "```sh\n")


class Page(HTMLParser):
    """What a page links and which anchors it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in {"href", "src"} and tag != "base":
                self.links.add(value)
            elif value and name == "id":
                self.anchors.add(value)


def broken_links(site: Path) -> Iterator[str]:
    """Links between pages and files that lead nowhere, with the page that has them."""
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            has_anchor = target not in pages or not parts.fragment
            if not target.is_file() or not (has_anchor or parts.fragment in pages[target].anchors):
                yield f"{path.relative_to(site)}: {link}"


def main() -> None:
    COMMAND_PAGE.write_text("\n".join([BEGIN, *map(describe, COMMANDS)]))
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    subprocess.run(command, cwd=ROOT, check=True)
    broken = sorted(broken_links(ROOT / "site"))
    if broken:
        raise SystemExit("links that lead nowhere:\n" + "\n".join(broken))


if __name__ == "__main__":
    main()
