"""The page of a report: HTML that loads nothing and runs nothing, made of a few kinds of parts.

Everything that is not a picture goes through `text`, which escapes it: names of models and messages
of rows are not ours.
"""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from raymoe.safe_text import harmless

MARK = "<!-- a report of raymoe -->"

STYLE = """\
:root { --ink: #1b1f24; --soft: #57606a; --paper: #f6f7f9; --card: #fff; --line: #d8dde3 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ea; --soft: #9aa4af; --paper: #0f1216; --card: #16191d; --line: #343b43 }
}
:root { color-scheme: light dark }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 76rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 ui-sans-serif, system-ui, sans-serif }
h1 { margin: 0 0 .25rem; font-size: 1.5rem; overflow-wrap: anywhere }
h2 { margin: 0 0 .75rem; font-size: 1.1rem }
p { margin: .25rem 0 .75rem; color: var(--soft); overflow-wrap: anywhere }
section { margin-top: 1rem; padding: 1rem; background: var(--card); border: 1px solid var(--line);
  border-radius: .5rem }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 1rem;
  margin: 0 }
dt { color: var(--soft); font-size: .85rem }
dd { margin: 0; font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top }
th { color: var(--soft); font-weight: 600; font-size: .85rem; white-space: nowrap }
td { overflow-wrap: anywhere; min-width: 4.5rem } td:first-child { min-width: 9rem }
td.number, th.number { text-align: right; white-space: nowrap }
pre, li { font: 13px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
pre { margin: 0 } ol { margin: 0; padding-left: 2.5rem }
svg { display: block; width: 100%; min-width: 44rem; height: auto; border-radius: .25rem }
h3 { margin: 1rem 0 .25rem; font-size: .95rem }
"""


def text(value: object) -> str:
    """Text as HTML; what could reorder or hide it becomes visible."""
    return escape(harmless(str(value), keep="\n"))


def page(title: str, subtitle: str, sections: Iterable[str]) -> str:
    """The whole page.

    Args:
        title: Of the window, too.
        subtitle: Below it.
        sections: HTML of `section`.
    """
    return "\n".join(
        [
            "<!DOCTYPE html>",
            MARK,
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{text(title)}</title>",
            f"<style>{STYLE}</style>",
            "</head>",
            "<body>",
            f"<h1>{text(title)}</h1>",
            f"<p>{text(subtitle)}</p>",
            *sections,
            "</body>",
            "</html>\n",
        ]
    )


def section(title: str, *parts: str) -> str:
    """A part of the page with its heading.

    Args:
        title: The heading.
        parts: HTML of the functions below.
    """
    return f"<section>\n<h2>{text(title)}</h2>\n{chr(10).join(parts)}\n</section>"


def heading(value: str) -> str:
    """A smaller heading."""
    return f"<h3>{text(value)}</h3>"


def paragraph(value: str) -> str:
    """A paragraph."""
    return f"<p>{text(value)}</p>"


def preformatted(value: str) -> str:
    """Text with its own line breaks."""
    return f"<pre>{text(value)}</pre>"


def numbers(entries: Iterable[tuple[str, str]]) -> str:
    """Names with large values."""
    cells = (f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in entries)
    return f"<dl>{''.join(cells)}</dl>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, num_names: int = 1) -> str:
    """A table; after the first columns, values stand at the right.

    Args:
        header: Names of the columns.
        rows: Cells.
        num_names: Columns of text.
    """
    styles = ["" if i < num_names else ' class="number"' for i in range(len(header))]

    def line(kind: str, cells: Sequence[str]) -> str:
        parts = (
            f"<{kind}{style}>{text(cell)}</{kind}>"
            for style, cell in zip(styles, cells, strict=True)
        )
        return f"<tr>{''.join(parts)}</tr>"

    body = "".join(line("td", cells) for cells in rows)
    head = f"<thead>{line('th', header)}</thead>" if any(header) else ""
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def numbered(values: Iterable[str]) -> str:
    """A list."""
    return f"<ol>{''.join(f'<li>{text(value)}</li>' for value in values)}</ol>"


def picture(svg: str) -> str:
    """A picture; on a narrow page it moves sideways."""
    return f'<div class="wide">{svg}</div>'


def is_report(path: Path) -> bool:
    """Whether a file is a report that may be replaced by another."""
    try:
        with path.open("rb") as file:
            return MARK.encode() in file.read(200)
    except OSError:
        return False
