"""Engines: where the runs of a comparison or a sweep are trained, and how many at once.

An engine is asked for workers, which take runs and give back how they ended; what is done with
the ends, with Ctrl-C and with progress is the same for all engines (`run_all`).
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from steppe.lab.config import Config
from steppe.lab.errors import Interrupted, LabError, unknown
from steppe.lab.problems import Sources
from steppe.lab.progress import Event, Listener, Progress, display
from steppe.lab.ranks import world
from steppe.lab.results import Result
from steppe.lab.specs import parse
from steppe.lab.stopping import StopSignal, obey
from steppe.lab.training import find_result, run_config, settled

if TYPE_CHECKING:
    from steppe.lab.ray_engine import Ray, Tasks

Engine: TypeAlias = "Local | Ray"
Workers: TypeAlias = "Processes | Tasks"

End = Result | BaseException
"""How a run ended; `Interrupted` if it was asked to."""

Then = Callable[[Result], None]
"""What the training process does with a finished run, as a function of a module."""


@dataclass(frozen=True)
class Job:
    """A run to do, and what the progress display calls it (different for every job)."""

    label: str
    config: Config
    then: Then | None = None

    def train(self, sources: Sources, store: str | Path | None, listener: Listener) -> Result:
        """The run, and what comes after it."""

        def named(event: Event) -> None:
            listener(dataclasses.replace(event, run=self.label))

        result = run_config(self.config, sources, store, named)
        if self.then is not None:
            self.then(result)
        return result


@dataclass(frozen=True)
class Local:
    """This machine: so many processes, of so many threads each where the config does not say."""

    processes: int = 1
    threads: int = 1

    def device(self, config: Config) -> str | None:
        """The device a run will have there; None: what this machine has."""
        return None

    def open(self) -> AbstractContextManager[None]:
        """What several sets of workers can share, until the block is left; may be nested."""
        return nullcontext()

    def workers(self, runs: int, sources: Sources, store: str | Path | None) -> Processes | None:
        """Workers for so many runs; None: this process does better alone, one after the other."""
        processes = min(self.processes, runs)
        return Processes(processes, sources, store) if processes > 1 else None


def chosen(engine: Engine | Literal["local", "ray"], jobs: int | None) -> Engine:
    """The engine by name; the local one with so many processes, which share torch's threads."""
    if engine == "local":
        if jobs is not None and jobs < 1:
            raise LabError(f"jobs must be at least 1, got {jobs}.")
        return Local(jobs, max(1, torch.get_num_threads() // jobs)) if jobs else Local()
    if jobs is not None:
        raise LabError(
            "jobs is for the local engine: Ray runs as many at once as it has CPUs or GPUs for. "
            "Say with cpus_per_trial or gpus_per_trial what one run takes."
        )
    if engine == "ray":
        from steppe.lab.ray_engine import Ray

        return Ray()
    if isinstance(engine, str):
        raise unknown("engine", engine, ("local", "ray"))
    return engine


def seed_numbers(seeds: int | Sequence[int], purpose: str) -> tuple[int, ...]:
    """The seeds by their number, or as given."""
    if isinstance(seeds, str | float):
        raise LabError(f"seeds must be their number or a list of them, got {seeds!r}.")
    numbers = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not numbers:
        raise LabError(f"a {purpose} needs at least one seed.")
    if len(set(numbers)) < len(numbers):
        raise LabError(f"seeds must differ: a run counts once. Got {list(numbers)}.")
    return numbers


class Processes(AbstractContextManager["Processes"]):
    """Processes on this machine."""

    def __init__(self, processes: int, sources: Sources, store: str | Path | None) -> None:
        _check_picklable(sources)
        self.sources, self.store = sources, store
        context = multiprocessing.get_context("spawn")
        self._events, self._stop = context.SimpleQueue(), context.Event()
        self._pool = ProcessPoolExecutor(
            processes, context, initializer=_start_worker, initargs=(self._events, self._stop)
        )
        self._open: dict[Future[Result], int] = {}

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, index: int, job: Job) -> None:
        """Train this run when there is room for it."""
        self._open[self._pool.submit(_work, job, self.sources, self.store)] = index

    def wait(self, seconds: float) -> dict[int, End]:
        """The runs that ended since the last call, or end within so many seconds."""
        done, _ = wait(self._open, timeout=seconds, return_when=FIRST_COMPLETED)
        return {self._open.pop(future): _end(future) for future in done}

    def events(self) -> list[Event]:
        """What the runs reported since the last call."""
        found = []
        while not self._events.empty():
            found.append(self._events.get())
        return found

    def stop(self) -> set[int]:
        """Let runs under way save and end; gives those that will never begin."""
        self._stop.set()
        cancelled = [future for future in self._open if future.cancel()]
        return {self._open.pop(future) for future in cancelled}


def _end(future: Future[Result]) -> End:
    error = future.exception()
    if isinstance(error, BrokenProcessPool):
        said = LabError(
            "a training process died, perhaps because memory ran out. Finished runs are kept: "
            "the same command resumes; --jobs 1 needs less memory."
        )
        said.__cause__ = error
        return said
    return future.result() if error is None else error


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
    return job.train(sources, store, _events.put)


def _check_picklable(sources: Sources) -> None:
    try:
        pickle.dumps(sources)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LabError(
            f"runs in several processes need a model function and data that can be pickled "
            f"({error}). Define them in a module, or use jobs=1."
        ) from error


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
    engine: Engine,
    progress: Progress = None,
    title: str = "all runs",
    show: Listener | None = None,
    keep: Keep = lambda job, result: None,
) -> list[Result]:
    """The results of all jobs, in order; as many of them at a time as the engine can.

    Under torchrun one after the other, each on all ranks. `show` is a display that is open already;
    `keep` is called with every result as it comes, in this process, also before a stop.
    """
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
    show: Listener,
    keep: Keep,
) -> dict[int, Result]:
    results = {}
    for index, job in jobs.items():
        try:
            results[index] = job.train(sources, store, show)
        except Interrupted:
            raise Stopped(f"{len(results)} of {len(jobs)} runs finished") from None
        keep(job, results[index])
    return results


def _side_by_side(
    jobs: Mapping[int, Job],
    opened: AbstractContextManager[Workers],
    show: Listener,
    keep: Keep,
) -> dict[int, Result]:
    """All results; the first error, or a signal, ends the other runs too, which save first."""
    ends: dict[int, End] = {}
    left = set(jobs)
    with StopSignal() as signal, opened as workers:
        for index, job in jobs.items():
            workers.submit(index, job)
        while left:
            new = workers.wait(0.1)
            for event in workers.events():
                show(event)
            for index, end in new.items():
                if isinstance(end, Result):
                    keep(jobs[index], end)
            ends |= new
            left -= set(new)
            if signal.asked or any(isinstance(end, BaseException) for end in ends.values()):
                left -= workers.stop()
    for end in ends.values():
        if isinstance(end, BaseException) and not isinstance(end, Interrupted):
            raise end  # tells more than that others were stopped for it
    results = {index: end for index, end in ends.items() if isinstance(end, Result)}
    if len(results) < len(jobs):
        raise Stopped(f"{len(results)} of {len(jobs)} runs finished")
    return results
