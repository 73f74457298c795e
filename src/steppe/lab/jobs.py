"""Many runs: those that are finished are taken from the store, the others run side by side."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steppe.lab.config import Config
from steppe.lab.errors import Interrupted, LabError
from steppe.lab.problems import Sources
from steppe.lab.progress import Display, Event, Listener, display
from steppe.lab.ranks import world
from steppe.lab.results import Result
from steppe.lab.specs import parse
from steppe.lab.stopping import StopSignal, obey
from steppe.lab.training import find_result, run_config, settled


@dataclass(frozen=True)
class Job:
    """A run to do, and what the progress display calls it (different for every job)."""

    label: str
    config: Config
    then: Callable[[Result], None] | None = None
    """What the training process does with the finished run, as a function of a module."""

    @property
    def weight(self) -> float:
        """Its share of the work: passes per step."""
        return float(passes(self.config))


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
    progress: bool | None = None,
    title: str = "all runs",
    show: Display | None = None,
    keep: Keep | None = None,
) -> list[Result]:
    """The results of all jobs, in order; `processes` of them at a time.

    Under torchrun one after the other, each on all ranks. `show` is a display that is open already;
    `keep` is told of every result as it comes, in this process, also before a stop.
    """
    if processes > 1 and world().several:
        raise LabError("under torchrun every run takes all ranks: runs side by side need jobs=1.")
    results: dict[int, Result] = {}
    open_jobs: dict[int, Job] = {}
    for index, job in enumerate(jobs):
        job = dataclasses.replace(job, config=settled(job.config, sources))
        result = find_result(job.config, store) if store is not None else None
        if result is None or job.then is not None:
            open_jobs[index] = job
        else:
            results[index] = result
            if keep is not None:
                keep(job, result)
    processes = min(processes, len(open_jobs))
    with ExitStack() as stack:
        if show is None:
            weights = {job.label: job.weight for job in open_jobs.values()}
            show = stack.enter_context(display(progress, weights, title))
        if processes > 1:
            results |= _side_by_side(open_jobs, sources, store, processes, show, keep)
        else:
            results |= _one_by_one(open_jobs, sources, store, show, keep)
    return [results[index] for index in range(len(jobs))]


def _one_by_one(
    jobs: dict[int, Job],
    sources: Sources,
    store: str | Path | None,
    show: Display,
    keep: Keep | None,
) -> dict[int, Result]:
    results = {}
    for index, job in jobs.items():
        try:
            results[index] = _done(job, sources, store, show)
        except Interrupted:
            raise Stopped(f"{len(results)} of {len(jobs)} runs finished") from None
        if keep is not None:
            keep(job, results[index])
    return results


def _done(job: Job, sources: Sources, store: str | Path | None, listener: Listener) -> Result:
    """A job's run and what comes after it."""
    result = run_config(job.config, sources, store, _named(listener, job.label))
    if job.then is not None:
        job.then(result)
    return result


def _side_by_side(
    jobs: dict[int, Job],
    sources: Sources,
    store: str | Path | None,
    processes: int,
    show: Display,
    keep: Keep | None,
) -> dict[int, Result]:
    _check_picklable(sources)
    context = multiprocessing.get_context("spawn")
    events, stop = context.SimpleQueue(), context.Event()
    pool = ProcessPoolExecutor(
        processes, context, initializer=_start_worker, initargs=(events, stop)
    )
    futures: dict[Future[Result], int] = {}
    try:
        with StopSignal() as signal:
            for index, job in jobs.items():
                futures[pool.submit(_work, job, sources, store)] = index
            left = set(futures)
            while left:
                done, left = wait(left, timeout=0.1, return_when=FIRST_COMPLETED)
                while not events.empty():
                    show(events.get())
                for future in done:
                    if keep is not None and not future.cancelled() and not future.exception():
                        keep(jobs[futures[future]], future.result())
                if signal.asked:
                    stop.set()
                    left -= {future for future in left if future.cancel()}
                if any(not f.cancelled() and f.exception() for f in futures if f.done()):
                    stop.set()
                    left -= {future for future in left if future.cancel()}
        return _collect(futures)
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _collect(futures: dict[Future[Result], int]) -> dict[int, Result]:
    """All results, or the most telling of what went wrong."""
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    for future, index in futures.items():
        error = None if future.cancelled() else future.exception()
        if error is not None:
            errors.append(error)
        elif not future.cancelled():
            results[index] = future.result()
    for error in errors:
        if isinstance(error, BrokenProcessPool):
            raise LabError(
                "a training process died, perhaps for want of memory. Finished runs are kept: "
                "the same command goes on; --jobs 1 needs less memory."
            ) from error
        if not isinstance(error, Interrupted):
            raise error
    if len(results) < len(futures):
        raise Stopped(f"{len(results)} of {len(futures)} runs finished")
    return results


_events: Any = None


def _start_worker(events: Any, stop: Any) -> None:
    global _events
    _events = events
    obey(stop.is_set)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """A worker whose parent was killed would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(job: Job, sources: Sources, store: str | Path | None) -> Result:
    return _done(job, sources, store, _events.put)


def _named(listener: Listener, label: str) -> Listener:
    def relay(event: Event) -> None:
        listener(dataclasses.replace(event, run=label))

    return relay


def _check_picklable(sources: Sources) -> None:
    try:
        pickle.dumps(sources)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LabError(
            f"runs in several processes need a model function and data that can be pickled "
            f"({error}). Define them in a module, or use jobs=1."
        ) from error
