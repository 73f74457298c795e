"""What strength is safe without tuning? The methods at a grid of ratios, on nets with attention.

A small ViT on noisy digits and a tiny causal language model, once on so little text that it overfits
("lm") and once on more than it reads ("lm-much"). Each run is compared with plain AdamW from the
same initial weights on the same batches: one a step, or two for m-methods, so that what is seen is
the noise and not the larger batch. The control is an MLP at the general default, against SGD. Safe:
the gain less two standard errors is above -0.5 points or -0.01 nats. Conclusions: docs/decisions.md.

    python benchmarks/default_strength.py [--quick] [--seeds 5] [--jobs 2] [--json runs.json]

Runs are added to the JSON as they end; the same command takes up where it was stopped.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import steppe
from steppe.defaults import MIXED_RATIOS, RATIOS

NEAR, FAR = (0.05, 0.1, 0.2), (0.02, 0.3, 0.4, 0.6, 0.9)  # candidates; the wider picture
FEW = 2  # seeds for the wider picture, which only rwp and m_rwp draw
METHODS = {"rwp": steppe.rwp, "arwp": steppe.arwp, "m_rwp": steppe.m_rwp, "m_arwp": steppe.m_arwp}
LITTLE_TEXT, MUCH_TEXT, HELD_OUT = 2_000, 400_000, 20_000  # characters
IMAGES, CONTEXT, DIM = 400, 32, 64


class Block(nn.Module):
    """A pre-norm transformer block: attention, then an MLP, each added to its input."""

    def __init__(self, causal: bool, heads: int = 4) -> None:
        super().__init__()
        self.causal, self.heads = causal, heads
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, DIM))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """An 8x8 image as 16 patches of 2x2, learned positions, the mean over patches classified."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, DIM, 2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, DIM))
        self.blocks = nn.Sequential(*(Block(causal=False) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 10))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x.view(-1, 1, 8, 8)).flatten(2).transpose(1, 2)
        return self.head(self.blocks(tokens + self.positions).mean(1))


class LanguageModel(nn.Module):
    """Predicts each next character; the output layer is the embedding."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, DIM)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, DIM))
        self.blocks = nn.Sequential(*(Block(causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self.embedding(x) + self.positions)) @ self.embedding.weight.T


@dataclass(frozen=True)
class Problem:
    """What to train, the loss on samples by their number, and a score where more is better."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    samples: int
    batch: int
    loss_of: Callable[[Tensor], Tensor]
    score: Callable[[], float]


def digits(kind: str, seed: int) -> Problem:
    """400 training images with 20 % of the labels replaced at random; the other 1,397 are test."""
    images, labels = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    x = torch.tensor(images, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels)[order]
    noisy = y[:IMAGES].clone()
    wrong = torch.rand(IMAGES, generator=generator) < 0.2
    noisy[wrong] = torch.randint(0, 10, (IMAGES,), generator=generator)[wrong]
    if kind == "vit":
        model = ViT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    else:
        hidden = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()
        model = nn.Sequential(*hidden, nn.Linear(128, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)

    def score() -> float:
        return 100 * (model(x[IMAGES:]).argmax(1) == y[IMAGES:]).float().mean().item()

    def loss_of(i: Tensor) -> Tensor:
        return F.cross_entropy(model(x[i]), noisy[i])

    return Problem(model, optimizer, IMAGES, 32, loss_of, score)


@functools.cache
def text() -> Tensor:
    """The language reference that every Python carries for `help()`: printable ASCII as 1 to 95."""
    whole = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor([ord(c) - 31 if " " <= c <= "~" else 0 for c in whole])


def language(kind: str, _seed: int) -> Problem:
    """A stretch of the text to train on, and the 20,000 characters that follow it to test."""
    size = LITTLE_TEXT if kind == "lm" else MUCH_TEXT
    held_out = text()[size : size + HELD_OUT].unfold(0, CONTEXT + 1, CONTEXT)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05, fused=True)

    def nll(x: Tensor) -> Tensor:
        return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    def loss_of(start: Tensor) -> Tensor:
        return nll(text()[start[:, None] + torch.arange(CONTEXT + 1)])

    return Problem(model, optimizer, size - CONTEXT, 16, loss_of, lambda: -nll(held_out).item())


