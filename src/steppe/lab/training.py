"""`train`: one run from its config to its result."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from steppe.lab.config import Config, as_config
from steppe.lab.course import Course
from steppe.lab.errors import DivergedError, LabError
from steppe.lab.problems import Sources, load_problem, named
from steppe.lab.progress import Listener, Progress, display
from steppe.lab.ranks import local_rank, world
from steppe.lab.results import Result, stored
from steppe.lab.runs import DEFAULT_STORE, Run, Store, locked
from steppe.lab.specs import parse

logger = logging.getLogger("steppe")


def train(
    config: Config | Mapping[str, object],
    *,
    sources: Sources | None = None,
    store: str | Path | None = DEFAULT_STORE,
    progress: Progress = None,
) -> Result:
    """Train one run and give its result; a finished run is not trained again, a stopped one resumes.

    A loss that is not a number raises `DivergedError`, Ctrl-C `Interrupted` after saving.

    Args:
        config: What to train: a `Config` or a mapping of its fields.
        sources: Model, data or task as Python objects, in place of the config's names.
        store: The folder of run folders; None keeps nothing.
        progress: True or False shows or hides it; a function is called with each `Event`.
    """
    with display(progress) as show:
        sources = sources or Sources()
        result = run_config(settled(as_config(config), sources), sources, store, show)
    if result.status == "diverged":
        raise DivergedError(result.message)
    return result


def run_config(
    config: Config, sources: Sources, store: str | Path | None, listener: Listener
) -> Result:
    """`train` for programs, with a config that is settled; a diverged run is a result too."""
    if store is None:
        return _attempt(config, sources, None, listener)
    if (result := find_result(config, store)) is not None:
        return result

    def held() -> Run:
        """The run's folder, found or new, which no other process has until the stack is left."""
        run = Store(Path(store)).find(config) or Store(Path(store)).place(config)
        stack.enter_context(locked(run))
        return run

    with ExitStack() as stack:
        run = world().from_first(held)
        return _attempt(config, sources, run if world().leads else None, listener)


def find_result(config: Config, store: str | Path) -> Result | None:
    """The result of a settled config's run, if it has one; on every rank what rank 0 finds."""

    def look() -> Result | None:
        found = Store(Path(store)).find(config)
        return stored(found) if found else None

    return world().from_first(look)


def settled(config: Config, sources: Sources, *, device: str | None = None) -> Config:
    """The config with nothing left to the machine: its identity is then that of the run.

    `device` is the run's where this machine is not the one that will train it.
    """
    device = device or device_here(config.device)
    threads = config.threads or torch.get_num_threads()
    config = parse(config.method).apply(config)
    return named(config.replace(device=device, threads=threads), sources)


def device_here(device: str) -> str:
    """The device that a config's means on this machine; raises if there is none."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise LabError("device 'cuda' was asked for, but torch finds no GPU here. Use cpu.")
    if not world().several or not device.startswith("cuda"):
        return device
    if device != "cuda":
        raise LabError(
            f"under torchrun every rank takes its own GPU: use device cuda, not {device}."
        )
    if local_rank() >= (count := torch.cuda.device_count()):
        raise LabError(
            f"torchrun started more processes than this machine has GPUs ({count}). "
            f"Use --nproc-per-node {count}, or device cpu."
        )
    return device


def _attempt(config: Config, sources: Sources, run: Run | None, listener: Listener) -> Result:
    with _own_random_state(config):
        with world().together():
            problem = load_problem(config, sources)
            if run is not None:
                run.write_json("config.json", config.to_dict())
        with world().together():
            course = Course(config, problem, run, listener)
        result = course.to_the_end()
        return world().from_first(lambda: result)


@contextmanager
def _own_random_state(config: Config) -> Iterator[None]:
    """torch's random state and threads as the run wants them, and afterwards as they were."""
    threads = torch.get_num_threads()
    devices = [torch.device(config.device)] if config.device.startswith("cuda") else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(config.seed)
        torch.set_num_threads(config.threads or threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
