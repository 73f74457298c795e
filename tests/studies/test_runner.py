"""A study is run once, whatever happens to the process that runs it."""

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from steppe.lab.engines import Stopped
from steppe.lab.errors import LabError
from steppe.lab.problems import Sources
from steppe.lab.runs import Run
from steppe.lab.training import run_config, settled
from steppe.schedules import RISE
from studies import minima
from studies.definitions import CONTROLS
from studies.evidence import Evidence
from studies.findings import CHANGES
from studies.plan import make_plan
from studies.runner import Limits, run_study
from tests.studies.made_up import made_up_line
from tests.studies.tiny import rich, tiny

RUNS = 2 * 6 + 4 + 2 * 3
"""Defaults and controls, trials, tuned.

The tuned runs may be default ones: the grid's lower value is the default.
"""


def evidence(folder):
    return Evidence(folder / "evidence", "tiny")


def told(lines):
    """What a run is and led to, without times, places and the order of writing."""
    found = {}
    for name, line in lines.items():
        content = json.loads(line.text())
        for key in ("seconds", "cpu_seconds", "environment"):
            del content["result"][key]
        found[name] = content
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run_study(tiny(), evidence(folder), folder / "runs", progress=False)
    return evidence(folder)


def test_every_run_is_a_line_and_nothing_is_left(whole):
    plan = make_plan(tiny(), whole)
    assert plan.missing(whole) == []
    assert plan.waiting == ()
    assert set(whole.lines) == {entry.run for entry in plan.entries}
    tuned = {e.run for e in plan.entries if e.part == "tuned"}
    others = {e.run for e in plan.entries if e.part != "tuned"}
    assert len(whole.lines) == RUNS - len(tuned & others)
    assert list((whole.folder.parent / "runs").iterdir()) == []


def test_a_line_has_what_a_reader_needs_and_is_small(whole):
    for text in whole.file.read_text().splitlines():
        assert len(text) < 4000
        content = json.loads(text)
        result = content["result"]
        assert {"torch", "commit", "processor", "simd"} <= set(result["environment"])
        assert result["config"]["root"] is None
        assert set(result["metrics"]) >= {"train", "test"}


def test_pairs_start_from_the_same_weights_and_strengths_are_written_out(whole):
    methods = {line.result.config.method for line in whole.lines.values()}
    assert f"arwp:rise={RISE}" in methods
    assert "arwp" not in methods


def test_trials_use_other_seeds_and_a_validation_split(whole):
    trials = [e for e in make_plan(tiny(), whole).entries if e.part == "tuning"]
    assert {(t.config.seed, t.config.validation) for t in trials} == {(10_000, 0.2)}
    tuned = [e for e in make_plan(tiny(), whole).entries if e.part == "tuned"]
    assert {t.config.validation for t in tuned} == {0.0}
    choice = make_plan(tiny(), whole).choices["mlp"]["arwp"]
    assert choice.trials == 2
    assert set(choice.scores) == {0.02, 0.2}
    control = next(t for t in tuned if t.name == "ARWP, batch doubled")
    assert control.config.batch == 64
    assert f"rise={choice.spec.options['rise']}" in control.config.method


def test_a_line_is_never_run_twice(whole, tmp_path, monkeypatch):
    """Also on another machine, where the store of runs is empty."""

    def fail(*_, **__):
        raise AssertionError("something was trained")

    monkeypatch.setattr("steppe.lab.engines.run_config", fail)
    before = whole.file.read_bytes()
    run_study(tiny(), Evidence(whole.folder, "tiny"), tmp_path / "elsewhere", progress=False)
    assert whole.file.read_bytes() == before


def test_killed_and_gone_on_with_it_has_the_same_lines(whole, tmp_path):
    program = (
        "from tests.studies.tiny import tiny\n"
        "from studies.evidence import Evidence\n"
        "from studies.runner import run_study\n"
        "from pathlib import Path\n"
        "folder = Path(sys.argv[1])\n"
        "run_study(tiny(), Evidence(folder / 'evidence', 'tiny'), folder / 'runs', progress=False)\n"
    )
    place = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys\n" + program, str(tmp_path)],
        cwd=place,
        env={**os.environ, "PYTHONPATH": f"{place}:{place / 'src'}"},
    )
    file = evidence(tmp_path).file
    while not file.exists() or file.read_bytes().count(b"\n") < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = evidence(tmp_path).lines
    assert 3 <= len(done) < RUNS
    run_study(tiny(), evidence(tmp_path), tmp_path / "runs", progress=False)
    assert told(evidence(tmp_path).lines) == told(whole.lines)
    assert file.read_text().count("\n") == len(whole.lines)


