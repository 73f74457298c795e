"""How the cost of perturbing grows: with the number of weights and of tensors.

    python benchmarks/scaling.py [--rounds 15] [--threads 2] [--quick] [--out FILE]

Weights: what RWP and ARWP add to a step (moving the weights, putting them back, learning from gradients)
on square linear layers of 10^4 to 10^8 weights in all, next to an SGD step (`optimizer.step`) on them.
Tensors: the same on a million weights that are cut into 4 to 1,024 layers.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import measure
import torch
from torch import nn

import steppe

COUNTS = [10**4, 10**5, 10**6, 10**7, 10**8]
TENSORS = [4, 16, 64, 256, 1024]
METHODS = {"RWP": steppe.rwp(0.001), "ARWP": steppe.arwp(0.001)}


def with_gradients(count: int, tensors: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Square layers with about `count` weights in all, and their optimizer."""
    width = round((count / tensors) ** 0.5)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(tensors)])
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-3)
    return model, torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)


def added(count: int, tensors: int, method: steppe.Method) -> measure.Step:
    return measure.added_by(steppe.attach(*with_gradients(count, tensors), method))


def over_sizes(sizes: list[tuple[int, int]], rounds: int) -> list[dict[str, dict[str, float]]]:
    """What is added for each number of weights and of tensors."""
    found = []
    for size in sizes:
        steps: dict[str, measure.Step] = {"SGD's own step": with_gradients(*size)[1].step}
        steps |= {name: added(*size, method) for name, method in METHODS.items()}
        turns = rounds if size[0] >= 10**7 else 5 * rounds
        print(f"{size[0]:,} weights in {size[1]:,} tensors")
        found.append(measure.show(measure.in_turns(steps, turns), "ms"))
    return found


def main() -> None:
    parser = measure.parser(__doc__, "two small sizes, two rounds")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    crowded = measure.busy()
    rounds = 1 if arguments.quick else arguments.rounds
    few = 2 if arguments.quick else None
    counts, tensors = COUNTS[:few], TENSORS[:few]
    weights = over_sizes([(count, 4) for count in counts], rounds)
    pieces = over_sizes([(10**6, number) for number in tensors], rounds)
    result = {
        "threads": arguments.threads,
        "weights": dict(zip(map(str, counts), weights, strict=True)),
        "tensors": dict(zip(map(str, tensors), pieces, strict=True)),
    }
    measure.publish("scaling", result, arguments.out, crowded)


if __name__ == "__main__":
    main()
