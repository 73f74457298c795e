"""Many runs: those that are finished are taken from the store, an engine trains the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from steppe.lab.config import Config
from steppe.lab.engines import Crew, End, Engine, Local, named
from steppe.lab.errors import Interrupted, LabError
from steppe.lab.problems import Sources
from steppe.lab.progress import Display, display
from steppe.lab.ranks import world
from steppe.lab.results import Result
from steppe.lab.specs import parse
from steppe.lab.stopping import StopSignal
from steppe.lab.training import find_result, run_config, settled


@dataclass(frozen=True)
class Job:
    """A run to do, and what the progress display calls it (different for every job)."""

    label: str
    config: Config

    @property
    def weight(self) -> float:
        """Its share of the work: passes per step."""
        return float(len(parse(self.config.method).build(1).passes))


class Stopped(KeyboardInterrupt):
    """Several runs were asked to stop; what they had reached is saved."""


def run_all(
    jobs: Sequence[Job],
    sources: Sources,
    store: str | Path | None,
    *,
    processes: int = 1,
    engine: Engine | None = None,
    progress: bool | None = None,
    title: str = "all runs",
) -> list[Result]:
    """The results of all jobs, in order; `processes` of them at a time, or as the engine can.

    Under torchrun one after the other, each on all ranks.
    """
    engine = engine or Local(processes)
    if world().several and not (isinstance(engine, Local) and engine.processes == 1):
        raise LabError(
            "under torchrun every run takes all ranks: runs side by side need jobs=1 and the "
            "local engine."
        )
    results: dict[int, Result] = {}
    open_jobs: dict[int, Job] = {}
    for index, job in enumerate(jobs):
        config = settled(job.config, sources, device=engine.device(job.config))
        result = find_result(config, store) if store is not None else None
        if result is None:
            open_jobs[index] = dataclasses.replace(job, config=config)
        else:
            results[index] = result
    if not open_jobs:
        return [results[index] for index in range(len(jobs))]
    with display(progress, {j.label: j.weight for j in open_jobs.values()}, title) as show:
        crew = engine.crew(len(open_jobs), sources, store)
        if crew is None:
            results |= _one_by_one(open_jobs, sources, store, show)
        else:
            results |= _side_by_side(open_jobs, crew, show)
    return [results[index] for index in range(len(jobs))]


def _one_by_one(
    jobs: Mapping[int, Job], sources: Sources, store: str | Path | None, show: Display
) -> dict[int, Result]:
    results = {}
    for index, job in jobs.items():
        try:
            results[index] = run_config(job.config, sources, store, named(show, job.label))
        except Interrupted:
            raise Stopped(f"{len(results)} of {len(jobs)} runs finished") from None
    return results


def _side_by_side(jobs: Mapping[int, Job], crew: Crew, show: Display) -> dict[int, Result]:
    """All results; the first error, or a signal, ends the other runs too, which save first."""
    ends: dict[int, End] = {}
    left = set(jobs)
    with StopSignal() as signal, crew:
        for index, job in jobs.items():
            crew.submit(index, job.label, job.config)
        while left:
            new = crew.wait(0.1)
            for event in crew.events():
                show(event)
            ends |= new
            left -= set(new)
            if signal.asked or any(isinstance(end, BaseException) for end in ends.values()):
                left -= crew.stop()
    return _collect(ends, len(jobs))


def _collect(ends: Mapping[int, End], runs: int) -> dict[int, Result]:
    """All results, or the most telling of what went wrong."""
    for end in ends.values():
        if isinstance(end, BaseException) and not isinstance(end, Interrupted):
            raise end
    results = {index: end for index, end in sorted(ends.items()) if isinstance(end, Result)}
    if len(results) < runs:
        raise Stopped(f"{len(results)} of {runs} runs finished")
    return results
