"""The Ray engine against the real library: the local engine's bits, whatever happens to workers."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from steppe import lab
from steppe.lab import Config, LabError, compare, sweep
from steppe.lab.data import wrap
from steppe.lab.ray_engine import Ray
from steppe.lab.runs import Store
from steppe.lab.stopping import StopSignal

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'steppe[ray]'")

pytestmark = pytest.mark.slow
TINY = Config(steps=30, batch=16, train_size=64, eval_every=3, eval_train=64, threads=1)
SILENT = {"progress": False}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """A cluster of two CPUs, as a user's program may have started one."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    context = ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 1024**2,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    yield context.address_info["address"]
    ray.shutdown()


def weights(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def timeless(records):
    return [{k: v for k, v in r.items() if "second" not in k} for r in records]


def assert_same_run(a, b):
    assert a.metrics == b.metrics
    assert a.status == b.status
    assert a.config == b.config
    assert timeless(lab.runs.Run(a.folder).metrics) == timeless(lab.runs.Run(b.folder).metrics)
    if a.status == "finished":
        assert same(weights(a.folder), weights(b.folder))


# ---------------------------------------------------------------------- the same results


def test_a_comparison_has_the_bits_of_the_local_engine(tmp_path, monkeypatch):
    methods = ["sgd", "m-arwp", "sgd:lr=1e30"]
    monkeypatch.chdir(tmp_path)
    here = compare(methods=methods, seeds=2, config=TINY, store="here", **SILENT)
    there = compare(methods=methods, seeds=2, config=TINY, store="there", engine="ray", **SILENT)
    for row, twin in zip(here.rows, there.rows, strict=True):
        for a, b in zip(row.results, twin.results, strict=True):
            assert_same_run(a, b)
            assert b.folder.parent == Path("there")
    assert [r.status for r in there.rows[2].results] == ["diverged", "diverged"]
    assert here.sentence() == there.sentence()
    assert ray.is_initialized(), "a cluster that somebody else started stays"


def test_threads_are_part_of_the_config_and_ask_for_as_many_cpus(tmp_path):
    config = Config(
        model="resnet18",
        width=0.125,
        data="digits",
        steps=2,
        batch=16,
        train_size=32,
        eval_train=32,
        eval_every=0,
        threads=2,
    )
    assert Ray().resources(config) == {"CPU": 2.0, "GPU": 0.0}
    assert Ray(cpus_per_trial=0.5).resources(config)["CPU"] == 0.5
    here = sweep(config, {"lr": [0.1, 0.2]}, store=tmp_path / "here", **SILENT)
    there = sweep(config, {"lr": [0.1, 0.2]}, store=tmp_path / "there", engine="ray", **SILENT)
    for point, twin in zip(here.points, there.points, strict=True):
        assert_same_run(point.results[0], twin.results[0])
        assert twin.results[0].environment["threads"] == 2
    assert Ray(cpus_per_trial=2).threads == 2, "threads not given: as many as CPUs"


def waves():
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(96, 4, generator=draws)
    y = x[:, 0] - x[:, 1] + 0.1 * torch.randn(96, generator=draws)
    return wrap((x[:64], y[:64]), (x[64:], y[64:]), name="waves")


def test_functions_typed_at_a_prompt_travel(tmp_path):
    model = lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))  # noqa: E731
    config = TINY.replace(train_size=None)
    parts = (model, waves(), ["sgd", "rwp"])
    here = compare(*parts, seeds=1, config=config, store=tmp_path / "a", **SILENT)
    there = compare(*parts, seeds=1, config=config, store=tmp_path / "b", engine="ray", **SILENT)
    for row, twin in zip(here.rows, there.rows, strict=True):
        assert_same_run(row.results[0], twin.results[0])


def test_progress_and_warnings_reach_the_driver(tmp_path, caplog):
    def model():
        logging.getLogger("steppe").warning("mind the gap")
        return nn.Linear(4, 1)

    config = TINY.replace(train_size=None)
    with caplog.at_level(logging.INFO, "steppe"):
        compare(model, waves(), ["sgd", "rwp"], seeds=1, config=config, store=None, engine="ray")
    said = caplog.text
    assert "[2/2]" in said
    assert "rwp seed 0: finished  loss" in said
    assert "sgd seed 0: mind the gap" in said


# ---------------------------------------------------------------------- workers that die


