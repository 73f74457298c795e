"""`python -m studies` on the command line."""

from dataclasses import replace

import pytest

from steppe.lab.engines import Stopped
from steppe.lab.specs import parse
from studies.__main__ import main
from studies.definitions import STUDIES
from studies.evidence import Evidence
from studies.findings import Findings
from studies.plan import make_plan, pinned
from tests.studies.made_up import fill
from tests.studies.tiny import rich


def studies(*words):
    return main([str(word) for word in words])


def test_an_unknown_study_is_named_with_the_nearest(capsys, tmp_path):
    assert studies("digit", "--evidence", tmp_path) == 2
    said = capsys.readouterr().err
    assert "digit" in said
    assert "digits" in said
    assert "Traceback" not in said


def test_an_unknown_method_is_an_error(capsys, tmp_path):
    assert studies("cifar10-noisy", "--method", "arwq", "--evidence", tmp_path) == 2
    error = capsys.readouterr().err
    assert "arwq" in error
    assert "arwp" in error


def test_an_unknown_setting_is_an_error(capsys, tmp_path):
    assert studies("digits", "--setting", "mlp", "--evidence", tmp_path) == 2
    assert "mlp-noisy" in capsys.readouterr().err


def test_missing_data_is_told_before_anything_is_trained(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("STEPPE_DATA", str(tmp_path / "nowhere"))
    assert studies("cifar10", "--evidence", tmp_path / "e", "--store", tmp_path / "s") == 2
    said = capsys.readouterr().err
    assert "cifar10" in said
    assert "fetch" in said or "nowhere" in said
    assert not (tmp_path / "s").exists()
    assert not list((tmp_path / "e").iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--seeds", "0"), "seeds must be at least 1, got 0."),
        (("--minutes", "-1"), "minutes must be above 0, got -1."),
        (("--jobs", "-2"), "jobs must be at least 0, got -2."),
        (("--part", "tuned"), "No part of paper is called 'tuned'. There are: defaults."),
    ],
)
def test_limits_that_leave_nothing_are_errors(words, message, capsys, tmp_path):
    assert studies("paper", *words, "--evidence", tmp_path / "e") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "e").exists()


def test_the_list_says_what_is_done_and_missing(capsys, tmp_path):
    assert studies("--evidence", tmp_path, "--jobs", "2") == 0
    said = capsys.readouterr().out
    for name in STUDIES:
        assert name in said
    assert "0 of 260" in said
    assert "Time left on 2 cores" in said


def test_the_page_shows_all_studies(capsys, tmp_path):
    assert studies("digits", "--page", "--evidence", tmp_path) == 2
    assert "leave the name away" in capsys.readouterr().err
    docs = tmp_path / "docs"
    assert studies("--page", "--evidence", tmp_path / "none", "--docs", docs) == 2
    assert f"no folder {tmp_path / 'none'}" in capsys.readouterr().err
    assert not docs.exists()
    assert studies("--page", "--evidence", tmp_path, "--docs", docs) == 0
    page = (docs / "evidence.md").read_text()
    for study in STUDIES.values():
        assert f"| {study.title} |" in page


def test_a_stop_says_how_to_resume(capsys, monkeypatch, tmp_path):
    def stopped(*_, **__):
        raise Stopped("3 of 9 runs finished")

    monkeypatch.setattr("studies.__main__.run_study", stopped)
    assert studies("paper", "--evidence", tmp_path) == 130
    said = "Stopped: 3 of 9 runs finished, the others are saved. The same command resumes.\n"
    assert capsys.readouterr().err == said


def test_lines_that_no_study_uses_are_set_aside(tmp_path):
    study = STUDIES["paper"]
    other = replace(study.settings[0], config=study.settings[0].config.replace(lr=0.5))
    changed = replace(study, groups=((other,),))
    for each in (study, changed):
        fill(each, tmp_path, take=lambda e: e.name in ("SGD", "SAM (rho 0.1)"))
    assert studies("--archive", "a/b", "--evidence", tmp_path) == 2
    assert studies("--archive", "old", "--evidence", tmp_path) == 0
    assert len(Evidence(tmp_path, "paper").lines) == 2 * 3
    old = Evidence(tmp_path / "archive" / "old", "paper").lines.values()
    assert [line.result.config.lr for line in old] == [0.5] * 6


