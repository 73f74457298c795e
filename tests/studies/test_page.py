"""The pages say what the lines say: numbers against made-up evidence, and the committed pages."""

import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from steppe.lab.reproduction import CIFAR, IMAGENET
from steppe.lab.statistics import half_width, mean_std
from studies.definitions import STUDIES
from studies.evidence import Evidence
from studies.findings import CHANGES, OURS, PAPER_ORDER, UNCHANGED, Claim, Findings, primary_claims
from studies.page import compose, write_page
from studies.plan import make_plan
from studies.questions import EARLIER, PRIMARY
from tests.studies.made_up import accuracy, fill
from tests.studies.tiny import rich

ROOT = Path(__file__).parents[2]
DEFAULTS = "MLP, few steps, default strengths"
TUNED = "MLP, few steps, tuned strengths"


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return fill(rich(minima=True), tmp_path_factory.mktemp("full"), minima=True)


@pytest.fixture(scope="module")
def pages(full):
    return compose(full.folder, (rich(minima=True),))[0]


@pytest.fixture(scope="module")
def first(pages):
    return pages["evidence.md"]


@pytest.fixture(scope="module")
def text(pages):
    return pages["evidence/rich.md"]


def row(text, table, method):
    """The cells of a row by column, in the table with this title (or after this line)."""
    part = text.partition(table)[2]
    header = next(line for line in part.splitlines() if line.startswith("| "))
    line = next(line for line in part.splitlines() if line.startswith(f"| {method} |"))
    cells = [[cell.strip() for cell in each.strip("|").split("|")] for each in (header, line)]
    return dict(zip(*cells, strict=True))


def entries(full, part, name):
    plan = make_plan(rich(minima=True), full)
    return [e for e in plan.entries if e.part == part and e.name == name]


def test_a_row_has_mean_spread_difference_and_n(full, text):
    own = [accuracy(e.config) for e in entries(full, "defaults", "SAM")]
    base = [accuracy(e.config) for e in entries(full, "defaults", "SGD")]
    mean, std = mean_std(own)
    cells = row(text, f"**{DEFAULTS}**", "SAM")
    assert cells["strength"] == "rho 0.05"
    assert cells["accuracy %"] == f"{mean:.2f} ± {std:.2f}"
    gain = statistics.fmean(a - b for a, b in zip(own, base, strict=True))
    assert cells["− SGD [interval]"].startswith(f"+{gain:.2f} [")
    assert cells["accuracy %, BN recomputed"] == f"{mean + 1:.2f} ± {std:.2f}"
    assert (cells["time ×"], cells["FLOPs ×"], cells["n"]) == ("2.00", "2.00", "6")


def test_time_is_shown_where_the_tuned_baseline_ran_elsewhere(full, tmp_path):
    lines = [
        replace(line, result=replace(line.result, environment={"processor": "sliderule"}))
        if " tuned SGD " in line.label
        else line
        for line in full.lines.values()
    ]
    (tmp_path / "rich.jsonl").write_text("".join(line.text() for line in lines))
    text = compose(tmp_path, (rich(minima=True),))[0]["evidence/rich.md"]
    for table, name, time in (
        (TUNED, "SGD", "1.00"),
        (TUNED, "SAM", "2.00"),
        (DEFAULTS, "SAM", "2.00"),
    ):
        assert row(text, f"**{table}**", name)["time ×"] == time


def test_holm_corrects_the_primary_comparisons_and_the_others_apart(full):
    study = rich(minima=True)
    findings = Findings(study, full)
    (setting,) = study.settings
    primary = list(primary_claims(setting))
    assert len(primary) == 4 + 1 + len(OURS) * 2 * len(CHANGES)
    known = [claim for claim in primary if claim in findings.differences]
    assert known == primary
    # Secondary: SAM, two at rise 0.2 and 6 controls against SGD, 5 pairs; tuned 5 methods, 1 control,
    # 6 pairs. Apart from them: two defaults against SGD and SAM after each change.
    assert len(findings.differences) - len(known) == 9 + 5 + 6 + 6 + 2 * 2 * len(CHANGES)
    claim = Claim("mlp", "defaults", "m-ARWP", "SAM")
    assert claim in known
    mean, std = mean_std(findings.pairs(claim))
    difference = findings.differences[claim]
    assert difference.low95 == pytest.approx(mean - half_width(std, 6))
    assert difference.smallest == pytest.approx(half_width(std, 6, 0.05 / len(primary)))


