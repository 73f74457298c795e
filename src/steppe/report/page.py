"""The report: one page of HTML that needs nothing but itself."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import steppe
from steppe.lab.naming import shown_name
from steppe.report import minima, sections
from steppe.report.gathered import Gathered
from steppe.report.provenance import provenance_section
from steppe.report.sections import Absent, Part, Section
from steppe.report.summary import summary
from steppe.report.svg import tag, text

# Nothing may be fetched: what the page needs is in the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
PARTS: tuple[Part, ...] = (
    sections.result_section,
    sections.accuracy_section,
    sections.convergence_section,
    sections.cost_section,
    minima.robustness_section,
    minima.landscape_section,
    minima.spectrum_section,
    minima.radius_section,
    minima.sharpness_section,
    provenance_section,
)


def page(gathered: Gathered) -> str:
    """The page as text."""
    gathered, key = gathered.shortened()
    made = [part(gathered) for part in PARTS]
    title = _title(gathered)
    links = [
        tag("li", tag("a", text(part.title), href=f"#{part.key}"))
        for part in made
        if isinstance(part, Section)
    ]
    head = tag(
        "header",
        tag("p", text("steppe report"), class_="kicker"),
        tag("h1", text(title)),
        summary(gathered),
        *(tag("p", tag("b", text(k)), text(f": {v}"), class_="note") for k, v in key.items()),
        tag("nav", tag("ul", *links), aria_label="Sections"),
    )
    main = tag("main", *map(_placed, made))
    made_by = f"Made by steppe {steppe.__version__}. This page is one file and loads nothing."
    data = _data(minima.surface_data(gathered))
    script = f"<script>{asset('report.js')}</script>"
    body = head + main + tag("footer", text(made_by)) + data + script
    return (
        '<!DOCTYPE html>\n<html lang="en" class="no-script">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)} · steppe</title>\n<style>{asset('report.css')}</style>\n</head>\n"
        f"<body>{body}</body>\n</html>\n"
    )


def write_page(gathered: Gathered, file: Path) -> Path:
    """Write the page, in one move."""
    content = page(gathered)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.part")
    partial.write_text(content, encoding="utf-8")
    partial.replace(file)
    return file


def absent(gathered: Gathered) -> list[Absent]:
    """The sections without data."""
    return [made for part in PARTS if isinstance(made := part(gathered), Absent)]


def asset(name: str) -> str:
    """A file that ships with the package."""
    return (resources.files("steppe.report") / "assets" / name).read_text(encoding="utf-8")


def _title(gathered: Gathered) -> str:
    comparison = gathered.comparison
    config = comparison.example.config
    labels = [row.label for row in comparison.rows]
    methods = labels[0] if len(labels) == 1 else f"{len(labels)} methods"
    seeds = f"{len(comparison.seeds)} seed{'s' if len(comparison.seeds) > 1 else ''}"
    return f"{shown_name(config.data)}, {shown_name(config.model)}: {methods}, {seeds}"


def _placed(part: Section | Absent) -> str:
    if isinstance(part, Section):
        heading = tag("h2", text(part.title), id=f"{part.key}-title")
        return tag("section", heading, part.body, id=part.key, aria_labelledby=f"{part.key}-title")
    words = text(f"{part.title}: nothing is stored for these runs. This makes it: ")
    return tag("p", words, tag("code", text(part.command)), class_="absent")


def _data(content: dict[str, Any]) -> str:
    """JSON inside the page; no `<` in it can end the script."""
    dumped = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="data">{dumped}</script>'
