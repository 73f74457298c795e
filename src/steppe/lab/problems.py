"""What a run works on: its data, its model and its task, by name or given as objects."""

from __future__ import annotations

import functools
import hashlib
import inspect
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steppe.analysis.problem import digest
from steppe.batchnorm import tracked_norms
from steppe.lab import data as datasets
from steppe.lab import models, tasks
from steppe.lab.config import Config
from steppe.lab.data import Data
from steppe.lab.data.named import prepared
from steppe.lab.data.user import as_data
from steppe.lab.errors import LabError, explained
from steppe.lab.naming import GIVEN, names_function, user_function
from steppe.lab.pretrained import load_weights
from steppe.lab.ranks import world
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

    @functools.cached_property
    def made(self) -> str:
        """A digest of what the model function makes, which its source does not tell: one function
        makes other models after a variable of its has changed."""
        model = self.new_model()
        said = [repr(model), *(f"{name} {tuple(p.shape)}" for name, p in model.named_parameters())]
        said += [_settings(vars(module)) for module in model.modules()]
        return hashlib.sha256("\n".join(said).encode()).hexdigest()[:12]

    def new_model(self) -> nn.Module:
        """What the model function makes."""
        assert self.model is not None
        model: object = self.model()
        if not isinstance(model, nn.Module):
            raise LabError(
                f"the model function must return a torch.nn.Module, got {type(model).__name__}."
            )
        return model

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
    if sources.task is not None:
        used = [_used_by(f) for f in (sources.task.loss, sources.task.measure)]
        fingerprint += hashlib.sha256("".join(used).encode()).hexdigest()[:12]
    with world().together(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # as for the run
        if sources.model is not None:
            fingerprint += sources.made
        if sources.data is not None:
            fingerprint += _given_data(config, sources).digest
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
            data = _given_data(config, sources)
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


def _given_data(config: Config, sources: Sources) -> Data:
    """The data given as objects, or by a function of the seed."""
    seed = config.seed if config.data_seed is None else config.data_seed
    return as_data(sources.data if isinstance(sources.data, Data) else sources.data(seed))


def build_model(config: Config, data: Data, sources: Sources) -> nn.Module:
    """A newly initialised model for the data."""
    if sources.model is not None:
        return sources.new_model()
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
    shape = tuple(getattr(outputs, "shape", ()))
    if task.name == "classification":
        if data.classes is None:
            raise LabError(
                f"{data.name} has no classes: {y.dtype} targets. Give whole numbers, y.long()."
            )
        if shape[1:2] != (data.classes,):
            gives = f"{shape[1]} outputs" if len(shape) > 1 else f"{type(outputs).__name__} {shape}"
            raise LabError(
                f"the model gives {gives}, but {data.name} has {data.classes} "
                f"classes. Build the model with {data.classes} outputs."
            )
        _check_classes(data)
    try:
        task.loss(outputs, y)
        task.measure(outputs, y)
    except (RuntimeError, ValueError, IndexError) as error:
        raise LabError(
            f"task {task.name} cannot take outputs of shape {shape} and targets of shape "
            f"{tuple(y.shape)} ({y.dtype}): {str(error).splitlines()[0]}"
        ) from error


def _check_classes(data: Data) -> None:
    """Raise for targets that count from elsewhere than 0; -100 is what torch's losses ignore."""
    for split in (data.train, data.test, data.validation):
        targets = None if split is None else split.targets
        if targets is not None and len(wrong := targets[(targets < 0) & (targets != -100)]):
            raise LabError(
                f"{data.name}: targets of a classification count from 0 to {data.classes} - 1, got "
                f"{int(wrong[0])}. For -1 and 1: (y + 1) // 2."
            )


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


def _used_by(function: Any) -> str:
    """The values that a function has from around it, or an object that is called holds."""
    if isinstance(function, functools.partial):
        return f"{function.args}" + _settings(function.keywords) + _used_by(function.func)
    if inspect.isfunction(function):
        around = inspect.getclosurevars(function)
        return _settings({**around.nonlocals, **around.globals})
    buffers = dict(function.named_buffers()) if isinstance(function, nn.Module) else {}
    return _settings({**getattr(function, "__dict__", {}), **buffers})


def _settings(values: Mapping[str, Any]) -> str:
    """Numbers, texts and tensors by value and functions by name, of these; others are left out."""
    said = []
    for name, value in sorted(values.items()):
        if isinstance(value, Tensor):
            said.append(f"{name} {digest([value])}")
        elif isinstance(value, int | float | str | tuple) or hasattr(value, "__qualname__"):
            said.append(f"{name} {getattr(value, '__qualname__', value)}")
    return "\n".join(said)


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
    """Inputs of the first batches that the run trained on, augmented, of about so many samples.

    None where the model has no stored statistics to recompute from them.
    """
    if not tracked_norms(problem.model):
        return []
    first = {"seed": config.seed, "epoch": 0, "stream": 0}
    n = len(problem.data.train)
    order = datasets.epoch_order(n, config.batch, **first, drop_last=config.drop_last)
    few = order[: -(-samples // config.batch)]
    seed = datasets.mix("training", *first.values())
    return [x for x, _ in problem.data.train.batches(few, augment_seed=seed)]


def device() -> torch.device:
    """Where stored models are looked at."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
