"""The report: one page of HTML that needs nothing but itself."""

from __future__ import annotations

import json
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

import steppe
from steppe.lab.naming import shown_name
from steppe.report import minima, sections
from steppe.report.charts import tag, text
from steppe.report.gathered import Gathered
from steppe.report.sections import Absent, Part, Section
from steppe.report.summary import summary

# Nothing may be fetched: what the page needs is in the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
HIDDEN = {"seed", "method", "code", "recipe", "keep", "checkpoint_minutes", "workers", "root"}


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
    script = f"<script>{asset('report.js')}</script>"
    body = head + main + tag("footer", text(made_by)) + script
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
    words = f"{part.title}: nothing is stored for these runs. This makes it: "
    return sections.advice(words, part.command, "absent")


def provenance_section(gathered: Gathered) -> Section:
    """Configs, runs, environments and the settings of the analyses."""
    results = [result for row in gathered.rows for result in row.results]
    first, *others = [result.config.to_dict() for result in results]
    varying = [n for n in first if n not in HIDDEN and any(o[n] != first[n] for o in others)]
    example = gathered.comparison.example
    known = {
        "recipe": first["recipe"] or "none",
        "data": f"{first['data']} {f'({example.data_note})' if example.data_note else ''}",
        "weights of the model": f"{example.parameters:,}",
        "steps": str(example.steps),
    }
    out = {*HIDDEN, *varying, *known}
    shared = {k: v for k, v in first.items() if k not in out and v is not None}
    records = Counter(json.dumps(result.environment, sort_keys=True) for result in results)
    parts = {
        "Settings that all runs share": _pairs(("setting", "value"), {**known, **shared}),
        "Methods and their runs": _methods(gathered, varying),
        "Where they ran": "".join(
            _pairs((f"{count} runs" if count > 1 else "1 run", ""), json.loads(record))
            for record, count in records.most_common()
        ),
        "Analyses": _analyses(gathered) if gathered.analyses else "",
    }
    folded = [tag("details", tag("summary", text(k)), body) for k, body in parts.items() if body]
    return Section("provenance", "Behind the numbers", "".join(folded))


def _pairs(header: tuple[str, str], values: dict[str, Any]) -> str:
    rows = [(name, _plain(value)) for name, value in values.items() if value is not None]
    return sections.html_table(header, rows, kind="settings")


def _methods(gathered: Gathered, varying: list[str]) -> str:
    rows = []
    for row in gathered.rows:
        config = row.results[0].config.to_dict()
        own = ", ".join(f"{name} {_plain(config[name])}" for name in varying)
        seeds = ", ".join(str(result.config.seed) for result in row.results)
        folders = [r.folder.name for r in row.results if r.folder is not None]
        more = f" and {len(folders) - 1} more" if folders[1:] else ""
        kept = f"{folders[0]}{more}" if folders else "not in this store"
        rows.append((row.label, config["method"], row.chosen, own or "–", seeds, kept))
    header = ("method", "as text", "strength chosen", "own settings", "seeds", "runs")
    return sections.html_table(header, rows, kind="wordy")


def _analyses(gathered: Gathered) -> str:
    rows = []
    for name, found in gathered.analyses.items():
        for stored in found.values():
            about, data = stored.about, stored.result.origin
            asked = _plain({k: v for k, v in about["request"].items() if k != "analysis"})
            where = about["environment"]
            commit = where.get("commit") or "installed"
            versions = f"steppe {where.get('steppe')} ({commit}), torch {where.get('torch')}"
            hashes = f"data {data['data_hash']}, weights {data['weights_hash']}"
            rows.append(
                (name, stored.run.name, asked, hashes, versions, f"{about['seconds']:.1f} s")
            )
    header = ("analysis", "run", "asked for", "digests", "with", "time")
    return sections.html_table(header, rows, kind="wordy")


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


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
