"""Real process groups for tests: a few processes that stay up and form a new group for each job."""

import atexit
import multiprocessing as mp
import os
import queue
import tempfile
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

TIMEOUT = 60


def run(world, job, *args):
    """`job(rank, *args)` on `world` ranks of one gloo group; its results in the order of ranks."""
    workers = _workers(world)
    with tempfile.TemporaryDirectory() as folder:
        init = (Path(folder) / "store").as_uri()
        for rank, worker in enumerate(workers):
            worker.inbox.put((job, args, rank, world, init))
        try:
            results = [worker.outbox.get(timeout=2 * TIMEOUT) for worker in workers]
        except queue.Empty:
            _stop()
            raise TimeoutError(f"{job.__name__} hung on some rank") from None
    failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(results) if not ok]
    if failures:
        _stop()
        raise AssertionError("\n".join(failures))
    return [value for _, value in results]


class _Worker:
    def __init__(self):
        context = mp.get_context("spawn")
        self.inbox, self.outbox = context.Queue(), context.Queue()
        self.process = context.Process(target=_serve, args=(self.inbox, self.outbox), daemon=True)
        self.process.start()


_running: list[_Worker] = []


def _workers(count):
    while len(_running) < count:
        _running.append(_Worker())
    return _running[:count]


def _stop():
    while _running:
        _running.pop().process.kill()


atexit.register(_stop)


def _serve(inbox, outbox):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from steppe.distributed import process_group

    torch.set_num_threads(1)
    warnings.filterwarnings("error", message="The process group is destroyed, but")
    while True:
        job, args, rank, world, init = inbox.get()
        group = {"init_method": init, "rank": rank, "world_size": world}
        try:
            with process_group("gloo", timeout=timedelta(seconds=TIMEOUT), **group):
                outcome = (True, job(rank, *args))
                with suppress(RuntimeError):
                    dist.barrier()  # who leaves early breaks the groups that others still connect
        except BaseException:
            outcome = (False, traceback.format_exc())
        outbox.put(outcome)