@dataclass(frozen=True)
class Run:
    """One training. `method` and `schedule` are names so that a run can be written down."""

    task: str
    method: str
    ratio: float
    schedule: str
    seed: int
    steps: int

    def build(self) -> steppe.Method:
        if self.method.startswith("plain"):
            return steppe.sgd() if self.method == "plain" else steppe.m_rwp(ratio=0.0)
        rising = steppe.cosine_increase(0, self.ratio, self.steps)
        return METHODS[self.method](ratio=rising if self.schedule == "cosine" else self.ratio)


def train(run: Run) -> tuple[Run, float]:
    """The run and the score of its final model."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    problem = (language if run.task.startswith("lm") else digits)(run.task, run.seed)
    method = run.build()
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(problem.optimizer, run.steps)
    perturber = steppe.attach(problem.model, problem.optimizer, method, seed=run.seed)
    generator = torch.Generator().manual_seed(run.seed)
    for _ in range(run.steps):
        # Two batches for everybody, so that all methods see the same first one at each step.
        pair = torch.randint(problem.samples, (2, problem.batch), generator=generator)
        perturber.backward(problem.loss_of, *pair[: method.batches_needed])
        problem.optimizer.step()
        problem.optimizer.zero_grad()
        decay.step()
    with torch.no_grad():
        return run, problem.score()


def all_runs(seeds: int, quick: bool) -> Iterator[Run]:
    """Seed by seed, so that a benchmark stopped early has whole rows of fewer seeds."""
    lengths = {"vit": 500, "lm": 300, "lm-much": 300, "mlp": 600}
    for seed, task in itertools.product(range(seeds), lengths):
        plain = Run(task, "plain", 0.0, "", seed, 3 if quick else lengths[task])
        yield from (plain, replace(plain, method="plain, two"))
        for method in METHODS:
            wide = method in ("rwp", "m_rwp") and seed < FEW
            ratios = NEAR[:1] if quick else NEAR + FAR * wide
            if task == "mlp":
                ratios = (MIXED_RATIOS.shallow if method.startswith("m_") else RATIOS.shallow,)
            both = method == "rwp" and wide and task != "mlp"
            for schedule, ratio in itertools.product(("flat", "cosine")[: 1 + both], ratios):
                yield replace(plain, method=method, ratio=ratio, schedule=schedule)


def table(scores: dict[Run, float]) -> None:
    """Every row with n, the gain over plain training with the same seed, and its standard error."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for run, score in scores.items():
        plain = "plain, two" if run.method.startswith("m_") else "plain"
        gain = score - scores[replace(run, method=plain, ratio=0.0, schedule="")]
        row = f"{run.task:9}{run.method:12}{run.schedule:10}{run.ratio:5.2f}"
        rows.setdefault(row, []).append((score, gain))
    print(f"{'task':9}{'method':12}{'schedule':10}ratio  n  score, mean ± std      gain ± stderr")
    for row, found in rows.items():
        columns = list(zip(*found, strict=True))
        score, gain = map(statistics.mean, columns)
        spread, error = map(statistics.stdev, columns) if len(found) > 1 else (math.nan, math.nan)
        error /= math.sqrt(len(found))
        safe = gain - 2 * error > (-0.01 if row.startswith("lm") else -0.5)
        verdict = "" if "plain" in row or len(found) == 1 else "  safe" if safe else "  unsafe"
        print(f"{row}{len(found):3}{score:10.3f} ± {spread:6.3f}", end="")
        print(f"{gain:+10.3f} ± {error:6.3f}{verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three steps at one ratio, for CI")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds (default 5)")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread (default 2)")
    parser.add_argument("--json", type=Path, help="where to keep the runs, and find those done")
    args = parser.parse_args()
    kept = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    done = {Run(**entry["run"]): entry["score"] for entry in kept}
    wanted = list(all_runs(args.seeds, args.quick))
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for run, score in pool.imap(train, [run for run in wanted if run not in done]):
            done[run] = score
            kept.append({"run": asdict(run), "score": score})
            if args.json:
                args.json.write_text(json.dumps(kept))
    print(f"torch {torch.__version__}; score: accuracy in %, or minus the nats per character")
    table({run: done[run] for run in wanted})


if __name__ == "__main__":
    main()
