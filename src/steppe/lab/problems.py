"""What a run works on: its data, its model and its task, by name or given as objects."""

from __future__ import annotations

import hashlib
import inspect
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steppe.lab import data as datasets
from steppe.lab import models, tasks
from steppe.lab.config import Config
from steppe.lab.data import Data
from steppe.lab.data.named import prepared
from steppe.lab.data.user import as_data
from steppe.lab.errors import LabError, explained
from steppe.lab.naming import GIVEN, names_function, user_function
from steppe.lab.pretrained import load_weights
from steppe.lab.runs import Run
from steppe.lab.tasks import Task

ModelFn = Callable[[], nn.Module]


@dataclass(frozen=True)
class Sources:
    """Python objects in place of names: a function that makes the model, data sets, a task.

    `data` is a `Data` or a tuple `(train, test)` or `(train, test, validation)`, each a pair of
    tensors or arrays, a dataset or a DataLoader; or a function of the seed that gives one, for data
    that should differ between seeds.
    """

    model: ModelFn | None = None
    data: Any = None
    task: Task | None = None

    def __post_init__(self) -> None:
        if self.model is not None:
            self._check_model(self.model)
        if self.data is not None and not callable(self.data):
            with explained("data"):
                object.__setattr__(self, "data", as_data(self.data))

    @staticmethod
    def _check_model(model: object) -> None:
        """Raise unless this is a function that can be called without arguments."""
        if isinstance(model, nn.Module):
            kind = type(model).__name__
            raise LabError(
                f"model must be a function that makes a new model, got a {kind}: every run starts from "
                f"new weights. Pass the class or a function, for example lambda: {kind}(...)."
            )
        if not callable(model):
            raise LabError(
                f"model must be a name or a function that makes a model, got {type(model).__name__}."
            )
        try:
            parameters = inspect.signature(model).parameters.values()
        except (TypeError, ValueError):  # built in: nothing is known about it
            return
        needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (2, 4)]
        if needed:
            raise LabError(
                f"the model function takes {', '.join(needed)}, but is called without arguments. Fix "
                "them: functools.partial(function, …) or a lambda."
            )


@dataclass(frozen=True)
class Problem:
    """Data, a new model and a task."""

    data: Data
    model: nn.Module
    task: Task