def counting(log, dies_at=()):
    """A model function whose models note every training batch, and kill their process at some."""

    class Counted(nn.Sequential):
        def forward(self, x):
            if self.training and len(x) == 16 and type(x) is torch.Tensor:
                with log.open("a") as stream:
                    stream.write(f"{os.getpid()}\n")
                if len(log.read_text().splitlines()) in dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(x)

    return lambda: Counted(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


def test_a_killed_worker_s_run_goes_on_from_its_checkpoint(tmp_path, caplog):
    """Checkpoints after every step: of all steps only the one it died in is taken twice."""
    config = TINY.replace(train_size=None, batch=16, checkpoint_minutes=0)
    killed, whole = tmp_path / "killed.log", tmp_path / "whole.log"
    probe = count_of_a_run(config, whole, tmp_path / "whole")
    with caplog.at_level(logging.WARNING, "steppe"):
        found = compare(
            counting(killed, dies_at=(probe.before + 12, probe.before * 2 + 25)),
            waves(),
            ["arwp"],
            seeds=1,
            config=config,
            store=tmp_path / "runs",
            engine="ray",
            **SILENT,
        )
    (result,) = found.rows[0].results
    processes = [int(line) for line in killed.read_text().splitlines()]
    attempts = [processes.count(pid) - probe.before for pid in dict.fromkeys(processes)]
    assert len(attempts) == 3, "killed twice"
    assert sum(attempts) == config.steps + 2, "no step was trained again but the two it died in"
    assert attempts == [12, 13, config.steps + 2 - 25]
    assert caplog.text.count("the worker of arwp seed 0 died") == 2
    assert same(weights(result.folder), weights(probe.folder))
    records = [timeless(lab.runs.Run(f).metrics) for f in (result.folder, probe.folder)]
    assert records[0] == records[1]


class Probe:
    """A run of the local engine that nothing happens to."""

    def __init__(self, folder, before):
        self.folder, self.before = folder, before


def count_of_a_run(config, log, store):
    """Its folder, and how many batches a run sees before its first step (FLOPs are counted)."""
    model = counting(log)
    found = compare(model, waves(), ["arwp"], seeds=1, config=config, store=store, **SILENT)
    before = len(log.read_text().splitlines()) - config.steps
    return Probe(found.rows[0].results[0].folder, before)


def test_a_worker_that_dies_again_and_again_is_given_up(tmp_path):
    log = tmp_path / "log"
    engine = Ray(retries=1)
    config = TINY.replace(train_size=None)
    with pytest.raises(LabError, match=r"the worker of sgd seed 0 died 2 times.*same command"):
        compare(
            counting(log, dies_at=range(1, 99)),
            waves(),
            ["sgd"],
            seeds=1,
            config=config,
            store=tmp_path / "runs",
            engine=engine,
            **SILENT,
        )
    assert len(set(log.read_text().splitlines())) == 2


@pytest.mark.parametrize("engine", ["local", "ray"])
@pytest.mark.parametrize("kind", [LabError, ZeroDivisionError])
def test_an_error_of_the_run_itself_is_raised_once_as_here(engine, kind, tmp_path):
    log = tmp_path / "log"

    def broken():
        with log.open("a") as stream:
            stream.write("tried\n")
        raise kind("the model is broken.")

    config = TINY.replace(train_size=None)
    with pytest.raises(kind, match="the model is broken.") as raised:
        compare(broken, waves(), ["sgd"], seeds=1, config=config, store=None, engine=engine)
    assert type(raised.value) is kind
    assert log.read_text() == "tried\n"


def test_a_run_that_a_dead_worker_s_children_still_hold_is_waited_for(tmp_path):
    """A killed worker's data-loading processes keep the lock for some seconds."""
    from steppe.lab.engines import Job
    from steppe.lab.ray_worker import Trial, _patiently
    from steppe.lab.runs import BusyError, locked
    from steppe.lab.training import settled

    config = settled(TINY.replace(steps=1), lab.Sources())
    trial = Trial(0, Job("sgd", config), tmp_path, tmp_path, (), attempt=0)
    run = Store(tmp_path).place(config)
    (run.folder / "config.json").parent.mkdir(parents=True)
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); time.sleep(1.5)"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(run.folder / ".lock")], stdout=subprocess.PIPE
    )
    holder.stdout.readline()
    with pytest.raises(BusyError, match="another process is working on the run"):
        _patiently(trial, lab.Sources(), lambda event: None)
    second = Trial(0, Job("sgd", config), tmp_path, tmp_path, (), attempt=1)
    assert _patiently(second, lab.Sources(), lambda event: None).status == "finished"
    holder.wait()
    with locked(run):
        pass


# ---------------------------------------------------------------------- the command


