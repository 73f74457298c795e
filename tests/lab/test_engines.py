"""Engines: how many runs at once, on how many threads each, and what is told of a wrong choice."""

import pytest
import torch

from steppe.lab import Config, LabError, compare, engines, sweep
from steppe.lab.command_line import parse
from steppe.lab.engines import Local, Processes, chosen
from steppe.lab.problems import Sources
from steppe.lab.ray_engine import Ray

TINY = Config(steps=2, batch=16, train_size=32, eval_train=16, eval_every=0)


@pytest.fixture
def eight_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)


@pytest.mark.parametrize(("processes", "threads"), [(1, 8), (2, 4), (3, 2), (16, 1)])
def test_jobs_divide_the_threads(eight_threads, processes, threads):
    assert chosen("local", processes) == Local(processes, threads)


def test_without_jobs_a_run_has_one_thread(eight_threads):
    assert chosen("local", None) == Local(1, 1)


def trained_on(monkeypatch, call):
    """The threads in the configs that are trained."""
    seen = []
    monkeypatch.setattr(engines, "run_config", lambda config, *_: seen.append(config.threads))
    with pytest.raises(AttributeError):  # the results are nothing
        call()
    return set(seen)


@pytest.mark.parametrize(
    ("given", "asked", "threads"),
    [(None, None, 1), (None, 1, 8), (2, 1, 2), (2, None, 2)],
)
def test_threads_of_the_config_stand(monkeypatch, eight_threads, given, asked, threads):
    config = TINY.replace(threads=given)
    options = {"store": None, "jobs": asked, "progress": False}
    found = trained_on(monkeypatch, lambda: compare(methods=["sgd"], config=config, **options))
    assert found == {threads}
    found = trained_on(monkeypatch, lambda: sweep(config, {"lr": [0.1]}, **options).table())
    assert found == {threads}


def engine_of(*options):
    command = parse("compare", ["sgd", *options])
    arguments = command.running.arguments(command.settings)
    return chosen(arguments["engine"], arguments["jobs"])


def test_the_commands_options(monkeypatch, eight_threads):
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert engine_of() == Local(6, 1), "by default as many runs as cores, of one thread"
    assert engine_of("--threads", "4") == Local(1, 1)
    assert engine_of("--jobs", "2") == Local(2, 4)
    assert engine_of("--engine", "ray") == Ray()
    found = engine_of("--engine", "ray", "--address", "auto", "--cpus-per-trial", "2")
    assert found == Ray("auto", cpus_per_trial=2)
    assert engine_of("--engine", "ray", "--gpus-per-trial", "0.5") == Ray(gpus_per_trial=0.5)


def test_options_of_another_engine_are_not_dropped():
    with pytest.raises(LabError, match="--address is for Ray: add --engine ray"):
        engine_of("--address", "auto")
    with pytest.raises(LabError, match="jobs is for the local engine"):
        engine_of("--engine", "ray", "--jobs", "2")


def test_mistakes():
    with pytest.raises(LabError, match="Did you mean local"):
        compare(methods=["sgd"], config=TINY, store=None, engine="locl")
    with pytest.raises(LabError, match="jobs must be at least 1, got 0"):
        compare(methods=["sgd"], config=TINY, store=None, jobs=0)
    with pytest.raises(LabError, match="cpus_per_trial must be at least 0, got -1"):
        Ray(cpus_per_trial=-1)
    with pytest.raises(LabError, match="gpus_per_trial must be a part of one or whole, got 1.5"):
        Ray(gpus_per_trial=1.5)


def test_there_are_no_more_processes_than_runs():
    assert Local(1).workers(9, Sources(), None) is None
    assert Local(8).workers(1, Sources(), None) is None
    with Local(8).workers(2, Sources(), None) as workers:
        assert isinstance(workers, Processes)
        assert workers._pool._max_workers == 2
