"""From what a person named (runs, patterns, files of comparisons and sweeps) to stored results."""

from __future__ import annotations

import fnmatch
import json
import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from steppe.lab.comparison import Comparison, Row, judged
from steppe.lab.config import MACHINE, OUTSIDE, Config, as_config
from steppe.lab.errors import LabError
from steppe.lab.results import Result, by_experiment, from_record, stored
from steppe.lab.runs import Run, Store
from steppe.lab.specs import Spec, label, parse

logger = logging.getLogger("steppe")

SHARED = OUTSIDE | MACHINE | {"method", "seed", "code"}
"""Settings that do not make a row of its own."""


def find_results(names: Sequence[str], store: Path) -> list[Result]:
    """The results behind names of runs, patterns (`digits-*`) and files that --out wrote."""
    found: dict[str, Result] = {}
    for name in names:
        for result in _results(name, store):
            found.setdefault(result.config.identity, result)
    return list(found.values())


def find_comparison(names: Sequence[str], store: Path) -> Comparison:
    """A comparison from the file it was written to, or put together from runs."""
    if not names:
        raise LabError(
            "say what to show: a comparison (steppe compare … --out FILE.json), or names of runs; "
            "`steppe runs` lists them."
        )
    if len(names) == 1 and _is_file(names[0]):
        content = _read(Path(names[0]))
        if "rows" in content:
            return _comparison(content, Path(names[0]), store)
    return compared(find_results(names, store))


def compared(results: Sequence[Result]) -> Comparison:
    """The comparison that these runs make: a row for each experiment, paired by the common seeds."""
    _check_comparable(results)
    rows = list(by_experiment(results).values())
    methods = [next(iter(row.values())).config.method for row in rows]
    rows.insert(0, rows.pop(methods.index("sgd") if "sgd" in methods else 0))
    seeds = sorted(set.intersection(*(set(row) for row in rows)))
    if not seeds:
        raise LabError(
            "these runs share no seed, so nothing can be paired: name runs of the same seeds."
        )
    left_out = sum(len(row) - len(seeds) for row in rows)
    if left_out:
        logger.info("left out: %d runs of seeds that not all methods have", left_out)
    base = rows[0][seeds[0]].config
    made = [_row([row[seed] for seed in seeds], base) for row in rows]
    return Comparison(base, tuple(seeds), judged(made))


def _row(results: list[Result], base: Config) -> Row:
    config = results[0].config
    spec = parse(config.method)
    names = [f.name for f in fields(Config) if f.name not in SHARED]
    changed = {n: getattr(config, n) for n in names if getattr(config, n) != getattr(base, n)}
    whole = Spec(spec.name, spec.options, changed)
    chosen = "given" if spec.strength else "default"
    return Row(str(whole), label(whole, config.optimizer), chosen, tuple(results))


def _check_comparable(results: Sequence[Result]) -> None:
    kinds = {"data": {r.config.data for r in results}, "metrics": {r.metric for r in results}}
    for what, found in kinds.items():
        if len(found) > 1:
            said = f"{what} ({', '.join(sorted(found))})"
            raise LabError(f"these runs have different {said}: make one report for each.")


def _results(name: str, store: Path) -> list[Result]:
    if _is_file(name):
        content = _read(Path(name))
        parts = content["rows"] if "rows" in content else content["points"]
        return [_located(run, Path(name), store) for part in parts for run in part["runs"]]
    return [_finished(run) for run in find_runs(name, store)]


def named_runs(names: Sequence[str], store: Path) -> list[tuple[str, list[Run]]]:
    """Runs by what a figure calls them; a comparison's finished runs by method."""
    found: list[tuple[str, list[Run]]] = []
    for name in names:
        if not name.endswith(".json"):
            found += [(run_label(run), [run]) for run in find_runs(name, store)]
            continue
        for row in find_comparison([name], store).rows:
            if not (runs := runs_of(row)):
                raise LabError(f"the runs of {name} are not in {store}: give --store FOLDER.")
            found.append((row.label, runs))
    texts = [text for text, _ in found]
    return [
        (text if texts.count(text) == 1 else f"{text}, {runs[0].name.rpartition('-')[2]}", runs)
        for text, runs in found
    ]


def runs_of(row: Row) -> list[Run]:
    """A row's finished runs, as far as they are stored."""
    return [Run(result.folder) for result in row.finished if result.folder is not None]


def run_label(run: Run) -> str:
    """`ARWP (ratio 0.6), seed 0`."""
    config = run.config
    spec = parse(config.method)
    strength = f" ({spec.strength[0]} {spec.strength[1]:g})" if spec.strength else ""
    return f"{label(spec, config.optimizer)}{strength}, seed {config.seed}"


def find_runs(name: str, store: Path) -> list[Run]:
    """Runs by folder, name, part of a name that no other has, or pattern with `*`."""
    runs = [run for run in Store(store).runs() if fnmatch.fnmatch(run.name, name)]
    return runs or [Store(store).get(name)]


def _finished(run: Run) -> Result:
    result = stored(run)
    if result is None:
        raise LabError(f"{run.name} is not finished: steppe train --resume {run.folder}")
    return result


def _is_file(name: str) -> bool:
    return name.endswith(".json") or Path(name).is_file()


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise LabError(f"cannot read {file}: {error.strerror}.") from None
    except ValueError:
        raise LabError(f"{file} is not valid JSON: write it with --out FILE.json.") from None
    if not isinstance(content, dict) or not {"rows", "points"} & set(content):
        raise LabError(
            f"{file} is neither a comparison nor a sweep: write one with steppe compare or "
            "steppe sweep and --out FILE.json."
        )
    return content


def _comparison(content: dict[str, Any], file: Path, store: Path) -> Comparison:
    rows = []
    for row in content["rows"]:
        results = tuple(_located(record, file, store) for record in row["runs"])
        same = {name: row[name] for name in ("spec", "label", "chosen", "trials")}
        rows.append(Row(results=results, **same))
    return Comparison(as_config(content["config"]), tuple(content["seeds"]), judged(rows))


def _located(record: dict[str, Any], file: Path, store: Path) -> Result:
    """A result with its folder: in the store, or beside the file that tells of it."""
    result = from_record(record)
    found = (Store(folder).find(result.config) for folder in (store, file.parent))
    run = next(filter(None, found), None)
    return replace(result, folder=run.folder) if run else result
