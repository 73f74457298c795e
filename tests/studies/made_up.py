"""Evidence of a study that was never trained: results that a test can reckon with."""

import math

from steppe.lab.results import Result
from steppe.lab.specs import parse
from studies.evidence import Evidence, Line
from studies.findings import CHANGES
from studies.plan import make_plan

LEVELS = {"sgd": 80.0, "sam": 82.0, "rwp": 83.0, "arwp": 83.0, "m-rwp": 81.0, "m-arwp": 82.1}
ENVIRONMENT = {"processor": "abacus", "cores": 2, "python": "3", "torch": "2", "steppe": "0"}
ENVIRONMENT |= {"commit": "abc", "ranks": 1}


def accuracy(config):
    """The method's level, less for a doubled batch, best at one strength, with the seed's wiggle."""
    spec = parse(config.method)
    wiggle = 0.1 * math.sin(7.0 * config.seed + len(config.method))
    _, strength = spec.strength or ("", 0.0)
    off = abs(math.log(strength / 0.3)) if strength else 0.0
    level = (
        LEVELS[spec.name if strength else "sgd"]
        - (0.5 if config.batch > 32 else 0.0)
        + (config.steps or 0) / 1000
    )
    return level + wiggle + config.seed % 3 - (off if config.validation else 0.0)


def made_up_line(entry, minima=False):
    config = entry.config
    score = accuracy(config)
    metrics = {"accuracy": score, "nll": 100 / score, "loss": 1.0}
    train = {"accuracy": 99.0, "nll": 0.1, "loss": 0.1}
    spec = parse(config.method)
    passes = 2 if spec.name.startswith(("m-", "sam")) else 1
    result = Result(
        config=config,
        status="finished",
        metric="accuracy",
        higher_is_better=True,
        unit="points",
        metrics={
            "train": train,
            "test": metrics,
            **({"validation": metrics} if config.validation else {}),
            **({"test_recomputed": {**metrics, "accuracy": score + 1}}),
        },
        steps=config.steps or 1,
        seconds=1.0,
        cpu_seconds=1.0 * passes,
        flops=1000 * passes * config.batch,
        parameters=10,
        strength=spec.strength,
        perturbation={"displacement": 0.5 if "arwp" in spec.name else 0.6},
        environment=ENVIRONMENT,
    )
    found = {}
    if minima and entry.part == "defaults":
        found = {"samples": 512, "largest_eigenvalue": score, "adaptive_sharpness": 1 / score}
        found |= {"weight_norm": 3 * score / 80, "sharpness_rho": 0.5, "plain_average": score / 9}
    if entry.robust:
        lost = {change: (i + 1) * (90 - score) for i, change in enumerate(CHANGES)}
        found["robustness"] = {"none": score, **{name: score - d for name, d in lost.items()}}
    return Line(entry.label, result, found)


def fill(study, folder, minima=False, take=lambda entry: True):
    """Write the lines of all runs that `take` takes, trials before what follows from them."""
    evidence = Evidence(folder, study.name)
    folder.mkdir(exist_ok=True, parents=True)
    while missing := [e for e in make_plan(study, evidence).missing(evidence) if take(e)]:
        for entry in missing:
            evidence.append(made_up_line(entry, minima))
    return Evidence(folder, study.name)