@pytest.mark.parametrize("name", STUDIES)
def test_every_definition_holds_together(name, tmp_path):
    study = STUDIES[name]
    plan = make_plan(study, Evidence(tmp_path, name))
    for setting in study.settings:
        config = setting.config
        assert (config.threads, config.device) == (1, "cpu")
        assert config.recompute_norm
        entries = plan.of(setting, "defaults")
        names = (*setting.methods, *setting.large, *setting.controls)
        assert len(entries) == setting.seeds * len(names)
        doubled = [e.config for e in entries if e.name == "SGD, batch doubled"]
        assert all((c.batch, c.steps) == (2 * config.batch, config.steps) for c in doubled)
        assert len({entry.label for entry in plan.entries}) == len(plan.entries)
    if name in ("cifar10-decay", "cifar10-noisy", "confirmation", "paper"):
        assert not any(e.part in ("tuning", "tuned") for e in (*plan.entries, *plan.waiting))


def test_the_default_strength_is_written_out(tmp_path):
    plan = make_plan(STUDIES["confirmation"], Evidence(tmp_path, "confirmation"))
    for setting in STUDIES["confirmation"].settings:
        kind, value = parse("arwp").full_strength
        assert f"arwp:{kind}={value}" in {e.config.method for e in plan.of(setting, "defaults")}


def test_a_line_of_another_default_is_no_row_of_this_one(tmp_path, monkeypatch):
    """The strength is part of a run's identity; the baseline has none, and its line counts on."""
    study = STUDIES["cifar10-noisy"]
    old = pinned
    monkeypatch.setattr("studies.plan.pinned", lambda m: changed(old(m)))
    before = fill(study, tmp_path)
    monkeypatch.setattr("studies.plan.pinned", old)
    findings = Findings(study, Evidence(tmp_path, study.name))
    (setting,) = study.settings
    assert {row.name for row in findings.rows(setting, "defaults")} == {
        "SGD",
        "RWP (rise 0.2)",
        "m-RWP (rise 0.2)",
    }
    assert len(before.lines) == 6 * 5


def changed(spec):
    """Another default than today's, where the strength is not given by the study itself."""
    kind, value = spec.strength or ("", 0.0)
    return spec.with_options(**{kind: 2 * value}) if kind and value != 0.2 else spec


def test_the_confirmation_goes_from_cheap_to_dear_and_compares_like_with_like(tmp_path):
    study = STUDIES["confirmation"]
    plan = make_plan(study, Evidence(tmp_path, study.name))
    order = list(dict.fromkeys(entry.setting.name for entry in plan.entries))
    assert order == ["wine", "breast-cancer", "mnist", "fashion-vit", "cifar100"]
    for setting in study.settings:
        entries = {e.name: e.config for e in plan.of(setting, "defaults") if e.config.seed == 0}
        twice = setting.reference("m-ARWP")
        assert setting.reference("ARWP") == setting.baseline
        assert twice == f"{setting.baseline}, two batches"
        mixed, control = entries["m-RWP"], entries[twice]
        assert mixed.replace(method="") == control.replace(method="")
        assert control.method == "m-rwp:ratio=0.0"
        assert (control.batch, control.data_seed) == (setting.config.batch, 0)


def test_the_time_of_an_entry_goes_by_passes_steps_and_batch(tmp_path):
    study = rich()
    (setting,) = study.settings
    entries = {e.name: e.seconds for e in make_plan(study, Evidence(tmp_path, "rich")).entries}
    assert entries["SAM"] == pytest.approx(2 * setting.seconds)
    assert entries["SGD, steps doubled"] == pytest.approx(2 * setting.seconds)
