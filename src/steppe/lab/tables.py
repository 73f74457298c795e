"""Tables of text cells, written as plain text, Markdown, CSV or HTML."""

from __future__ import annotations

import csv
import html
import io
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len

from steppe.lab.errors import looked_up

Format = Literal["text", "markdown", "csv"]

STYLE = """
.steppe-table { overflow-x: auto; }
.steppe-table table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.steppe-table th, .steppe-table td { padding: 7px 14px 7px 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid #8884; background: none; }
.steppe-table th:first-child { text-align: left; }
.steppe-table thead th { opacity: .7; font-weight: 600; }
.steppe-table p { max-width: 85ch; }
"""
"""The report's table, in colours of whatever notebook it is shown in."""


@dataclass(frozen=True)
class Table:
    """A header, rows of as many cells, a title above and notes below."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    notes: tuple[str, ...] = ()

    def render(self, form: Format = "text", width: int | None = None) -> str:
        """The table in one of its forms; text in lines of at most `width`, if given."""
        forms = {"text": lambda: self.text(width), "markdown": self.markdown, "csv": self.csv}
        return looked_up("table format", form, forms)()

    def text(self, width: int | None = None) -> str:
        """Aligned columns: words to the left, numbers to the right.

        Columns that do not fit into `width` follow below, beside those that name a row again.
        """
        blocks = [self._block(columns) for columns in self._fitting(width)]
        parts = [[self.title] if self.title else [], *blocks, list(self.notes)]
        return "\n\n".join(wrapped("\n".join(lines), width) for lines in parts if lines)

    def _fitting(self, width: int | None) -> list[list[int]]:
        """The columns in groups that fit into the width, each with the one or two that name a row."""
        sizes = self._sizes
        names = [0, 1] if len({row[0] for row in self.rows}) < len(self.rows) else [0]
        groups = [names[:]]
        for column in range(len(names), len(sizes)):
            used = sum(sizes[i] + 2 for i in groups[-1])
            if width is not None and used + sizes[column] > width and len(groups[-1]) > len(names):
                groups.append(names[:])
            groups[-1].append(column)
        return groups

    @property
    def _sizes(self) -> list[int]:
        lines = (self.header, *self.rows)
        return [max(cell_len(line[i]) for line in lines) for i in range(len(self.header))]

    def _block(self, columns: list[int]) -> list[str]:
        sizes = self._sizes
        words = {i: _is_words([row[i] for row in self.rows]) for i in columns}
        out = []
        for number, line in enumerate((self.header, *self.rows)):
            spaces = {i: " " * (sizes[i] - cell_len(line[i])) for i in columns}
            cells = [line[i] + spaces[i] if words[i] else spaces[i] + line[i] for i in columns]
            out.append("  ".join(cells).rstrip())
            if number == 0:
                out.append("  ".join("─" * sizes[i] for i in columns))
        return out

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
        return as_csv([dict(zip(self.header, row, strict=True)) for row in self.rows])

    def html(self) -> str:
        """For notebooks, in the look of the report's tables."""
        from steppe.report.sections import html_table, note

        title = f"<p><b>{html.escape(self.title)}</b></p>" if self.title else ""
        table = html_table(self.header, self.rows) + note(*self.notes)
        return f'<div class="steppe-table"><style>{STYLE}</style>{title}{table}</div>'


def as_csv(records: Sequence[Mapping[str, object]]) -> str:
    """Records as CSV, with a column for every name that appears."""
    names = dict.fromkeys(name for record in records for name in record)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return stream.getvalue().rstrip("\n")


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


def wrapped(text: str, width: int | None) -> str:
    """Text with its long sentences broken at a width, if given; rows of a table stay whole."""
    if width is None:
        return text
    lines = []
    for line in text.splitlines():
        is_sentence = "  " not in line and len(line) > width
        lines += textwrap.wrap(line, width) if is_sentence else [line]
    return "\n".join(lines)


def terminal_width() -> int:
    """Columns of the terminal, 80 where there is none, and not more than are pleasant to read."""
    return min(shutil.get_terminal_size((80, 24)).columns, 120)


def _is_words(cells: list[str]) -> bool:
    """Whether a column holds words (`–` is nothing) rather than numbers."""
    return any(cell[:1].isalpha() for cell in cells)
