"""How many operations a method adds to a step, which on a GPU are kernel launches; and what they cost.

    python benchmarks/launches.py [--rounds 200] [--counts-only] [--quick] [--out FILE]

Counts: transformers of 6, 12 and 48 layers and ResNet-18 train on the `meta` device, which has neither
values nor a clock but the block sizes of a GPU. Counted is every operation that reaches a device, views and
`empty` left out, beyond the method's forwards and backwards and SGD's own step. A foreach operation counts
once; on a GPU it is one launch for about every 64 tensors. Bars: no growth with depth, at most 65 for each
perturbed pass of a transformer and 95 for ResNet-18, where a rise steers in the mean over the meter's period.

Times: whole steps on the CPU where operations are all there is, a transformer of 12 layers and width 8 and a
small MLP, one thread, methods in turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import measure
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import steppe
from steppe.lab import models
from steppe.schedules import OPENING, PERIOD, REST

METHODS = {
    **measure.METHODS,
    "ARWP, element-wise": steppe.arwp(0.01, elementwise=True),
    "m-ARWP, element-wise": steppe.m_arwp(0.015, elementwise=True),
    "LPF-SGD": steppe.lpf_sgd(0.01, samples=2),
    "antithetic RWP": steppe.antithetic_rwp(0.01),
    "RWP, rise": steppe.rwp(rise=0.05),
    "ARWP, rise": steppe.arwp(rise=0.05),
    "m-RWP, rise": steppe.m_rwp(rise=0.05),
    "m-ARWP, rise": steppe.m_arwp(rise=0.05),
    "SAM, rise": steppe.sam(rise=0.05),
}
DEPTHS = (6, 12, 48)
BARS = {"transformer": 65, "resnet18": 95}
TIME_BARS = {
    "transformer": {"RWP": 1.2, "ARWP": 1.25, "MSAM": 1.2, "SAM": 2.1, "m-ARWP": 2.25},
    "mlp": {"RWP": 1.9},
}


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int = 8) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(16, width)
        self.layers = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.layers(self.embedding(tokens))).transpose(1, 2)
        return output


def bench(net: str, device: str = "cpu", layers: int = 12) -> measure.Bench:
    """A network and one batch."""
    torch.manual_seed(0)
    with torch.device(device):
        if net == "transformer":
            model: nn.Module = Transformer(layers)
            x, y = torch.randint(0, 16, (2, 4, 6))
        else:
            shape = (3, 32, 32) if net == "resnet18" else (1, 8, 8)
            model = models.build(net, classes=10, shape=shape)
            x, y = torch.randn(64, *shape), torch.randint(0, 10, (64,))
    return measure.Bench(model, measure.cross_entropy, x, y)


class Operations(TorchDispatchMode):
    """Counts what reaches a device; views and `empty` do not."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        returns = func._schema.returns
        view = bool(returns) and returns[0].alias_info and not returns[0].alias_info.is_write
        if not view and "empty" not in name:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def operations(call: Callable[[], object]) -> list[str]:
    with Operations() as counted:
        call()
    return counted.names


@cache
def of_training(net: str, layers: int, device: str) -> tuple[int, int]:
    """Operations of a forward and backward, and of SGD's step."""
    plain = bench(net, device, layers)
    plain.plain_step()
    return len(operations(plain.backward)), len(operations(plain.update))


def added(method: steppe.Method, net: str, layers: int = 12, device: str = "meta") -> float:
    """Operations for each perturbed pass beyond forwards, backwards and the optimizer's step."""
    gradient, update = of_training(net, layers, device)
    step = bench(net, device, layers).step_with(method)
    counted = math.lcm(PERIOD, REST) if method.steered else 1
    for _ in range(OPENING + 1 if method.steered else 2):  # the first steps look closely
        step()
    done = sum(len(operations(step)) for _ in range(counted)) / counted
    extra = done - len(method.passes) * gradient - update
    return extra / sum(p.perturbation is not None for p in method.passes)


def counts(depths: tuple[int, ...]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    nets = {f"transformer, {depth} layers": ("transformer", depth) for depth in depths}
    nets["ResNet-18"] = ("resnet18", 0)
    print("operations for each perturbed pass")
    for name, method in METHODS.items():
        found[name] = {key: added(method, net, depth) for key, (net, depth) in nets.items()}
        print(f"{name:28}", found[name], flush=True)
    return found


def times(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    found = {}
    for net, bars in TIME_BARS.items():
        print(f"\n{net}, bars {bars}")
        steps: dict[str, measure.Step] = {"SGD": bench(net).plain_step}
        steps |= {name: bench(net).step_with(method) for name, method in METHODS.items()}
        found[net] = measure.show(measure.in_turns(steps, rounds), "ms")
    return found


def main() -> None:
    parser = measure.parser(__doc__, "one depth, two rounds, few methods")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--counts-only", action="store_true", help="load does not matter to them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    crowded = not arguments.counts_only and measure.busy()
    result: dict[str, Any] = {"bars": BARS, "time_bars": TIME_BARS}
    if arguments.quick:
        for name in [name for name in METHODS if name not in ("RWP", "SAM", "m-RWP, rise")]:
            del METHODS[name]
    result["counts"] = counts(DEPTHS[:1] if arguments.quick else DEPTHS)
    if not arguments.counts_only:
        result["times"] = times(2 if arguments.quick else arguments.rounds)
    measure.publish("launches", result, arguments.out, crowded)


if __name__ == "__main__":
    main()
