"""Tables of text cells, written as plain text, Markdown, CSV or HTML."""

from __future__ import annotations

import csv
import html
import io
import shutil
import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from steppe.lab.errors import unknown

Format = Literal["text", "markdown", "csv"]


@dataclass(frozen=True)
class Table:
    """A header, rows of as many cells, a title above and notes below."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    notes: tuple[str, ...] = ()

    def render(self, form: Format = "text") -> str:
        """The table in one of its forms."""
        forms = {"text": self.text, "markdown": self.markdown, "csv": self.csv}
        if form not in forms:
            raise unknown("table format", form, forms)
        return forms[form]()

    def text(self) -> str:
        """Aligned columns: words to the left, numbers to the right."""
        lines = [self.header, *self.rows]
        widths = [max(_width(line[i]) for line in lines) for i in range(len(self.header))]
        words = [_is_words([row[i] for row in self.rows]) for i in range(len(self.header))]
        out = [self.title, ""] if self.title else []
        for number, line in enumerate(lines):
            cells = [_pad(cell, widths[i], left=words[i]) for i, cell in enumerate(line)]
            out.append("  ".join(cells).rstrip())
            if number == 0:
                out.append("  ".join("─" * width for width in widths))
        return "\n".join([*out, *([""] if self.notes else []), *self.notes])

    def markdown(self) -> str:
        """A Markdown table with the title in bold, words to the left, numbers to the right.

        >>> print(Table(("method", "strength", "n"), (("SAM", "rho 0.05", "5"),)).markdown())
        | method | strength | n |
        |---|---|---:|
        | SAM | rho 0.05 | 5 |
        """
        escaped = [[cell.replace("|", r"\|") for cell in row] for row in (self.header, *self.rows)]
        lines = ["| " + " | ".join(row) + " |" for row in escaped]
        columns = [[row[i] for row in self.rows] for i in range(1, len(self.header))]
        lines.insert(1, "|---|" + "".join("---|" if _is_words(c) else "---:|" for c in columns))
        head = [f"**{self.title}**", ""] if self.title else []
        notes = [line for note in self.notes for line in ("", note)]
        return "\n".join([*head, *lines, *notes])

    def csv(self) -> str:
        """Header and rows as CSV."""
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerows([self.header, *self.rows])
        return stream.getvalue().rstrip("\n")

    def html(self) -> str:
        """For notebooks."""
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.header)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        title = f"<p><b>{html.escape(self.title)}</b></p>" if self.title else ""
        return f"{title}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"


def signed(value: float, digits: int = 2) -> str:
    """A number with its sign, a true minus included.

    >>> signed(-1.234), signed(0.5), signed(0.001)
    ('−1.23', '+0.50', '0.00')
    """
    text = f"{value:+.{digits}f}"
    if float(text) == 0:
        return text[1:]
    return text.replace("-", "−")


def join_words(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def wrapped(text: str, columns: int | None = None) -> str:
    """Text with its long sentences broken at the terminal's width; rows of a table stay whole."""
    width = min(columns or shutil.get_terminal_size((100, 24)).columns, 120)
    lines = []
    for line in text.splitlines():
        is_sentence = "  " not in line and len(line) > width
        lines += textwrap.wrap(line, width) if is_sentence else [line]
    return "\n".join(lines)


def _width(text: str) -> int:
    """Columns on a terminal."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def _is_words(cells: list[str]) -> bool:
    """Whether a column holds words (`–` is nothing) rather than numbers."""
    return any(cell[:1].isalpha() for cell in cells)


def _pad(text: str, width: int, *, left: bool) -> str:
    space = " " * (width - _width(text))
    return text + space if left else space + text
