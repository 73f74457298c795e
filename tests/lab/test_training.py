import functools
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.nets import Dropping
from torch import nn

from steppe.lab import Config, DivergedError, Interrupted, LabError, Sources, Task, train
from steppe.lab import course as course_module
from steppe.lab.data import wrap
from steppe.lab.runs import Store, locked
from steppe.lab.specs import METHODS
from steppe.lab.training import run_config, settled

TINY = Config(steps=12, batch=64, train_size=200, threads=1, eval_every=1)


def weights(run):
    return torch.load(run / "model.pt", weights_only=True)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def stop_after(monkeypatch, step):
    """Ctrl-C after a step, without a process."""

    class Signal(course_module.StopSignal):
        asked = property(lambda self: stop_after.trainer.step >= step)

    real = course_module.Trainer

    def remember(*args):
        stop_after.trainer = real(*args)
        return stop_after.trainer

    monkeypatch.setattr(course_module, "Trainer", remember)
    monkeypatch.setattr(course_module, "StopSignal", Signal)


def without_time(records):
    return [{k: v for k, v in record.items() if k != "seconds"} for record in records]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("stop", [4, 7])  # the end of an epoch, mid-epoch
def test_stopped_and_resumed_equals_uninterrupted(name, stop, tmp_path, monkeypatch):
    method = "lpf-sgd:sigma=.02" if name == "lpf-sgd" else name
    config = TINY.replace(method=method, steps=9, batch=50)
    sources = Sources(model=Dropping)
    whole = train(config, sources=sources, store=tmp_path / "whole", progress=False)
    with monkeypatch.context() as patch:
        stop_after(patch, stop)
        with pytest.raises(Interrupted) as error:
            train(config, sources=sources, store=tmp_path / "parts", progress=False)
    assert error.value.step == stop
    resumed = train(config, sources=sources, store=tmp_path / "parts", progress=False)
    assert same(weights(whole.folder), weights(resumed.folder))
    assert resumed.metrics == whole.metrics
    records = [
        without_time(Store(r.folder.parent).get(r.folder.name).metrics) for r in (whole, resumed)
    ]
    assert records[0] == records[1]
    assert [record["step"] for record in records[0]] == [4, 8, 9]
    assert not (resumed.folder / "checkpoints").exists()


