"""How parallel runs end: exit codes of many short runs over gloo while a process per core spins.

    python benchmarks/endings.py [--runs 30] [--torch-runs 10] [--spinning 2] [--quick] [--out FILE]

The two examples, and beside them torch alone (no steppe): a wrapped model that is alive when the
process group is destroyed, and one that was released and collected before. All take turns. A run counts as
aborted if a rank died of SIGABRT, as hung if it took longer than ten minutes (four processes that import torch
on two loaded cores take two).
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import measure
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

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
TIMEOUT = 600


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


def end_of(processes: str, *command: str) -> str:
    """How a job that torchrun starts ends: "clean", "aborted", "hung" or "failed"."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with subprocess.Popen(
        [*measure.TORCHRUN, processes, *command],
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


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that do nothing but spin."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def in_turns(planned: dict[str, int]) -> dict[str, dict[str, int]]:
    """How so many runs of each contender ended."""
    ends: dict[str, Counter[str]] = {name: Counter() for name, runs in planned.items() if runs}
    for turn in range(max(planned.values())):
        for name in ends:
            if turn < planned[name]:
                ends[name][end_of(*{**EXAMPLES, **TORCH_ALONE}[name])] += 1
        print(f"turn {turn + 1}:", {name: dict(found) for name, found in ends.items()}, flush=True)
    return {name: {"runs": found.total(), **found} for name, found in ends.items()}


def main() -> None:
    parser = measure.parser(__doc__, "a single run")
    parser.add_argument("--runs", type=int, default=30, help="runs of each example")
    parser.add_argument("--torch-runs", type=int, default=10, help="the same without steppe")
    parser.add_argument(
        "--spinning",
        type=int,
        default=os.cpu_count(),
        help="processes that spin meanwhile; 0 where something else loads the machine",
    )
    parser.add_argument("--train", choices=["ddp", "fsdp"], help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        work(arguments.train, arguments.keep)
        return
    planned = dict.fromkeys(EXAMPLES, arguments.runs)
    planned |= dict.fromkeys(TORCH_ALONE, arguments.torch_runs)
    with busy(arguments.spinning):
        found = in_turns({"torch alone, DDP released": 1} if arguments.quick else planned)
    result = {"spinning_processes": arguments.spinning, "busy": found}
    print("written to", measure.write("endings", result, arguments.out))


if __name__ == "__main__":
    main()
