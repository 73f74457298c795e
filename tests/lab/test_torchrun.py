"""The commands over several processes, compared with one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.nets import Dropping
from tests.parallel import harness

from steppe.lab import Config, Interrupted, LabError, Sources, train
from steppe.lab import course as course_module
from steppe.lab.ranks import Part
from steppe.lab.runs import Store
from steppe.lab.specs import parse
from steppe.lab.trainer import check_parts, check_ranks

ROOT = Path(__file__).parents[2]
UNEVEN = Config(steps=10, batch=64, train_size=199, threads=1)
"""The last batch of an epoch has seven samples: three for one rank, four for the other."""
OPTIONS = ["--batch", "64", "--train-size", "199", "--threads", "1"]


def torchrun(*arguments):
    """The command that starts `steppe` on two ranks, and its environment."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    environment["OMP_NUM_THREADS"] = "1"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return [*launch, "-m", "steppe", *map(str, arguments)], environment


def two_ranks(*arguments):
    command, environment = torchrun(*arguments)
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def weights(folder):
    return torch.load(folder / "model.pt", weights_only=True)


def assert_equal_to_rounding(here, there):
    assert list(here) == list(there)
    for name, value in here.items():
        torch.testing.assert_close(value, there[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_comparison_over_two_ranks_equals_one_process(tmp_path):
    methods = ["sgd", "m-arwp", "sam"]
    files = ["--store", tmp_path / "two", "--out", tmp_path / "table.json"]
    result = two_ranks("compare", *methods, "--data", "digits", "--model", "mlp", "--seeds", "1",
                       "--steps", "10", *OPTIONS, *files)  # fmt: skip
    assert result.returncode == 0, result.stderr
    words = " ".join(result.stdout.split())  # where lines break depends on the commit's name
    assert words.count("1 thread per run, on each of 2 ranks.") == 1, "one table, of rank 0"
    found = {run.config.method: run for run in Store(tmp_path / "two").runs()}
    assert len(found) == len(json.loads((tmp_path / "table.json").read_text())["rows"]) == 3
    for method in ("sgd", "m-arwp"):  # SAM climbs on each rank by its own part of the batch
        run = found[next(name for name in found if name.startswith(method))]
        alone = train(run.config, store=tmp_path / "one", progress=False)
        assert_equal_to_rounding(weights(run.folder), weights(alone.folder))
        assert run.environment["ranks"] == 2
        assert alone.environment["ranks"] == 1
        records = [Store(f.parent).get(f.name).metrics for f in (run.folder, alone.folder)]
        assert [r["step"] for r in records[0]] == [r["step"] for r in records[1]] == [4, 8, 10]
        assert [r["loss"] for r in records[0]] == pytest.approx([r["loss"] for r in records[1]])
        assert run.result["flops"] == alone.flops


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_ctrl_c_stops_all_ranks_and_resume_goes_on(tmp_path):
    command, environment = torchrun(
        "train", "--method", "m-arwp", "--steps", "80", "--checkpoint-minutes", "0", *OPTIONS,
        "--eval-every", "0", "--store", tmp_path / "two",
    )  # fmt: skip
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not list(tmp_path.glob("two/*/checkpoints/*.pt")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=600)
    assert said.count("Resume with: steppe train --resume") == 1, said
    (run,) = Store(tmp_path / "two").runs()
    assert run.status == "unfinished"
    reached = run.progress()
    assert 0 < reached < 80

    result = two_ranks("train", "--resume", run.folder)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(f" at step {reached}\n") == 1
    assert result.stdout.count("80 steps") == 1
    (run,) = Store(tmp_path / "two").runs()
    assert run.status == "finished"
    assert not (run.folder / "checkpoints").exists()
    assert run.result["steps"] == 80


class StopOnOneRank(course_module.StopSignal):
    """As if a signal reached rank 1 alone, after its sixth step."""

    looks = 0

    @property
    def asked(self):
        self.looks += 1
        return torch.distributed.get_rank() == 1 and self.looks >= 6


def trained_whole_and_in_parts(rank, method, folder):
    config = UNEVEN.replace(method=method)
    sources = Sources(model=Dropping)
    whole = train(config, sources=sources, store=folder / "whole", progress=False)
    kept, course_module.StopSignal = course_module.StopSignal, StopOnOneRank
    try:
        with pytest.raises(Interrupted) as stop:
            train(config, sources=sources, store=folder / "parts", progress=False)
    finally:
        course_module.StopSignal = kept
    parts = train(config, sources=sources, store=folder / "parts", progress=False)
    return stop.value.step, whole.metrics == parts.metrics, whole.metrics


@pytest.mark.slow
def test_stopped_and_resumed_over_ranks_equals_uninterrupted(tmp_path):
    for method in ("arwp", "m-arwp", "sam", "antithetic-rwp"):
        folder = tmp_path / method
        ended = harness.run(2, trained_whole_and_in_parts, method, folder)
        assert ended[0] == ended[1], "both ranks stop at one step and know one result"
        assert ended[0][:2] == (6, True)
        files = [next((folder / part).glob("*/model.pt")) for part in ("whole", "parts")]
        whole, parts = (torch.load(file, weights_only=True) for file in files)
        assert all(torch.equal(whole[name], parts[name]) for name in whole), method
        assert len(list((folder / "whole").iterdir())) == 1


def errors_of_a_run(rank, config, store, sources):
    with pytest.raises(LabError) as error:
        train(config, sources=sources, store=store, progress=False)
    return str(error.value), error.value.shared


class OnlyOnRankZero:
    """A model that rank 1 cannot build."""

    def __call__(self):
        if torch.distributed.get_rank() == 1:
            raise LabError("no weights on this machine")
        return Dropping()


@pytest.mark.slow
def test_errors_end_all_ranks(tmp_path):
    alone = harness.run(2, errors_of_a_run, UNEVEN, tmp_path, Sources(model=OnlyOnRankZero()))
    assert alone == [("no weights on this machine", True)] * 2
    both = harness.run(2, errors_of_a_run, UNEVEN.replace(lr=1e30), tmp_path, None)
    assert both[0][1]
    assert both[1][1]
    assert all("the loss is not a number at step" in text for text, _ in both)
    small = UNEVEN.replace(batch=66)  # 199 = 3 * 66 + 1
    for text, shared in harness.run(2, errors_of_a_run, small, None, None):
        assert "the last batch of an epoch has 1 of 199 samples, fewer than the 2 ranks" in text
        assert shared


def test_parts_are_the_batch_and_weigh_as_many_samples_as_they_have():
    batch = torch.arange(7)
    parts = [Part(k, 3).take(batch) for k in range(3)]
    assert torch.equal(torch.cat(parts), batch)
    shares = [Part(k, 3).share(len(part), 7) for k, part in enumerate(parts)]
    assert sum(shares) / 3 == pytest.approx(1)
    assert torch.equal(Part().take(batch), batch)


def test_what_cannot_be_laid_over_ranks_says_what_works():
    with pytest.raises(
        LabError, match="m_arwp runs its 2 passes on different ranks, which 3 cannot"
    ):
        check_ranks(parse("m-arwp").build(1), 3)
    check_ranks(parse("m-arwp").build(1), 4)
    check_ranks(parse("sam").build(1), 3)
    with pytest.raises(LabError, match="a batch has 2 of 8 samples, fewer than the 4 ranks"):
        check_parts(8, Config(batch=2), Part(0, 4))
    check_parts(9, Config(batch=2), Part(0, 1))
    with pytest.raises(LabError, match="the last batch of an epoch has 1 of 9 samples"):
        check_parts(9, Config(batch=4), Part(0, 2))
    check_parts(9, Config(batch=4, drop_last=True), Part(0, 2))