def test_tuned_rows_show_the_chosen_strength(text):
    title = f"**{TUNED}**"
    # what the made-up validation prefers
    assert row(text, title, "ARWP")["strength"] == "rise 0.4"
    assert row(text, title, "ARWP, batch doubled")["strength"] == "rise 0.4"
    assert row(text, title, "SGD")["strength"].startswith("weight decay")


def test_methods_are_compared_with_each_other(full, text):
    lines = text.partition("**Comparisons between methods**")[2].partition("\n\n**")[0].splitlines()
    made = Findings(rich(minima=True), full).differences
    mixing = made[Claim("mlp", "defaults", "m-ARWP", "ARWP, batch doubled")]
    (line,) = [x for x in lines if f"{DEFAULTS} | m-ARWP − ARWP, batch doubled" in x]
    assert f"rise 0.02 | −{-mixing.mean:.2f} [" in line
    assert f"| worse | {mixing.smallest:.2f} | 6 |" in line
    assert "told" not in text


def test_the_minima_are_tables(full, text):
    """The made-up eigenvalue is the accuracy itself."""
    own = [accuracy(e.config) for e in entries(full, "defaults", "SAM")]
    cells = row(text, f"**Minima: {DEFAULTS}**", "SAM")
    assert cells["largest eigenvalue"].startswith(f"{mean_std(own)[0]:.3g} ± ")
    assert (cells["‖w‖"], cells["n"]) == ("3.11 ± 0.034", "6")


def test_a_minimum_that_could_not_be_measured_is_named(full, tmp_path):
    text = full.file.read_text().replace('"largest_eigenvalue"', '"failed":"no number","was"', 1)
    (tmp_path / "rich.jsonl").write_text(text)
    pages, _ = compose(tmp_path, (rich(minima=True),))
    assert "1 models could not be measured; the first: SGD: no number" in pages["evidence/rich.md"]


def test_gains_stand_below_the_questions(full, first):
    gain = Findings(rich(minima=True), full).differences[Claim("mlp", "defaults", "SAM", "SGD")]
    cells = row(first, "All gains at default strengths", "Rich (MLP, few steps)")
    assert cells["SAM"] == f"**+{gain.mean:.2f}**"
    assert (cells["MSAM"], cells["n"]) == ("–", "6")


def test_too_few_seeds_give_no_verdict(tmp_path):
    fill(rich(seeds=3), tmp_path)
    pages, drawn = compose(tmp_path, (rich(seeds=3),))
    verdict = pages["evidence.md"].partition("## 1.")[0]
    assert verdict.count("Not measured yet.") == 4  # trials need no five seeds
    assert set(drawn) == {"evidence/transfer.png"}
    cells = row(pages["evidence.md"], "All gains", "Rich (MLP, few steps)")
    assert re.fullmatch(r"\+\d\.\d\d \(3\)", cells["SAM"])
    assert "too few seeds" in pages["evidence/rich.md"]
    assert not re.search(r"\| (better|worse|not significant) \|", pages["evidence/rich.md"])


def test_how_far_the_studies_are(tmp_path):
    fill(rich(), tmp_path, take=lambda e: e.part == "defaults" and e.config.seed < 2)
    pages, _ = compose(tmp_path, (rich(), STUDIES["paper"]))
    cells = row(pages["evidence.md"], "## Studies", r"[Rich](evidence/rich.md)")
    assert cells["runs"].startswith("24 of ")
    assert cells["processor hours"] == "0.0"
    assert (
        "| CIFAR-10 as in the paper | " in pages["evidence.md"]
    )  # no link to a page that is not there
    assert set(pages) == {"evidence.md", "evidence/rich.md"}