@pytest.mark.slow
def test_kill_at_any_moment_loses_nothing_but_steps(tmp_path):
    options = ["digits", "--method", "m-arwp", "--steps", "400", "--checkpoint-minutes", "0"]
    command = [
        sys.executable,
        "-m",
        "steppe",
        "train",
        *options,
        "--store",
        str(tmp_path / "killed"),
    ]
    for target in (1, 190):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        reached = -1
        while reached < target and process.poll() is None:
            files = list((tmp_path / "killed").glob("*/checkpoints/step-*.pt"))
            reached = max((int(f.stem[5:]) for f in files), default=-1)
            time.sleep(0.001)
        process.kill()
        assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"
    done = subprocess.run([*command, "-q"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    from steppe.lab.recipes import recipe

    config = recipe("digits", "m-arwp").replace(steps=400)
    whole = train(config, store=tmp_path / "whole", progress=False)
    (killed,) = (tmp_path / "killed").iterdir()
    assert killed.name == whole.folder.name
    assert same(weights(killed), weights(whole.folder))
    found = [without_time(Store(f.parent).get(f.name).metrics) for f in (killed, whole.folder)]
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    command = [sys.executable, "-m", "steppe", "train", "digits", "--steps", "100000"]
    process = subprocess.Popen(
        [*command, "--store", str(tmp_path)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    while not list(tmp_path.glob("*/metrics.jsonl")):
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 130
    (folder,) = tmp_path.iterdir()
    assert f"steppe train --resume {folder}" in said
    assert "Traceback" not in said
    step = Store(tmp_path).get(folder.name).progress()
    assert f"Stopped after step {step} of 100000" in said
    assert step > 0


def test_pairs_begin_alike_and_see_the_same_batches(monkeypatch):
    seen = {}

    class Spy(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.start = self.weight.detach().clone()
            seen[spy] = [self.start]

        def forward(self, x):
            if self.training:
                seen[spy].append(x.clone())
            return super().forward(x)

    data = wrap(
        (torch.randn(40, 4), torch.randint(3, (40,))), (torch.randn(9, 4), torch.randint(3, (9,)))
    )
    config = Config(steps=6, batch=10, threads=1)
    monkeypatch.setattr(course_module, "step_flops", lambda *_, **__: 1)
    for spy in ("sgd", "m-rwp", "sam"):
        train(config.replace(method=spy), sources=Sources(Spy, data), store=None, progress=False)
    assert torch.equal(seen["sgd"][0], seen["m-rwp"][0])
    assert len(seen["sgd"]) == 1 + 6
    assert len(seen["m-rwp"]) == len(seen["sam"]) == 1 + 12
    clean, perturbed = seen["m-rwp"][1::2], seen["m-rwp"][2::2]
    assert all(torch.equal(a, b) for a, b in zip(clean, seen["sgd"][1:], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(clean, perturbed, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(seen["sam"][1::2], seen["sgd"][1:], strict=True))


@pytest.mark.parametrize(("drop", "sizes"), [(False, [4, 4, 2] * 2), (True, [4, 4] * 3)])
def test_the_last_small_batch_is_kept_or_left_out(drop, sizes, monkeypatch):
    seen = []

    class Spy(nn.Linear):
        def forward(self, x):
            if self.training:
                seen.append(len(x))
            return super().forward(x)

    data = wrap((torch.randn(10, 4), torch.arange(10) % 3), (torch.randn(3, 4), torch.arange(3)))
    monkeypatch.setattr(course_module, "step_flops", lambda *_, **__: 1)
    config = Config(steps=6, batch=4, drop_last=drop, threads=1)
    sources = Sources(lambda: Spy(4, 3), data)
    result = train(config, sources=sources, store=None, progress=False)
    assert seen == sizes
    assert result.steps == 6
    by_epochs = config.replace(steps=None, epochs=2)
    assert train(by_epochs, sources=sources, store=None, progress=False).steps == 6 - 2 * drop


def test_a_batch_beyond_the_data_cannot_be_left_out():
    with pytest.raises(LabError, match="drop_last leaves nothing to train on: there are 200"):
        train(TINY.replace(batch=500, drop_last=True), store=None, progress=False)


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    config = TINY.replace(lr=1e30, method="rwp:ratio=.5", checkpoint_minutes=0)
    with pytest.raises(DivergedError) as error:
        train(config, store=tmp_path, progress=False)
    said = str(error.value)
    assert "not a number at step" in said
    assert "learning rate" in said
    assert "strength" in said
    (folder,) = tmp_path.iterdir()
    assert Store(tmp_path).get(folder.name).status == "diverged"
    for file in (folder / "checkpoints").glob("*.pt"):
        state = torch.load(file, weights_only=True)
        assert all(v.isfinite().all() for v in state["trainer"]["model"].values())
    with pytest.raises(DivergedError):  # known the second time
        train(config, store=tmp_path, progress=False)


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = train(TINY, store=tmp_path, progress=False)
    stamp = (first.folder / "model.pt").stat().st_mtime_ns
    again = train(TINY, store=tmp_path, progress=False)
    assert again.reused
    assert not first.reused
    assert again.metrics == first.metrics
    assert (first.folder / "model.pt").stat().st_mtime_ns == stamp
    assert json.loads((first.folder / "config.json").read_text())["train_size"] == 200


def same_run(first, second):
    """Whether a store takes the runs of two sources for one."""
    configs = [settled(TINY.replace(seed=3), sources) for sources in (first, second)]
    return configs[0].identity == configs[1].identity


def test_a_model_function_that_makes_another_model_is_another_run():
    class Net(nn.Sequential):
        def __init__(self, width, act=torch.relu):
            super().__init__(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))
            self.act = act

    def of(width, act=torch.relu):
        return Sources(lambda: Net(width, act))

    assert same_run(of(4), of(4))
    assert not same_run(of(4), of(5))
    assert not same_run(of(4), of(4, torch.tanh))
    assert not same_run(*(Sources(functools.partial(Net, width)) for width in (4, 5)))


def test_a_task_whose_loss_uses_another_value_is_another_run():
    def of(loss):
        return Sources(task=Task("own", loss, lambda out, y: {"one": y}, "one", False))

    def smooth(amount):
        return lambda out, y: nn.functional.cross_entropy(out, y, label_smoothing=amount)

    def weighed(weight):
        return functools.partial(nn.functional.cross_entropy, weight=weight)

    for make in (smooth, lambda amount: nn.CrossEntropyLoss(label_smoothing=amount)):
        assert same_run(of(make(0.1)), of(make(0.1)))
        assert not same_run(of(make(0.1)), of(make(0.2)))
    for make in (weighed, nn.CrossEntropyLoss):
        weights = torch.ones(10), torch.arange(10.0)
        assert same_run(*(of(make(weights[0].clone())) for _ in range(2)))
        assert not same_run(*(of(make(weight)) for weight in weights))


def test_data_that_differ_in_one_value_are_another_run():
    x, y = torch.randn(40, 4), torch.randint(3, (40,))
    other_x, other_y = x.clone(), y.clone()
    other_x[7, 2] += 1
    other_y[11] = (y[11] + 1) % 3
    test = (torch.randn(9, 4), torch.arange(9) % 3)
    for other in ((other_x, y), (x, other_y)):
        assert same_run(*(Sources(data=(part, test)) for part in ((x, y), (x.clone(), y))))
        assert not same_run(*(Sources(data=(part, test)) for part in ((x, y), other)))
        assert not same_run(*(Sources(data=(test, test, part)) for part in ((x, y), other)))
        functions = [lambda seed, part=part: (part, test) for part in ((x, y), other)]
        assert not same_run(*(Sources(data=function) for function in functions))
    before = torch.get_rng_state()
    drawn = Sources(data=lambda seed: ((torch.randn(40, 4), y), test))
    assert same_run(drawn, drawn)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_final_model_is_a_plain_state_dict(tmp_path):
    result = train(TINY, sources=Sources(model=Dropping), store=tmp_path, progress=False)
    model = Dropping()
    model.load_state_dict(torch.load(result.folder / "model.pt", weights_only=True))


def test_the_callers_random_state_and_threads_are_left_alone():
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    train(TINY.replace(method="arwp"), store=None, progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_fine_tuning_keeps_the_body_and_renews_the_head(tmp_path, caplog):
    caplog.set_level(logging.INFO, "steppe")
    result = train(TINY, store=tmp_path, progress=False)
    state = torch.load(result.folder / "model.pt", weights_only=True)
    head = [name for name, value in state.items() if value.shape[0] == 10]
    body = [name for name in state if name not in head]
    other = {name: value[:7] if name in head else value for name, value in state.items()}
    other["left.over"] = torch.zeros(1)
    torch.save({"state_dict": {f"module.{k}": v for k, v in other.items()}}, tmp_path / "old.pt")
    config = TINY.replace(init=str(tmp_path / "old.pt"), lr=1e-12, steps=1, weight_decay=0)
    tuned = weights(train(config, store=tmp_path / "b", progress=False).folder)
    for name in body:
        torch.testing.assert_close(tuned[name], state[name])
    assert all(len(tuned[name]) == 10 for name in head)
    assert f"new head, since the class counts differ: {', '.join(head)}" in caplog.text
    assert "in the file but not in the model: left.over" in caplog.text
    assert f"{len(body)} of {len(state)} weights loaded" in caplog.text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"a": torch.zeros(2)}, "none of its 1 weights has a name of this model's"),
        ([1, 2], "must hold a state dict"),
        (None, "cannot read the weights"),
    ],
)
def test_weights_that_do_not_fit(tmp_path, content, said):
    if content is not None:
        torch.save(content, tmp_path / "w.pt")
    with pytest.raises(LabError, match=said):
        train(TINY.replace(init=str(tmp_path / "w.pt")), store=tmp_path / "r", progress=False)
    assert not list((tmp_path / "r").glob("*"))  # no folder for a run that never began


def test_a_model_that_does_not_fit_the_data():
    with pytest.raises(LabError, match=r"gives 7 outputs, but .* has 10 classes"):
        model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 7))  # noqa: E731
        train(TINY, sources=Sources(model), store=None, progress=False)
    with pytest.raises(LabError, match="cannot take a batch of shape"):
        train(TINY, sources=Sources(lambda: nn.Linear(5, 10)), store=None, progress=False)


def test_a_layout_that_would_crash_torch_is_refused():
    config = TINY.replace(model="small-resnet", width=0.1, channels_last=True)
    with pytest.raises(LabError, match="channels_last=false"):
        train(config, store=None, progress=False)


def test_one_run_one_process(tmp_path):
    run = Store(tmp_path).place(Config())
    with (
        locked(run),
        pytest.raises(LabError, match="another process is working"),
        locked(run),
    ):
        pass


def test_learning_rate_warms_up_and_falls():
    result = []
    config = settled(TINY.replace(steps=8, warmup=2, batch=200, lr=0.5), Sources())
    run_config(config, Sources(), None, lambda event: result.append(event.step))
    assert result[-1] == 8
    from steppe.lab.problems import load_problem
    from steppe.lab.trainer import Trainer

    trainer = Trainer(config, load_problem(config, Sources()), torch.device("cpu"))
    rates = [trainer.lr(step) for step in range(8)]
    assert rates[:2] == [0.25, 0.5]
    assert rates[2] == 0.5
    assert rates[5] == pytest.approx(0.25)
    assert rates[7] == pytest.approx(0.5 * (1 + math.cos(math.pi * 5 / 6)) / 2)


def absolute():
    return Task(
        name="absolute",
        loss=lambda out, y: (out.squeeze(1) - y).abs().mean(),
        measure=lambda out, y: {"mae": (out.squeeze(1) - y).abs()},
        metric="mae",
        higher_is_better=False,
    )


def test_a_task_of_the_users_own(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    torch.manual_seed(0)
    x = torch.randn(80, 3)
    y = x @ torch.tensor([1.0, -2.0, 0.5])
    data = wrap((x[:60], y[:60]), (x[60:], y[60:]))
    config = Config(steps=200, batch=20, lr=0.05, task="test_training:absolute", threads=1)
    result = train(
        config, sources=Sources(lambda: nn.Linear(3, 1), data), store=None, progress=False
    )
    assert result.metric == "mae"
    assert result.score() < 0.1
    assert set(result.metrics["test"]) == {"loss", "mae"}


def test_recomputed_norm_statistics_are_measured_beside_and_not_kept(tmp_path):
    config = TINY.replace(method="rwp:ratio=1,schedule=constant")
    plain = train(config, sources=Sources(Dropping), store=tmp_path, progress=False)
    both = train(
        config.replace(recompute_norm=True),
        sources=Sources(Dropping),
        store=tmp_path,
        progress=False,
    )
    assert both.metrics["test"] == plain.metrics["test"]
    assert both.metrics["test_recomputed"] != plain.metrics["test"]
    assert same(weights(plain.folder), weights(both.folder))


def test_the_training_loss_at_the_true_weights_can_be_followed(tmp_path):
    result = train(TINY.replace(track_train=True), store=tmp_path, progress=False)
    last = Store(tmp_path).get(result.folder.name).metrics[-1]
    assert last["train_loss"] == result.metrics["train"]["loss"]
    assert last["test_accuracy"] == result.score()
    assert last["loss"] != last["train_loss"]  # of the batches, while the weights moved


def test_other_initial_weights_are_another_run(tmp_path):
    state = torch.load(train(TINY, store=tmp_path, progress=False).folder / "model.pt")
    config = TINY.replace(init=str(tmp_path / "init.pt"), steps=1)
    folders = set()
    for factor in (1.0, 0.5):
        torch.save({name: factor * value for name, value in state.items()}, tmp_path / "init.pt")
        folders.add(train(config, store=tmp_path / "tuned", progress=False).folder)
    assert len(folders) == 2


def test_what_the_perturbation_did_is_recorded(tmp_path):
    result = train(TINY.replace(method="m-arwp:ratio=.5"), store=tmp_path, progress=False)
    assert result.strength == ("ratio", 0.5)
    assert result.perturbation["strength"] == pytest.approx(0.5)
    assert 0 < result.perturbation["factor"] <= 1
    found = result.perturbation
    assert 0 < found["radius"] <= 0.51 * found["weight_norm"]
    assert result.flops == 2 * train(TINY, store=None, progress=False).flops
