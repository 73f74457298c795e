"""The section of the page that says where every number comes from."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from steppe.report.gathered import Gathered
from steppe.report.sections import Section, html_table
from steppe.report.svg import tag, text

HIDDEN = {"seed", "method", "code", "recipe", "keep", "checkpoint_minutes", "workers", "root"}


def provenance_section(gathered: Gathered) -> Section:
    """Configs, runs, environments and the settings of the analyses."""
    parts = [
        _folded("Settings that all runs share", _settings(gathered)),
        _folded("Methods and their runs", _methods(gathered)),
        _folded("Where they ran", _environments(gathered)),
    ]
    if gathered.analyses:
        parts.append(_folded("Analyses", _analyses(gathered)))
    return Section("provenance", "Behind the numbers", "".join(parts))


def _varying(gathered: Gathered) -> tuple[dict[str, Any], list[str]]:
    """The first run's settings, and the names of those that differ among runs."""
    first, *others = [r.config.to_dict() for row in gathered.rows for r in row.results]
    shown = [name for name in first if name not in HIDDEN]
    return first, [name for name in shown if any(o[name] != first[name] for o in others)]


def _settings(gathered: Gathered) -> str:
    config, varying = _varying(gathered)
    example = gathered.comparison.example
    known = {
        "recipe": config["recipe"] or "none",
        "data": f"{config['data']} {f'({example.data_note})' if example.data_note else ''}",
        "weights of the model": f"{example.parameters:,}",
        "steps": str(example.steps),
    }
    out = {*HIDDEN, *varying, *known}
    shared = {k: _plain(v) for k, v in config.items() if k not in out and v is not None}
    return html_table(("setting", "value"), list({**known, **shared}.items()), kind="settings")


def _methods(gathered: Gathered) -> str:
    _, varying = _varying(gathered)
    rows = []
    for row in gathered.rows:
        config = row.results[0].config.to_dict()
        own = ", ".join(f"{name} {_plain(config[name])}" for name in varying)
        seeds = ", ".join(str(result.config.seed) for result in row.results)
        folders = [r.folder.name for r in row.results if r.folder is not None]
        kept = f"{folders[0]}{f' and {len(folders) - 1} more' if folders[1:] else ''}"
        rows.append(
            (row.label, row.results[0].config.method, row.chosen, own or "–", seeds,
             kept if folders else "not in this store")
        )  # fmt: skip
    header = ("method", "as text", "strength chosen", "own settings", "seeds", "runs")
    return html_table(header, rows, kind="wordy")


def _environments(gathered: Gathered) -> str:
    results = [result for row in gathered.rows for result in row.results]
    records = Counter(json.dumps(result.environment, sort_keys=True) for result in results)
    tables = []
    for record, count in records.most_common():
        rows = [(k, _plain(v)) for k, v in json.loads(record).items() if v is not None]
        header = (f"{count} runs" if count > 1 else "1 run", "")
        tables.append(html_table(header, rows, kind="settings"))
    return "".join(tables)


def _analyses(gathered: Gathered) -> str:
    rows = []
    for name, found in gathered.analyses.items():
        for stored in found.values():
            asked = _plain({k: v for k, v in stored.request.items() if k != "analysis"})
            where = stored.environment
            versions = f"steppe {where.get('steppe')} ({where.get('commit') or 'installed'}), torch {where.get('torch')}"
            data = stored.result.origin
            hashes = f"data {data['data_hash']}, weights {data['weights_hash']}"
            rows.append((name, stored.run.name, asked, hashes, versions, f"{stored.seconds:.1f} s"))
    header = ("analysis", "run", "asked for", "digests", "with", "time")
    return html_table(header, rows, kind="wordy")


def _folded(title: str, body: str) -> str:
    return tag("details", tag("summary", text(title)), body)


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
