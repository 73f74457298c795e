"""Many runs: those that are finished are taken from the store, an engine trains the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from steppe.lab.config import Config
from steppe.lab.engines import End, Engine, Job, Local, Workers
from steppe.lab.errors import Interrupted, LabError
from steppe.lab.problems import Sources
from steppe.lab.progress import Display, Progress, display
from steppe.lab.ranks import world
from steppe.lab.results import Result
from steppe.lab.specs import parse
from steppe.lab.stopping import StopSignal
from steppe.lab.training import find_result, settled


def passes(config: Config) -> int:
    """Forward and backward passes per optimizer step."""
    return len(parse(config.method).build(1).passes)


Keep = Callable[[Job, Result], None]


class Stopped(KeyboardInterrupt):
    """Several runs were asked to stop; what they had reached is saved."""


def run_all(
    jobs: Sequence[Job],
    sources: Sources,
    store: str | Path | None,
    *,
    processes: int = 1,
    engine: Engine | None = None,
    progress: Progress = None,
    title: str = "all runs",
    show: Display | None = None,
    keep: Keep | None = None,
) -> list[Result]:
    """The results of all jobs, in order; `processes` of them at a time, or as the engine can.

    Under torchrun one after the other, each on all ranks. `show` is a display that is open already;
    `keep` is called with every result as it comes, in this process, also before a stop.
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
        job = dataclasses.replace(job, config=config)
        result = find_result(config, store) if store is not None else None
        if result is None or job.then is not None:
            open_jobs[index] = job
        else:
            results[index] = result
            if keep is not None:
                keep(job, result)
    if not open_jobs:
        return [results[index] for index in range(len(jobs))]
    with ExitStack() as stack:
        if show is None:
            weights = {job.label: float(passes(job.config)) for job in open_jobs.values()}
            show = stack.enter_context(display(progress, weights, title))
        workers = engine.workers(len(open_jobs), sources, store)
        if workers is None:
            results |= _one_by_one(open_jobs, sources, store, show, keep)
        else:
            results |= _side_by_side(open_jobs, workers, show, keep)
    return [results[index] for index in range(len(jobs))]


def _one_by_one(
    jobs: Mapping[int, Job],
    sources: Sources,
    store: str | Path | None,
    show: Display,
    keep: Keep | None,
) -> dict[int, Result]:
    results = {}
    for index, job in jobs.items():
        try:
            results[index] = job.train(sources, store, show)
        except Interrupted:
            raise Stopped(f"{len(results)} of {len(jobs)} runs finished") from None
        if keep is not None:
            keep(job, results[index])
    return results


def _side_by_side(
    jobs: Mapping[int, Job], workers: Workers, show: Display, keep: Keep | None
) -> dict[int, Result]:
    """All results; the first error, or a signal, ends the other runs too, which save first."""
    ends: dict[int, End] = {}
    left = set(jobs)
    with StopSignal() as signal, workers:
        for index, job in jobs.items():
            workers.submit(index, job)
        while left:
            new = workers.wait(0.1)
            for event in workers.events():
                show(event)
            for index, end in new.items():
                if keep is not None and isinstance(end, Result):
                    keep(jobs[index], end)
            ends |= new
            left -= set(new)
            if signal.asked or any(isinstance(end, BaseException) for end in ends.values()):
                left -= workers.stop()
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