def named(config: Config, sources: Sources) -> Config:
    """The config with names for the objects given, and a fingerprint of what no name pins down."""
    changes: dict[str, str] = {}
    code: list[object] = []
    if sources.model is not None:
        changes["model"] = GIVEN + getattr(sources.model, "__qualname__", "model")
        code.append(sources.model)
    if sources.data is not None:
        changes["data"] = GIVEN + (getattr(sources.data, "name", None) or "data")
    if sources.task is not None:
        changes["task"] = GIVEN + sources.task.name
        code.append(sources.task.loss)
    for name in (config.data, config.model, config.task):
        if name and names_function(name):
            with explained(name):
                code.append(user_function(name))
    fingerprint = source_fingerprint(*code) if code else ""
    if sources.data is None:
        changes["data"] = datasets.located(config.data)
        fingerprint += datasets.content_fingerprint(changes["data"])
    if isinstance(data := sources.data, Data):  # sizes and a few samples tell data sets apart
        digest = hashlib.sha256(
            repr((data.name, data.note, len(data.train), len(data.test))).encode()
        )
        for split in (data.train, data.test):
            few = torch.tensor([0, len(split) // 2, len(split) - 1])
            for x, y in split.batches([few], augment_seed=None):
                digest.update(x.numpy(force=True).tobytes() + y.numpy(force=True).tobytes())
        fingerprint += digest.hexdigest()[:12]
    if config.init is not None and Path(config.init).is_file():
        with Path(config.init).open("rb") as stream:
            fingerprint += hashlib.file_digest(stream, "sha256").hexdigest()[:12]
    return config.replace(**changes, code=fingerprint)


def load_problem(config: Config, sources: Sources) -> Problem:
    """Data, model and task of a run; the model is drawn from torch's global generator."""
    for kind in ("model", "data", "task"):
        name = getattr(config, kind) or ""
        if name.startswith(GIVEN) and getattr(sources, kind) is None:
            raise LabError(
                f"this run's {kind} came from Python code ({name}), which no file can bring back: "
                "give it in sources= (to train: steppe.lab.train; to look at the run: "
                "steppe.report.analyses.problem_of)."
            )
    data = load_data(config, sources)
    task = sources.task or tasks.get(config.task or data.task)
    model = build_model(config, data, sources)
    if config.init is not None:
        load_weights(model, Path(config.init), outputs=data.classes)
    _check_fit(model, data, task)
    return Problem(data, model, task)


def load_data(config: Config, sources: Sources) -> Data:
    """The data set of a run."""
    seed = config.seed if config.data_seed is None else config.data_seed
    with explained(f"data {config.data!r}"):
        if sources.data is not None:
            data = as_data(sources.data if isinstance(sources.data, Data) else sources.data(seed))
            validation = config.validation if data.validation is None else 0.0
            return prepared(data, config.train_size, config.label_noise, validation, seed=seed)
        options = dict(config.data_options)
        if datasets.is_table(config.data) and config.task in ("classification", "regression"):
            options.setdefault("task", config.task)
        return datasets.load(
            config.data,
            root=None if config.root is None else Path(config.root),
            seed=seed,
            train_size=config.train_size,
            label_noise=config.label_noise,
            augment=config.augment,
            validation=config.validation,
            **options,
        )


def build_model(config: Config, data: Data, sources: Sources) -> nn.Module:
    """A newly initialised model for the data."""
    if sources.model is not None:
        model: object = sources.model()
        if not isinstance(model, nn.Module):
            raise LabError(
                f"the model function must return a torch.nn.Module, got {type(model).__name__}."
            )
        return model
    with explained(f"model {config.model!r}"):
        return models.build(
            config.model,
            classes=data.classes if data.classes is not None else 1,
            shape=data.shape,
            width=config.width,
            **config.model_options,
        )


def _check_fit(model: nn.Module, data: Data, task: Task) -> None:
    """Raise now, in words, for a model that does not fit the data."""
    x, y = next(iter(data.test.batches([torch.arange(min(2, len(data.test)))], augment_seed=None)))
    training = model.training
    try:
        with torch.no_grad():
            outputs = model.eval()(x)
    except (RuntimeError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise LabError(
            f"the model cannot take a batch of shape {tuple(x.shape)}: {first}"
        ) from error
    finally:
        model.train(training)
    if task.name == "classification" and data.classes != outputs.shape[-1]:
        raise LabError(
            f"the model gives {outputs.shape[-1]} outputs, but {data.name} has {data.classes} "
            f"classes. Build the model with {data.classes} outputs."
        )
    task.measure(outputs, y)


def source_fingerprint(*objects: object) -> str:
    """A digest of the source files these functions and objects were written in.

    A run that used other code is another run. Code without a source (typed at a prompt) gets a
    digest that never comes again, so that such runs are not taken for each other.
    """
    digest = hashlib.sha256()
    for item in objects:
        known = inspect.isfunction(item) or inspect.isclass(item) or inspect.ismethod(item)
        target: Any = item if known else type(item)
        try:
            file = Path(inspect.getsourcefile(target) or "")
            text = file.read_text("utf-8") if file.is_file() else inspect.getsource(target)
        except (OSError, TypeError):
            text = uuid.uuid4().hex
        digest.update(text.encode())
    return digest.hexdigest()[:12]


def load_trained(run: Run, sources: Sources | None = None) -> Problem:
    """Data, trained model and task of a finished run, the model in evaluation mode.

    `sources` brings back a model, data or task that came as Python objects.
    """
    if run.status == "unfinished":
        raise LabError(f"{run.name} is not finished: steppe train --resume {run.folder}")
    if run.status == "diverged":
        raise LabError(f"{run.name} diverged, so there is no trained model to look at.")
    with torch.random.fork_rng(devices=[]):
        whole = load_problem(run.config.replace(init=None), sources or Sources())
    with explained(f"the model of {run.name}"):
        whole.model.load_state_dict(torch.load(run.model_file, weights_only=True))
    whole.model.to(device()).eval()
    return whole


def training_batches(problem: Problem, config: Config, samples: int) -> list[Tensor]:
    """Inputs of the first batches that the run trained on, augmented, of about so many samples."""
    first = {"seed": config.seed, "epoch": 0, "stream": 0}
    n = len(problem.data.train)
    order = datasets.epoch_order(n, config.batch, **first, drop_last=config.drop_last)
    few = order[: -(-samples // config.batch)]
    seed = datasets.mix("training", *first.values())
    return [x for x, _ in problem.data.train.batches(few, augment_seed=seed)]


def device() -> torch.device:
    """Where stored models are looked at."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
