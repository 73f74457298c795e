"""Ray: every run a task of a Ray cluster, started here for the purpose or running elsewhere.

A run that another machine trains tells its progress to a board (an actor beside the driver), which
also tells it to stop. A run whose worker died is submitted again and resumes from its checkpoint;
an error that the run itself raises is not tried again.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from steppe.lab.config import Config
from steppe.lab.engines import End, Job
from steppe.lab.errors import Interrupted, LabError
from steppe.lab.problems import Sources
from steppe.lab.progress import Event
from steppe.lab.ray_worker import Board, Trial, load_ray, train_trial
from steppe.lab.results import Result
from steppe.lab.stopping import StopSignal
from steppe.lab.training import device_here

logger = logging.getLogger("steppe")

OBJECT_STORE = 256 * 1024**2
"""Bytes for objects on the way between processes, in a cluster started here."""

ATTEMPTS = 3
"""To start one."""


@dataclass(frozen=True)
class Ray:
    """A Ray cluster, and what it should reserve for a run.

    If Ray is initialised already in this process, that cluster is used, and left as it is.
    """

    address: str | None = None
    """HOST:PORT or auto, for a cluster that is running; None: RAY_ADDRESS, or one started here."""
    cpus_per_trial: float | None = None
    """None: as many as the run has threads."""
    gpus_per_trial: float | None = None
    """None: one where the config's device is cuda, or auto and this machine has a GPU."""
    retries: int = 3
    """How often a run whose worker died is tried again."""

    def __post_init__(self) -> None:
        for name in ("cpus_per_trial", "gpus_per_trial", "retries"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise LabError(f"{name} must be at least 0, got {value:g}.")
        gpus = self.gpus_per_trial or 0
        if gpus > 1 and gpus != int(gpus):
            raise LabError(f"gpus_per_trial must be a part of one or whole, got {gpus:g}.")

    @property
    def threads(self) -> int:
        return max(1, int(self.cpus_per_trial or 1))

    def device(self, config: Config) -> str:
        """cuda for a run with a share of a GPU; which GPU it is, Ray decides."""
        if config.device not in ("auto", "cpu", "cuda"):
            raise LabError(f"Ray hands out the GPUs: use device cuda, not {config.device}.")
        if config.device == "cpu" and self.gpus_per_trial:
            raise LabError("gpus_per_trial was given, but the device is cpu. Use device cuda.")
        if config.device == "cuda" and self.gpus_per_trial == 0:
            raise LabError("device cuda needs a share of a GPU: gpus_per_trial must be above 0.")
        if config.device == "auto" and self.gpus_per_trial is None:
            return device_here("auto")
        return "cuda" if config.device == "cuda" or self.gpus_per_trial else "cpu"

    def resources(self, config: Config) -> dict[str, float]:
        """What a settled run asks for."""
        cpus = self.cpus_per_trial
        gpus = self.gpus_per_trial
        return {
            "CPU": float(config.threads or 1) if cpus is None else cpus,
            "GPU": float(config.device == "cuda") if gpus is None else gpus,
        }

    @contextmanager
    def open(self) -> Iterator[None]:
        ray = load_ray()
        if ray.is_initialized():
            yield
            return
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        try:
            with StopSignal() as stop:  # which also gives back SIGTERM, which Ray takes for itself
                _connect(ray, address)
            if stop.asked:
                signal.raise_signal(signal.SIGINT)
            yield
        finally:
            ray.shutdown()

    @contextmanager
    def workers(self, runs: int, sources: Sources, store: str | Path | None) -> Iterator[Tasks]:
        with self.open(), redirect_stdout(sys.stderr):  # Ray prints; tables go to stdout
            tasks = Tasks(self, sources, store)
            try:
                yield tasks
            finally:
                tasks.leave()


def _connect(ray: Any, address: str) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        _start(ray, include_dashboard=False, object_store_memory=OBJECT_STORE, **quiet)
        return
    host, colon, port = address.rpartition(":")
    try:
        if colon and port.isdigit() and "://" not in address:  # Ray would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(address=address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        first = str(error).partition("\n")[0].rstrip(".")
        raise LabError(
            f"no Ray cluster at {address}: {first}. Start one with `ray start --head`, or give no "
            "address, and one is started for this command."
        ) from error


def _start(ray: Any, **options: Any) -> None:
    """A cluster of our own. Ray gives its node 30 seconds, which a busy machine exceeds; what one attempt
    leaves behind ends with this process."""
    for _ in range(ATTEMPTS):
        try:
            ray.init(address="local", **options)
            return
        except Exception as error:  # Ray raises no narrower one
            if "timed out" not in str(error):
                raise
            late = error
    raise LabError(
        f"Ray did not start within its 30 seconds in {ATTEMPTS} attempts: the machine is too busy. Train "
        "without it, --engine local, or start a cluster with `ray start --head` and give its address."
    ) from late


class Tasks:
    """Tasks of a Ray cluster that is open."""

    def __init__(self, engine: Ray, sources: Sources, store: str | Path | None) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.engine, self.store = engine, store
        self._ray = ray = load_ray()
        self._open: dict[Any, Trial] = {}
        self._stopping = False
        self._sources = ray.put(ray.cloudpickle.dumps(sources))
        self._task = ray.remote(max_retries=0)(train_trial)
        here = ray.get_runtime_context().get_node_id()  # the board ends with the driver
        strategy = NodeAffinitySchedulingStrategy(here, soft=True)
        board = ray.remote(Board).options(num_cpus=0, scheduling_strategy=strategy)
        self._board = board.remote()

    def leave(self) -> None:
        """On a cluster that stays, nothing of these workers does."""
        for task in self._open:
            self._ray.cancel(task, force=True)
        self._ray.kill(self._board)

    def submit(self, index: int, job: Job) -> None:
        self._check_room(job.config)
        store = None if self.store is None else Path(self.store).resolve()
        self._send(Trial(index, job, store, Path.cwd(), tuple(sys.path)))

    def _send(self, trial: Trial) -> None:
        share = self.engine.resources(trial.job.config)
        task = self._task.options(
            num_cpus=share["CPU"], num_gpus=share["GPU"], name=f"steppe: {trial.job.label}"
        )
        self._open[task.remote(trial, self._sources, self._board)] = trial

    def _check_room(self, config: Config) -> None:
        """A run that no node can take would wait for ever."""
        share = self.engine.resources(config)
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if any(all(node.get(kind, 0) >= n for kind, n in share.items()) for node in nodes):
            return
        wanted = " and ".join(f"{n:g} {kind}{'s' * (n != 1)}" for kind, n in share.items() if n)
        raise LabError(
            f"a run asks for {wanted}, more than any node of the Ray cluster has. Lower threads, "
            "cpus_per_trial or gpus_per_trial."
        )

    def wait(self, seconds: float) -> dict[int, End]:
        done, _ = self._ray.wait(list(self._open), timeout=seconds)
        ends = {}
        for task in done:
            trial = self._open.pop(task)
            end = self._end(task, trial)
            if end is not None:
                ends[trial.index] = end
        return ends

    def _end(self, task: Any, trial: Trial) -> End | None:
        """How a task ended; None if it is tried again."""
        errors = self._ray.exceptions
        try:
            result: Result | Interrupted = self._ray.get(task)
        except errors.RayTaskError as error:
            if error.cause is None:  # it could not travel
                return error  # type: ignore[no-any-return]
            error.cause.__cause__ = error  # what the run raised, because of Ray's account of it
            return error.cause  # type: ignore[no-any-return]
        except errors.RayError as error:
            if self._stopping:
                return Interrupted(0, 0, None)
            return self._retried(trial, error)
        if isinstance(result, Interrupted) or self.store is None or result.folder is None:
            return result
        return replace(result, folder=Path(self.store) / result.folder.name)

    def _retried(self, trial: Trial, error: Exception) -> End | None:
        reason = str(error).partition("\n")[0]
        if trial.attempt >= self.engine.retries:
            said = LabError(
                f"the worker of {trial.job.label} died {trial.attempt + 1} times, perhaps because "
                f"memory ran out: {reason} Finished runs are kept: the same command resumes."
            )
            said.__cause__ = error
            return said
        logger.warning("the worker of %s died, and the run is sent to another", trial.job.label)
        self._send(replace(trial, attempt=trial.attempt + 1))
        return None

    def events(self) -> list[Event]:
        events, warnings = self._ray.get(self._board.read.remote())
        for text in warnings:
            logger.warning(text)
        return list(events)

    def stop(self) -> set[int]:
        if not self._stopping:
            self._stopping = True
            self._board.stop.remote()
        return set()  # those that have not begun will, and find that they should stop