def ray_processes(session):
    """Processes of Ray's that belong to a session."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,sid=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    return [row for row in rows if int(row[1]) == session and "ray" in row[2]]


def left_running(session):
    """Those that stay. Ray's agents end when they notice that their node has gone, which takes them
    a second, or a minute on a busy machine; nothing waits for them."""
    deadline = time.monotonic() + 300
    while (found := ray_processes(session)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def steppe(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "steppe", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def test_ctrl_c_saves_leaves_nothing_running_and_any_engine_goes_on(tmp_path):
    store = tmp_path / "runs"
    asked = ["compare", "sgd", "rwp", "--seeds", "1", "--data", "digits", "--set", "train_size=64"]
    asked += ["--steps", "400", "--batch", "16", "--eval-every", "0", "--threads", "1"]
    slowly = ["--checkpoint-minutes", "0"]  # a file a step
    process = steppe(*asked, *slowly, "--engine", "ray", "--store", str(store))
    deadline = time.monotonic() + 600
    while len(list(store.glob("*/environment.json"))) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert ray_processes(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to everything in front
    said, complained = process.communicate(timeout=600)
    assert process.returncode == 130, complained
    assert said == ""
    assert "runs finished, the others are saved. The same command resumes them." in complained
    assert "Traceback" not in complained
    assert not left_running(process.pid)
    runs = Store(store).runs()
    assert any(run.status == "unfinished" and run.progress() > 0 for run in runs)
    methods = [run.config.method for run in runs]
    config = runs[0].config.replace(method="sgd", checkpoint_minutes=5)
    resumed = compare(methods=methods, seeds=1, config=config, store=store, **SILENT)
    whole = compare(methods=methods, seeds=1, config=config, store=tmp_path / "whole", **SILENT)
    for row, twin in zip(resumed.rows, whole.rows, strict=True):
        assert_same_run(row.results[0], twin.results[0])


def test_a_sweep_on_a_running_cluster_by_address(cluster, tmp_path):
    command = ["sweep", "digits", "--over", "lr=.05,.1", "--steps", "3", "--engine", "ray"]
    process = steppe(*command, "--address", cluster, "--store", "runs", cwd=tmp_path)
    said, complained = process.communicate(timeout=600)
    assert process.returncode == 0, complained
    assert "test accuracy" in said.splitlines()[2]
    assert "finished" in complained
    assert len(Store(tmp_path / "runs").runs()) == 2, "relative to where the command was given"
    assert ray.cluster_resources()["CPU"] == 2, "the cluster is still there"


# ---------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("engine", "changes", "told"),
    [
        (Ray(), {"threads": 64}, "a run asks for 64 CPUs, more than any node"),
        (Ray(gpus_per_trial=1), {}, "a run asks for 1 CPU and 1 GPU, more than any node"),
        (Ray(), {"device": "cuda:1"}, "Ray hands out the GPUs: use device cuda, not cuda:1"),
        (Ray(gpus_per_trial=1), {"device": "cpu"}, "but the device is cpu"),
        (Ray(gpus_per_trial=0), {"device": "cuda"}, "needs a share of a GPU"),
    ],
)
def test_what_the_cluster_cannot_give_is_told_at_once(engine, changes, told, tmp_path):
    config = TINY.replace(**changes)
    with pytest.raises(LabError, match=told):
        compare(methods=["sgd"], seeds=1, config=config, store=tmp_path, engine=engine, **SILENT)
    assert not list(tmp_path.glob("*"))


def test_a_gpu_share_settles_the_device_without_asking_this_machine():
    assert Ray(gpus_per_trial=0.5).device(Config()) == "cuda"
    assert Ray().device(Config(device="cuda")) == "cuda"
    assert Ray().resources(Config(device="cuda", threads=3)) == {"CPU": 3.0, "GPU": 1.0}
    assert Ray().device(Config()) == ("cuda" if torch.cuda.is_available() else "cpu")


def test_an_address_where_nothing_is(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    with socket.socket() as unheard:  # bound, but nobody listens
        unheard.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unheard.getsockname()[1]}"
        told = rf"no Ray cluster at {address}: .*refused. Start one with `ray start --head`"
        with pytest.raises(LabError, match=told), Ray(address).open():
            pass
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_stays_ours(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    taken = []

    def init(**options):
        taken.append(signal.signal(signal.SIGTERM, lambda *_: None))  # as the real one does

    monkeypatch.setattr(ray, "init", init)
    before = signal.getsignal(signal.SIGTERM)
    with Ray().open():
        assert taken
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("late", [1, 3])
def test_a_cluster_that_starts_too_slowly_is_started_again(late, monkeypatch):
    attempts = []

    def init(**options):
        attempts.append(options)
        if len(attempts) <= late:
            raise Exception("The current node timed out during startup. This could …")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", init)
    if late < 3:
        with Ray().open():
            assert len(attempts) == late + 1
        return
    with pytest.raises(LabError, match="too busy. Train without it, --engine local"), Ray().open():
        pass
    assert len(attempts) == 3


def test_an_error_of_ray_s_own_start_is_raised_as_it_is(monkeypatch):
    def init(**options):
        raise ValueError("no room")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ValueError, match="no room"), Ray().open():
        pass


def test_ctrl_c_while_the_cluster_starts(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    closed = []
    monkeypatch.setattr(ray, "shutdown", lambda: closed.append(True))
    monkeypatch.setattr(ray, "init", lambda **options: signal.raise_signal(signal.SIGINT))
    with StopSignal() as stop, contextlib.ExitStack() as stack:
        stack.enter_context(Ray().open())
        assert stop.asked, "it is heard by the one who waits for it"
    assert closed == [True]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored here
    try:
        with pytest.raises(KeyboardInterrupt), Ray().open():
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert closed == [True, True]
