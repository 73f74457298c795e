"""How parallel runs end: exit codes of many short runs over gloo.

    python benchmarks/endings.py [--runs 30] [--torch-runs 10] [--late-runs 6] [--quick] [--out FILE]

The two examples, and beside them torch alone (no steppe): a wrapped model that is alive when the
process group is destroyed, and one that was released and collected before. All take turns,

- first while a process per core spins,
- then with gloo's worker threads made late: Python hands its lock over on request only after a long
  time (`sys.setswitchinterval`), so that a worker waits for it until the main thread blocks.

A run counts as aborted if a rank died of SIGABRT, as hung if it took longer than two minutes.
"""

from __future__ import annotations

import argparse
import gc
import os
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))

import measure

ROOT = Path(__file__).parents[1]
EXAMPLES = {
    "examples/ddp.py": ["2", str(ROOT / "examples" / "ddp.py")],
    "examples/hsdp.py": ["4", str(ROOT / "examples" / "hsdp.py")],
}
TORCH_ALONE = {
    "torch alone, DDP alive": ["2", __file__, "--train", "ddp", "--keep"],
    "torch alone, DDP released": ["2", __file__, "--train", "ddp"],
    "torch alone, FSDP2 alive": ["2", __file__, "--train", "fsdp", "--keep"],
}
TIMEOUT = 120
OUTCOMES = ["runs", "clean", "aborted", "hung", "failed"]


def train(kind: str, keep: bool) -> None:
    """Fifty steps without steppe; the group is destroyed with the model alive, if asked for."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(50):
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if keep:
        dist.destroy_process_group()


def work(kind: str, keep: bool) -> None:
    dist.init_process_group("gloo")
    train(kind, keep)
    if not keep:
        gc.collect()
        dist.destroy_process_group()


def end_of(processes: str, *command: str, late: bool = False) -> str:
    """How a job that torchrun starts ends: "clean", "aborted", "hung" or "failed"."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    script = [__file__, "--late-script", *command] if late else [*command]
    with subprocess.Popen(
        [*measure.TORCHRUN, processes, *script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        try:
            said, _ = job.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            job.terminate()  # torchrun kills its processes
            job.communicate()
            return "hung"
    if job.returncode == 0:
        return "clean"
    if "SIGABRT" in said:
        return "aborted"
    print(said, file=sys.stderr)
    return "failed"


def run_late(script: str, *options: str) -> None:
    """A script as it stands, with gloo's workers waiting for Python's lock until it is given up."""
    sys.setswitchinterval(100)
    sys.argv = [script, *options]
    runpy.run_path(script, run_name="__main__")


@contextmanager
def every_core_busy() -> Iterator[int]:
    """One process per core that does nothing but spin."""
    count = os.cpu_count() or 1
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield count
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def in_turns(planned: dict[str, int], *, late: bool) -> dict[str, dict[str, int]]:
    """How so many runs of each contender ended."""
    ends: dict[str, Counter[str]] = {name: Counter() for name, runs in planned.items() if runs}
    for turn in range(max(planned.values(), default=0)):
        for name in ends:
            if turn < planned[name]:
                ends[name][end_of(*{**EXAMPLES, **TORCH_ALONE}[name], late=late)] += 1
        print(f"turn {turn + 1}:", {name: dict(found) for name, found in ends.items()}, flush=True)
    return {name: {"runs": found.total(), **found} for name, found in ends.items()}


def measured(arguments: argparse.Namespace) -> None:
    planned = dict.fromkeys(EXAMPLES, arguments.runs)
    planned |= dict.fromkeys(TORCH_ALONE, arguments.torch_runs)
    lately = dict.fromkeys(planned, arguments.late_runs)
    if arguments.quick:
        planned, lately = {}, {"torch alone, DDP released": 1}
    with every_core_busy() as spinning:
        busy = in_turns(planned, late=False)
    late = in_turns(lately, late=True)
    for title, ends in {"every core busy": busy, "gloo's workers late": late}.items():
        print(f"\n{title:28}" + "".join(f"{end:>9}" for end in OUTCOMES))
        for name, found in ends.items():
            print(f"{name:28}" + "".join(f"{found.get(end, 0):>9}" for end in OUTCOMES))
    result = {"spinning_processes": spinning, "busy": busy, "late": late}
    print("written to", measure.write("endings", result, arguments.out))


def main() -> None:
    if sys.argv[1:2] == ["--late-script"]:
        run_late(*sys.argv[2:])
        return
    parser = measure.parser(__doc__, "a single run")
    parser.add_argument("--runs", type=int, default=30, help="runs of each example under load")
    parser.add_argument("--torch-runs", type=int, default=10, help="the same without steppe")
    parser.add_argument("--late-runs", type=int, default=6, help="runs of each with late workers")
    parser.add_argument("--train", choices=["ddp", "fsdp"], help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        work(arguments.train, arguments.keep)
    else:
        measured(arguments)


if __name__ == "__main__":
    main()