@pytest.mark.slow
def test_side_by_side_gives_the_same_lines(whole, tmp_path):
    limits = Limits(part=("defaults",))
    mine = evidence(tmp_path)
    run_study(tiny(), mine, tmp_path / "runs", jobs=2, limits=limits, progress=False)
    lines = told(evidence(tmp_path).lines)
    assert len(lines) == 2 * 6
    assert lines == {run: line for run, line in told(whole.lines).items() if run in lines}


def test_limits_take_a_method_with_its_controls_and_trials(tmp_path):
    entries = make_plan(tiny(), evidence(tmp_path)).entries
    taken = Limits(method=("arwp",)).take(entries)
    assert {entry.part for entry in taken} == {"defaults", "tuning"}
    assert taken == [entry for entry in entries if entry.config.method.startswith("arwp")]
    assert "ARWP, batch doubled" in {entry.name for entry in taken}


def test_a_line_cut_off_at_the_end_is_reported_and_repaired(whole, tmp_path, caplog):
    mine = evidence(tmp_path)
    mine.folder.mkdir()
    text = whole.file.read_bytes()
    mine.file.write_bytes(text[:-50])
    with caplog.at_level(logging.WARNING, "steppe"):
        run_study(tiny(), mine, tmp_path / "runs", progress=False)
    assert "the last line was cut off by a kill and does not count" in caplog.text
    assert told(evidence(tmp_path).lines) == told(whole.lines)
    assert mine.file.read_bytes().startswith(text[: text[:-50].rfind(b"\n") + 1])


def test_a_damaged_line_in_the_middle_is_an_error(whole, tmp_path):
    mine = evidence(tmp_path)
    mine.folder.mkdir()
    lines = whole.file.read_text().splitlines(keepends=True)
    mine.file.write_text("".join([lines[0], lines[1][:99] + "\n", lines[2]]))
    with pytest.raises(LabError, match=r"tiny\.jsonl, line 2 is damaged .* delete the line"):
        _ = mine.lines


def test_a_line_from_before_a_setting_existed_still_counts(whole, tmp_path):
    """Its run had what is now the default of the new setting, and need not be done again."""
    mine = evidence(tmp_path)
    mine.folder.mkdir()
    text = whole.file.read_text()
    assert '"clip":null,' in text
    mine.file.write_text(text.replace('"clip":null,', "").replace('{"run":"', '{"run":"old'))
    assert make_plan(tiny(), mine).missing(mine) == []


def test_two_processes_do_not_write_one_file(whole):
    fcntl = pytest.importorskip("fcntl")
    with whole.file.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(LabError, match=r"another process is working on .*tiny\.jsonl"):
            run_study(tiny(), Evidence(whole.folder, "tiny"), whole.folder, progress=False)


def test_limits_and_the_order_of_runs(tmp_path):
    limits = Limits(part=("defaults",), seeds=1)
    run_study(tiny(), evidence(tmp_path), tmp_path / "runs", limits=limits, progress=False)
    assert len(evidence(tmp_path).lines) == 6
    plan = make_plan(tiny(), evidence(tmp_path))
    parts = [entry.part for entry in plan.entries]
    assert parts == sorted(parts, key=["defaults", "tuning", "tuned"].index)
    seeds = [entry.config.seed for entry in plan.entries if entry.part == "defaults"]
    assert seeds == sorted(seeds)
    assert len(plan.waiting) == 6  # not known before the trials


def test_trials_go_method_by_method(tmp_path):
    (setting,) = rich().settings
    plan = make_plan(rich(), evidence(tmp_path))
    trials = [e.config.method.partition(":")[0] for e in plan.of(setting, "tuning")]
    assert len(trials) == 6 * 5 * 2
    assert tuple(name for name, _ in itertools.groupby(trials)) == setting.methods


def test_a_method_alone_is_tuned_and_trained_to_the_end(tmp_path):
    limits = Limits(part=("tuning", "tuned"), method=("arwp",))
    run_study(tiny(), evidence(tmp_path), tmp_path / "runs", limits=limits, progress=False)
    plan = make_plan(tiny(), evidence(tmp_path))
    assert set(plan.choices["mlp"]) == {"arwp"}
    assert {entry.name for entry in plan.waiting} == {"SGD"}
    tuned = [entry for entry in plan.entries if entry.part == "tuned"]
    assert {entry.name for entry in tuned} == {"ARWP", "ARWP, batch doubled"}
    assert all(evidence(tmp_path).lines.get(entry.run) for entry in tuned)