def test_without_a_baseline_there_are_no_gains(tmp_path):
    methods = ("rwp", "arwp")
    fill(rich(), tmp_path, take=lambda e: e.config.method.split(":")[0] in methods)
    pages, drawn = compose(tmp_path, (rich(),))
    assert "All gains" not in pages["evidence.md"]
    assert not drawn
    assert row(pages["evidence/rich.md"], f"**{DEFAULTS}**", "ARWP")["− SGD [interval]"] == "–"
    made = Findings(rich(), Evidence(tmp_path, "rich")).differences
    assert {(claim.first, claim.second) for claim in made} == {("ARWP", "RWP")}


def test_where_the_lines_come_from_is_said(text):
    assert "on abacus (2 cores), instruction set not recorded, Python 3, torch 2" in text


def test_a_line_of_no_known_run_is_not_passed_over_in_silence(tmp_path):
    fill(rich(), tmp_path)
    pages, _ = compose(tmp_path, (rich(seeds=5),))
    assert "lines belong to no run of the study as it is defined now" in pages["evidence/rich.md"]


FIGURES = ("cost", "gain", "match", "survival", "transfer", "flatness")


@pytest.mark.slow
def test_the_figures_are_drawn(full, tmp_path):
    files = write_page(full.folder, tmp_path, (rich(minima=True),))
    names = {file.relative_to(tmp_path).as_posix() for file in files}
    assert names == {
        "evidence.md",
        "evidence/rich.md",
        *(f"evidence/{name}.png" for name in FIGURES),
    }
    linked = (tmp_path / "evidence.md").read_text() + (
        tmp_path / "evidence" / "rich.md"
    ).read_text()
    for name in names:
        assert not name.endswith(".png") or f"{Path(name).name})" in linked


def test_the_papers_order_is_that_of_its_numbers():
    means = {
        m: statistics.fmean(c.mean for c in CIFAR + IMAGENET if c.method == m) for m in PAPER_ORDER
    }
    assert sorted(means, key=means.__getitem__) == list(PAPER_ORDER)


CIFAR10 = "**ResNet-18 of a quarter width, 5,000 images, default strengths**"
CIFAR10_TUNED = CIFAR10.replace("default", "tuned")


def committed(name):
    return (ROOT / name).read_text(encoding="utf-8")


def words(name):
    return " ".join(committed(name).split())


def mean_of(page, table, method, column="accuracy %"):
    return float(row(page, table, method)[column].split()[0])


def test_the_committed_pages_are_what_the_committed_lines_say():
    pages, drawn = compose(ROOT / "evidence")
    for name, text in pages.items():
        assert committed(f"docs/{name}") == text
    docs = ROOT / "docs"
    there = {file.relative_to(docs).as_posix() for file in (docs / "evidence").iterdir()}
    assert there == {*drawn, *pages} - {"evidence.md"}


def test_the_first_page_is_read_in_minutes():
    page = committed("docs/evidence.md")
    words = [word for word in page.split() if any(map(str.isalnum, word))]  # no rules of tables
    assert len(words) <= 1500
    verdict = page.partition("## Verdict")[2].partition("\n\n")[2].partition("\n\n")[0]
    assert [line.partition("**")[2].partition("**")[0] for line in verdict.splitlines()] == [
        question.text for question in PRIMARY
    ]
    assert page.count("![") <= len(PRIMARY) + 1  # and whether it is flatness


def test_runs_from_before_the_questions_are_counted():
    lines = [x for name in STUDIES for x in Evidence(ROOT / "evidence", name).lines.values()]
    seen = sum(line.result.environment["commit"] in EARLIER for line in lines)
    said = f"{seen:,} of {len(lines):,} runs were made before these five questions were named."
    assert (said in committed("docs/evidence.md")) == bool(seen)


def test_the_pages_use_the_fields_words():
    private = r"\b(told|plain training|m-methods?|doors?|speaks? (for|against)|by means)\b"
    for name in (
        "docs/evidence.md",
        "docs/studies.md",
        *(f"docs/evidence/{s}.md" for s in STUDIES),
    ):
        if (ROOT / name).exists():
            assert not re.search(private, committed(name)), name


