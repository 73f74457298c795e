"""Runs side by side in processes of one thread, for studies whose runs are not the lab's."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import TypeVar

R = TypeVar("R")
T = TypeVar("T")


def side_by_side(
    jobs: int, to_do: Callable[[], Sequence[R]], work: Callable[[R], T]
) -> Iterator[tuple[R, T]]:
    """Each run and what it gave, as they end; `to_do` is asked again whenever there is room."""
    running: dict[Future[T], R] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        while True:
            free = [run for run in to_do() if run not in running.values()]
            for run in free[: jobs - len(running)]:
                running[pool.submit(work, run)] = run
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(done), done.result()
