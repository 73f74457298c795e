"""How the cost of perturbing grows: with the number of weights, of tensors, and with the batch.

    python benchmarks/scaling.py [--rounds 15] [--threads 2] [--quick] [--out FILE]

Weights: what RWP and ARWP add to a step (moving the weights, putting them back, learning from gradients)
on square linear layers of 10^4 to 10^8 weights in all, next to an SGD step (`optimizer.step`) on them.
Tensors: the same on a million weights that are cut into 4 to 1,024 layers.
Embedding: what RWP adds on a net of MiniLM's sizes, with and without its token embedding, which is half of
its weights; and what drawing that embedding's noise takes alone, for noise belongs to blocks of places and
is drawn for all rows whether the batch has their tokens or not.
Batch: whole steps of a network of a million weights with SGD and ARWP in turns; what is added is the
median of the differences of neighbours.
"""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import measure
import torch
from torch import nn

import steppe
from steppe.flat import by_block
from steppe.noise import Draw

COUNTS = [10**4, 10**5, 10**6, 10**7, 10**8]
TENSORS = [4, 16, 64, 256, 1024]
BATCHES = [8, 32, 128, 512]
METHODS = {"RWP": steppe.rwp(0.001), "ARWP": steppe.arwp(0.001)}


def layers_of(count: int, tensors: int = 4) -> nn.Sequential:
    """Square layers with about `count` weights in all."""
    width = round((count / tensors) ** 0.5)
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(tensors)])


def with_gradients(count: int, tensors: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = layers_of(count, tensors)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-3)
    return model, torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)


def sgd_step(count: int, tensors: int) -> Callable[[], object]:
    _, optimizer = with_gradients(count, tensors)
    return lambda: optimizer.step()


def added(count: int, tensors: int, name: str) -> Callable[[], object]:
    model, optimizer = with_gradients(count, tensors)
    return measure.added_by(steppe.attach(model, optimizer, METHODS[name]))


def over_sizes(sizes: list[tuple[int, int]], rounds: int) -> list[dict[str, dict[str, float]]]:
    """What is added for each number of weights and of tensors."""
    found = []
    for size in sizes:
        steps = {"SGD's own step": sgd_step(*size)} | {n: added(*size, n) for n in METHODS}
        turns = rounds if size[0] >= 10**7 else 5 * rounds
        print(f"{size[0]:,} weights in {size[1]:,} tensors")
        found.append(measure.show(measure.in_turns(steps, turns), "ms"))
    return found


class Encoder(nn.Module):
    """MiniLM's sizes: 30,522 tokens, width 384, 6 layers."""

    def __init__(self, tokens: int = 30522, width: int = 384, layers: int = 6) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(tokens, width)
        self.layers = nn.TransformerEncoder(layer, layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(self.embedding(tokens)).mean(1)
        return output


def embedding(rounds: int, **sizes: int) -> dict[str, object]:
    tokens = torch.randint(0, sizes.get("tokens", 30522), (16, 32))

    def adds(**options: tuple[str, ...]) -> Callable[[], object]:
        model = Encoder(**sizes)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        model(tokens).square().mean().backward()
        return measure.added_by(steppe.attach(model, optimizer, METHODS["RWP"], **options))

    plain = Encoder(**sizes)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-6)
    alone = steppe.attach(
        net := nn.Embedding(sizes.get("tokens", 30522), sizes.get("width", 384)),
        torch.optim.SGD(net.parameters(), lr=1e-6),
        METHODS["RWP"],
    )
    memory = alone._training.weights
    memory.save()
    memory.restore()

    def step() -> None:
        plain(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def draw() -> None:
        seeds = Draw(0, 0).block_seeds(memory._flat.blocks)
        by_block(
            memory._flat.flats,
            lambda flat, block: block.draw_(flat.scratch(block).flat, seeds(block.number)),
        )

    steps: dict[str, Callable[[], object]] = {
        "SGD, whole step": step,
        "RWP adds": adds(),
        "RWP adds, embedding left out": adds(exclude=("embedding*",)),
        "drawing the embedding's noise": draw,
    }
    found = measure.show(measure.in_turns(steps, rounds), "ms")
    return {**found, "rows in the batch": len(tokens.unique())}


def over_batches(batches: list[int], rounds: int) -> dict[str, object]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for batch in batches:
        x = torch.randn(batch, 500)

        def stepper(method: steppe.Method, x: torch.Tensor = x) -> Callable[[], None]:
            model = layers_of(10**6)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
            steppe.attach(model, optimizer, method)

            def step() -> None:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

            return step

        steps = {"SGD": stepper(steppe.sgd()), "ARWP": stepper(steppe.arwp(0.001))}
        times = measure.in_turns(steps, 5 * rounds)
        extra = [b - a for a, b in zip(times["SGD"], times["ARWP"], strict=True)]
        print(f"batch {batch}")
        found[str(batch)] = measure.show({"SGD": times["SGD"], "added": extra}, "ms")
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
    counts, tensors, batches = COUNTS[:few], TENSORS[:few], BATCHES[:few]
    weights = over_sizes([(count, 4) for count in counts], rounds)
    pieces = over_sizes([(10**6, number) for number in tensors], rounds)
    result = {
        "threads": arguments.threads,
        "weights": dict(zip(map(str, counts), weights, strict=True)),
        "tensors": dict(zip(map(str, tensors), pieces, strict=True)),
        "embedding": embedding(rounds, **({"tokens": 99, "layers": 1} if arguments.quick else {})),
        "batches": over_batches(batches, rounds),
    }
    measure.publish("scaling", result, arguments.out, crowded)


if __name__ == "__main__":
    main()