SETTINGS_IN_README = {
    "Digits, MLP, 20 % wrong labels": "Digits (MLP, 20 % label noise)",
    "Digits, MLP, clean labels": "Digits (MLP, clean labels)",
    "Digits, small ResNet, 20 % wrong labels": "Digits (small ResNet, 20 % label noise)",
    "Digits, small ResNet, clean labels": "Digits (small ResNet, clean labels)",
    "Breast cancer, MLP": "Confirmation of the defaults (breast cancer, 284 rows, MLP)",
    "Wine, MLP": "Confirmation of the defaults (wine, 89 rows, MLP)",
    "MNIST, MLP": "Confirmation of the defaults (MNIST, 5,000 images, MLP)",
    "Fashion-MNIST, small ViT (AdamW)": (
        "Confirmation of the defaults (Fashion-MNIST, 2,000 images, small ViT)"
    ),
    "CIFAR-100, narrow ResNet-18": (
        "Confirmation of the defaults (CIFAR-100, 10,000 images, ResNet-18 of a quarter width)"
    ),
}


def test_the_readme_says_what_the_committed_page_says():
    page, readme = committed("docs/evidence.md"), committed("README.md")
    for here, there in SETTINGS_IN_README.items():
        cells, said = row(page, "All gains", there), row(readme, "Points of test accuracy", here)
        assert said == {
            "setting": here,
            "SGD, %": cells["baseline, %"],
            **{name: cells[name] for name in ("SAM", "RWP", "m-RWP", "n")},
        }
    equal = re.search(r"of (\d+) comparisons (\d+) equivalent", page)
    assert f"{equal[2]} of {equal[1]} comparisons are equivalent" in words("README.md")
    page = committed("docs/evidence/cifar10.md")
    sgd, longer = (mean_of(page, CIFAR10, name) for name in ("SGD", "SGD, steps doubled"))
    assert f"takes SGD from {sgd:.1f} to {longer:.1f} %" in words("README.md")


def test_the_advice_on_choosing_is_what_the_committed_page_says():
    page, advice = committed("docs/evidence/cifar10.md"), words("docs/choosing.md")
    sgd, longer = (mean_of(page, CIFAR10, name) for name in ("SGD", "SGD, steps doubled"))
    assert f"from {sgd:.1f} to {longer:.1f} %" in advice
    assert f"on validation data, to {mean_of(page, CIFAR10_TUNED, 'SGD'):.1f} (n = 5)" in advice
    usual, tuned = (each.replace("**", "**Minima: ", 1) for each in (CIFAR10, CIFAR10_TUNED))
    sharp = [mean_of(page, table, "SGD", "largest eigenvalue") for table in (usual, tuned)]
    assert f"eigenvalue from {sharp[0]:.0f} to {sharp[1]:.0f}" in advice


def test_the_compression_page_says_what_the_committed_lines_say():
    """Means over seeds, in per cent: unchanged, then after each change."""
    study, page = STUDIES["digits"], committed("docs/compression.md")
    findings = Findings(study, Evidence(ROOT / "evidence", study.name))
    for setting in (s for s in study.settings if s.name in ("mlp-noisy", "resnet-clean")):
        for found in findings.rows(setting, "defaults"):
            if found.name in setting.compressed:
                cells = row(page, f"**Digits, {setting.title}", found.name)
                for column, change in zip(list(cells)[1:], (UNCHANGED, *CHANGES), strict=True):
                    assert (
                        cells[column] == f"{mean_std(list(found.scores(change).values()))[0]:.1f}"
                    )


def test_the_equal_footing_is_the_decay_that_the_committed_trials_chose():
    chosen = make_plan(STUDIES["cifar10"], Evidence(ROOT / "evidence", "cifar10")).choices
    (setting,) = STUDIES["cifar10-decay"].settings
    assert chosen["resnet18"]["sgd"].spec.fields == {"weight_decay": setting.config.weight_decay}


@pytest.mark.parametrize("name", STUDIES)
def test_every_committed_line_belongs_to_its_study_once(name):
    evidence = Evidence(ROOT / "evidence", name)
    plan = make_plan(STUDIES[name], evidence)
    assert evidence.lines.keys() <= {entry.run for entry in plan.entries}
    whole, cut = evidence._read()
    assert (len(whole), cut) == (len(evidence.lines), b"")