def test_ctrl_c_keeps_what_is_finished(tmp_path, monkeypatch):
    append = Evidence.append

    def once(self, line):
        append(self, line)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Evidence, "append", once)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_study(tiny(), evidence(tmp_path), tmp_path / "runs", progress=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(evidence(tmp_path).lines) == 1


@pytest.mark.parametrize("minutes", [1 / 60, 1e-9], ids=["one second", "over before the first run"])
def test_minutes_stop_a_study_and_save_the_run_under_way(tmp_path, minutes):
    long = tiny(steps=10**6, seeds=1)
    with pytest.raises(Stopped):
        run_study(long, evidence(tmp_path), tmp_path / "runs", minutes=minutes, progress=False)
    (folder,) = (tmp_path / "runs").iterdir()
    assert Run(folder).progress() > 0


def test_minima_are_measured_before_the_weights_go(tmp_path):
    study = tiny(minima=True)
    limits = Limits(part=("defaults",), seeds=1)
    run_study(study, evidence(tmp_path), tmp_path / "runs", limits=limits, progress=False)
    lines = {line.label: line.minima for line in evidence(tmp_path).lines.values()}
    sgd, control = lines["mlp defaults SGD seed 0"], lines["mlp defaults SGD, batch doubled seed 0"]
    assert sgd["largest_eigenvalue"] > 0
    assert sgd["weight_norm"] > 0
    assert control["adaptive_sharpness"] > 0
    assert "robustness" not in control
    for name in ("SGD", "RWP (rise 0.2)"):
        left = lines[f"mlp defaults {name} seed 0"]["robustness"]
        assert set(left) == {"none", *CHANGES}  # no BatchNorm, so once
        assert all(0 <= value <= 100 for value in left.values())
    large = lines["mlp defaults RWP (rise 0.2) seed 0"]
    for name, radius, case, adaptive in minima.SHARPNESS:
        assert large[name] is not None, (radius, case, adaptive)
    assert sgd["plain_sharpness"] >= sgd["plain_average"] * (minima.PLAIN / minima.RHO) ** 2


def test_a_line_without_robustness_is_run_again_and_the_complete_one_counts(tmp_path):
    study = tiny(minima=True, seeds=1)
    folder = evidence(tmp_path)
    plan = make_plan(study, folder)
    sgd, control = (next(e for e in plan.entries if e.name == n) for n in ("SGD", CONTROLS[0].name))
    folder.folder.mkdir(exist_ok=True)
    for entry in (sgd, control):
        folder.append(replace(made_up_line(entry), minima={}))
    missing = {entry.run for entry in plan.missing(evidence(tmp_path))}
    assert sgd.run in missing
    assert control.run not in missing
    folder.append(made_up_line(sgd))
    again = evidence(tmp_path)
    assert again.lines[sgd.run].minima["robustness"]
    assert sgd.run not in {entry.run for entry in plan.missing(again)}
    folder.append(replace(made_up_line(sgd), minima={}))
    assert evidence(tmp_path).lines[sgd.run].complete
    assert again.archive("superseded", {sgd.run, control.run}) == 2
    assert [line.complete for line in again.lines.values()] == [True, False]
    assert len(again.file.read_text().splitlines()) == 2
    old = again.folder / "archive" / "superseded" / again.file.name
    assert len(old.read_text().splitlines()) == 2
    assert again.archive("superseded", {sgd.run, control.run}) == 0


def test_a_minimum_that_was_measured_in_fewer_ways_is_measured_again(tmp_path):
    study = tiny(minima=True, seeds=1)
    sgd = next(e for e in make_plan(study, evidence(tmp_path)).entries if e.name == "SGD")
    line = made_up_line(sgd, minima=True)
    assert line.complete
    fewer = {name: value for name, value in line.minima.items() if name != "plain_average"}
    assert not replace(line, minima=fewer).complete


def test_killed_before_its_minimum_was_measured_a_run_is_not_trained_again(tmp_path, monkeypatch):
    study = tiny(minima=True)
    first = make_plan(study, evidence(tmp_path)).entries[1]
    kept = run_config(
        settled(first.config, Sources()), Sources(), tmp_path / "runs", lambda event: None
    )
    monkeypatch.setattr("steppe.lab.training.Course", None)  # what trains
    limits = Limits(part=("defaults",), seeds=1)
    assert not (kept.folder / "minima.json").exists()
    monkeypatch.setattr("studies.runner._next", lambda missing: only(missing, first))
    run_study(study, evidence(tmp_path), tmp_path / "runs", limits=limits, progress=False)
    (line,) = evidence(tmp_path).lines.values()
    assert line.run == first.run
    assert line.minima["largest_eigenvalue"] > 0


def only(missing, wanted):
    return [entry for entry in missing if entry.run == wanted.run]


def test_a_model_that_cannot_be_measured_does_not_end_the_study(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise ValueError("the loss is not finite\nat all")

    monkeypatch.setattr("steppe.analysis.top_eigs", broken)
    limits = Limits(part=("defaults",), seeds=1)
    study = tiny(minima=True)
    run_study(study, evidence(tmp_path), tmp_path / "runs", limits=limits, progress=False)
    lines = evidence(tmp_path).lines.values()
    assert len(lines) == 7
    assert all(line.minima["failed"] == "the loss is not finite" for line in lines)
    assert sum("robustness" in line.minima for line in lines) == 3
