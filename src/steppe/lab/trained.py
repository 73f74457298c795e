"""A finished run's model, with the data and the task it was trained on."""

from __future__ import annotations

import torch
from torch import Tensor

from steppe.lab.config import Config
from steppe.lab.data import epoch_order, mix
from steppe.lab.errors import LabError, explained
from steppe.lab.naming import GIVEN
from steppe.lab.problems import Problem, Sources, load_problem
from steppe.lab.runs import Run


def load_trained(run: Run, sources: Sources | None = None) -> Problem:
    """Data, trained model and task of a finished run, the model in evaluation mode.

    `sources` brings back a model, data or task that came as Python objects.
    """
    if run.status == "unfinished":
        raise LabError(f"{run.name} is not finished: steppe train --resume {run.folder}")
    if run.status == "diverged":
        raise LabError(f"{run.name} diverged, so there is no trained model to look at.")
    config = run.config
    given = [name for name in (config.data, config.model, config.task or "") if GIVEN in name]
    if given and sources is None:
        raise LabError(
            f"{run.name} used Python objects ({', '.join(given)}), which no file can bring back: "
            "in Python, steppe.report.analyses.problem_of(run, sources=…) takes them."
        )
    with torch.random.fork_rng(devices=[]):
        whole = load_problem(config.replace(init=None), sources or Sources())
    with explained(f"the model of {run.name}"):
        whole.model.load_state_dict(torch.load(run.model_file, weights_only=True))
    whole.model.to(device()).eval()
    return whole


def training_batches(problem: Problem, config: Config, samples: int) -> list[Tensor]:
    """Inputs of the first batches that the run trained on, augmented, of about so many samples."""
    order = epoch_order(
        len(problem.data.train),
        config.batch,
        seed=config.seed,
        epoch=0,
        stream=0,
        drop_last=config.drop_last,
    )
    few = order[: -(-samples // config.batch)]
    seed = mix("training", config.seed, 0, 0)
    return [x for x, _ in problem.data.train.batches(few, augment_seed=seed)]


def device() -> torch.device:
    """Where stored models are looked at."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
