"""The page says what the lines say: numbers against made-up evidence, and the committed page."""

import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from steppe.lab.published import CIFAR, IMAGENET
from steppe.lab.statistics import half_width, mean_std
from steppe.lab.tuning import Tune
from studies import STUDIES, Evidence, make_plan
from studies.findings import PAPER_ORDER, Claim, Findings
from studies.gains import gains_figure
from studies.page import compose, write_page
from tests.studies.made_up import LEVELS, accuracy, fill
from tests.studies.tiny import rich

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return fill(rich(minima=True), tmp_path_factory.mktemp("full"), minima=True)


@pytest.fixture(scope="module")
def text(full):
    return compose(full.folder, (rich(minima=True),))[0]


def row(text, table, method):
    """The cells of a method's row in the table with this title."""
    part = text.partition(f"**{table}**")[2]
    line = next(line for line in part.splitlines() if line.startswith(f"| {method} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def entries(full, part, name):
    plan = make_plan(rich(minima=True), full)
    return [e for e in plan.entries if e.part == part and e.name == name]


DEFAULTS = "MLP, few steps, default strengths, untuned"


def test_a_row_has_mean_spread_difference_and_n(full, text):
    own = [accuracy(e.config) for e in entries(full, "defaults", "SAM")]
    base = [accuracy(e.config) for e in entries(full, "defaults", "SGD")]
    mean, std = mean_std(own)
    cells = row(text, DEFAULTS, "SAM")
    assert cells[1] == "rho 0.05"
    assert cells[2] == f"{mean:.2f} ± {std:.2f}"
    told = statistics.fmean(a - b for a, b in zip(own, base, strict=True))
    assert cells[3].startswith(f"+{told:.2f} [")
    assert cells[6] == f"{mean + 1:.2f} ± {std:.2f}"  # BatchNorm recomputed
    assert cells[-3:] == ["2.00", "2.00", "6"]


def test_time_is_told_where_tuned_plain_training_ran_elsewhere(full, tmp_path):
    lines = [
        replace(line, result=replace(line.result, environment={"processor": "sliderule"}))
        if " tuned SGD " in line.label
        else line
        for line in full.lines.values()
    ]
    (tmp_path / "rich.jsonl").write_text("".join(line.text() for line in lines))
    text, _ = compose(tmp_path, (rich(minima=True),))
    tuned = "MLP, few steps, tuned strengths"
    assert [row(text, tuned, name)[-3:-1] for name in ("SGD", "SAM")] == [
        ["1.00"] * 2,
        ["2.00"] * 2,
    ]
    assert row(text, DEFAULTS, "SAM")[-3:-1] == ["2.00", "2.00"]


def in_short(text, first="study and setting"):
    """The rows of the opening table whose first column is called so, as dicts."""
    start = text.partition("## How")[0].index(f"| {first} |")
    lines = text[start:].partition("\n\n")[0].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(header, cells, strict=True)) for cells in rows]


def test_in_short_every_setting_has_its_gains(full, text):
    told = Findings(rich(minima=True), full).differences[Claim("mlp", "defaults", "SAM", "SGD")]
    assert told.verdict == "better"
    defaults, tuned = in_short(text)
    assert defaults["study and setting"] == "`rich`: MLP, few steps"
    assert (defaults["strengths"], tuned["strengths"]) == ("default", "tuned")
    assert defaults["plain, %"] == row(text, DEFAULTS, "SGD")[2].split()[0]
    assert defaults["SAM"] == f"**+{told.mean:.2f}**"
    assert (defaults["MSAM"], defaults["n"]) == ("–", "6")


def test_in_short_few_pairs_are_counted_and_nothing_is_told(tmp_path):
    fill(rich(seeds=3), tmp_path)
    defaults, _ = in_short(compose(tmp_path, (rich(seeds=3),))[0])
    assert re.fullmatch(r"\+\d\.\d\d \(3\)", defaults["SAM"])
    assert "**" not in "".join(defaults.values())


def test_in_short_verdicts_are_counted_over_all_settings(full, text):
    told = Findings(rich(minima=True), full).differences
    asked = {each["question"]: each for each in in_short(text, "question")}
    gains = asked["Do the methods gain?"]
    assert (gains["better"], gains["worse"], gains["all"]) == ("10", "0", "10")
    means = [
        t.mean for claim, t in told.items() if claim.second == "SGD" and "," not in claim.first
    ]
    assert gains["means"] == f"+{min(means):.2f} to +{max(means):.2f}"
    mixed = asked["Does mixing help beyond its second batch?"]
    assert (mixed["worse"], mixed["no difference seen"]) == ("2", "0")
    assert "m-ARWP and SAM are equivalent within 0.5 points in 2 of 2." in text
    assert "the highest mean accuracy in 0 of 1 tables of minima." in text


def test_in_short_the_chosen_strengths_stand_beside_the_defaults(text):
    (chosen,) = in_short(text, "chosen by trials (default)")  # the made-up best is 0.3 for all
    assert chosen["SAM"] == "0.4 (0.05)"
    assert (chosen["RWP"], chosen["m-ARWP"], chosen["MSAM"]) == ("0.3 (0.6)", "0.225 (0.9)", "–")
    assert (
        "Chosen stronger than the default everywhere: SAM; weaker than the default everywhere: RWP, "
        "ARWP, m-RWP and m-ARWP." in text
    )


def test_in_short_the_same_runs_count_once(tmp_path):
    only = Tune(factors=(1.0,), extend=False, baseline=True)  # no choice but the default
    (setting,) = rich().settings
    study = replace(rich(), groups=((replace(setting, tune=only),),))
    fill(study, tmp_path)
    text, _ = compose(tmp_path, (study,))
    assert [each["strengths"] for each in in_short(text)] == ["default", "tuned"]
    assert [each["all"] for each in in_short(text, "question")] == ["5", "2", "1", "1", "5"]
    (chosen,) = in_short(text, "chosen by trials (default)")
    assert (chosen["SGD: weight decay"], chosen["SAM"]) == ("**0.0005**", "**0.05**")
    assert "everywhere: none; weaker than the default everywhere: none." in text


def test_holm_corrects_over_the_whole_study(full):
    findings = Findings(rich(minima=True), full)
    claims = findings.differences
    # 11 rows against SGD and 6 more questions; of tuned runs 6 rows and 6 questions.
    assert len(claims) == 11 + 6 + 6 + 6
    claim = Claim("mlp", "defaults", "m-ARWP", "SAM")
    values = findings.pairs(claim)
    mean, std = mean_std(values)
    found = claims[claim]
    assert found.low95 == pytest.approx(mean - half_width(std, 6))
    assert found.low < found.low95


def test_tuned_rows_show_strength_and_trials(full, text):
    title = "MLP, few steps, tuned strengths"
    cells = row(text, title, "ARWP")
    assert cells[1] == "ratio 0.3"  # what the made-up validation prefers
    assert "10" in cells[7]
    assert row(text, title, "ARWP, batch doubled")[1] == "ratio 0.3"
    assert row(text, title, "ARWP, batch doubled")[7] == "–"
    assert row(text, title, "SGD")[1].startswith("weight decay")


def test_what_the_trials_found_is_shown(full, text):
    found = make_plan(rich(minima=True), full).choices["mlp"]["arwp"].scores
    low, best, *rest = [f"{value:g}: {found[value]:.1f}" for value in sorted(found)]
    title = "Trials: MLP, few steps, means over 2 seeds"
    assert best.startswith("0.3: ")
    shown = ", ".join([low, f"**{best}**", *rest])
    assert row(text, title, "ARWP") == ["ARWP", f"ratio {shown}", "10"]
    assert row(text, title, "SGD")[1].startswith("weight decay **3.13e-05: ")


def test_the_answers(text):
    assert "The median of ARWP's adaptive factor never fell below 0.990" in text
    assert "The median of m-ARWP's adaptive factor fell to 0.900." in text
    assert re.search(r"m-ARWP − ARWP, batch doubled is −0\.4\d .* points \(n = 6\): worse", text)
    assert "Their strengths differ too (ratio 0.9 and ratio 0.6)." in text
    assert re.search(r"m-ARWP − SAM is .* Equivalent within 0.5 points: (yes|not shown)", text)
    assert "by means SGD < m-RWP < SAM < m-ARWP < " in text
    assert re.search(r"Against the paper: .*SAM < m-RWP \(−1\.\d\d", text)
    assert (
        "That m-RWP is below SAM, likely because the validation split prefers ratio 0.225 to"
        in text
    )
    assert "the largest Hessian eigenvalue is smallest for SGD" in text
    assert "at radius 3.16 in random directions and 0.316 along the gradient of 128" in text
    assert "10 times as far, 1.0 orders of magnitude." in text


def test_a_tuned_weight_decay_is_named_where_methods_lose_to_it(tmp_path, monkeypatch):
    """The made-up trials prefer plain training with another weight decay than the recipe's."""
    monkeypatch.setitem(LEVELS, "sgd", 90.0)
    fill(rich(), tmp_path)
    text, _ = compose(tmp_path, (rich(),))
    decay = "SGD has the weight decay 3.13e-05 that its trials chose and the methods the recipe's 0.0005"
    tuned = "MLP, few steps, tuned strengths: "
    assert re.search(rf"{tuned}worse than SGD: SAM .* There {decay}\.", text)
    assert re.search(rf"{tuned}.* That RWP is below SGD, likely because {decay}\.", text)
    assert not re.search(rf"{DEFAULTS}: .*{decay}", text)


def test_a_minimum_that_could_not_be_measured_is_told(full, tmp_path):
    study = rich(minima=True)
    text = full.file.read_text().replace('"largest_eigenvalue"', '"failed":"no number","was"', 1)
    (tmp_path / "rich.jsonl").write_text(text)
    page, _ = compose(tmp_path, (study,))
    assert "1 models could not be measured; the first: SGD: no number" in page


def test_too_few_seeds_give_no_verdict(tmp_path):
    fill(rich(seeds=3, minima=True), tmp_path, minima=True)
    text, _ = compose(tmp_path, (rich(seeds=3, minima=True),))
    answers = text.partition("## Rich")[2]
    assert ": too few seeds for a verdict; one below" in answers
    assert re.search(r"is smallest for SGD .* methods: \S+ Too few seeds for a verdict\.", answers)
    for word in (": better.", ": worse.", "no difference seen", "Equivalent"):
        assert word not in answers


def test_what_is_missing_is_said(tmp_path):
    fill(rich(), tmp_path, take=lambda e: e.part == "defaults" and e.config.seed < 2)
    text, shown = compose(tmp_path, (rich(), STUDIES["cifar10"]))
    assert "24 of " in text
    assert "Still missing, in runs: mlp (defaults 48, tuning 60, tuned 42, lengths" in text
    assert "No runs yet: `python -m studies cifar10`." in text
    # Doubled steps are there as controls.
    assert set(shown) == {"rich-gains.png", "rich-lengths.png"}


def test_without_plain_training_there_are_no_gains(tmp_path):
    methods = ("rwp", "arwp")
    fill(rich(), tmp_path, take=lambda e: e.config.method.split(":")[0] in methods)
    text, shown = compose(tmp_path, (rich(),))
    assert "| study and setting |" not in text
    adaptive, *_ = in_short(text, "question")
    assert adaptive["compared"].startswith("ARWP − RWP")
    assert "rich-gains.png" not in shown
    assert "ARWP − RWP is" in text
    assert "| method | strength | accuracy % | − SGD [interval] |" in text
    assert row(text, DEFAULTS, "ARWP")[3:5] == ["–", "–"]  # never against RWP in SGD's place
    told = Findings(rich(), Evidence(tmp_path, "rich")).differences
    assert {(claim.first, claim.second) for claim in told} == {("ARWP", "RWP")}


def test_where_the_lines_come_from_is_told(text):
    assert "on abacus (2 cores), instruction set not recorded, Python 3, torch 2" in text


def test_a_line_of_no_known_run_is_not_passed_over_in_silence(tmp_path):
    fill(rich(), tmp_path)
    text, _ = compose(tmp_path, (rich(seeds=5),))
    assert "lines belong to no run of the study as it is defined now" in text


def test_the_gains_are_drawn_with_their_intervals(full):
    findings = Findings(rich(minima=True), full)
    (axis,) = gains_figure(findings).axes
    names = [tick.get_text() for tick in axis.get_yticklabels()]
    points, _, (bars,) = axis.containers[0].lines
    place = names.index("m-ARWP")
    told = findings.differences[Claim("mlp", "defaults", "m-ARWP", "SGD")]
    assert points.get_xdata()[place] == pytest.approx(told.mean)
    assert bars.get_segments()[place][:, 0] == pytest.approx([told.low, told.high])
    assert axis.get_xlabel() == "points gained over SGD, n = 6"


def test_intervals_of_few_pairs_are_shown_whole_where_there_are_no_others(tmp_path):
    study = rich(seeds=3)
    findings = Findings(study, fill(study, tmp_path))
    (axis,) = gains_figure(findings).axes
    low, high = axis.get_xlim()
    gains = [g for c, g in findings.differences.items() if c.second == "SGD"]
    assert low < min(g.low for g in gains)
    assert high > max(g.high for g in gains)


def test_a_legend_names_what_any_panel_shows(tmp_path):
    (setting,) = rich().settings
    groups = ((replace(setting, name="few", tune=None), setting),)
    study = replace(rich(), groups=groups)
    found = fill(study, tmp_path, take=lambda e: e.setting.name == "mlp" or e.part == "defaults")
    (legend,) = gains_figure(Findings(study, found)).legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["default strengths", "tuned strengths"]


@pytest.mark.slow
def test_the_figures_are_drawn(full, tmp_path):
    files = write_page(full.folder, tmp_path, (rich(minima=True),))
    names = {file.name for file in files}
    assert names == {
        "evidence.md",
        "rich-gains.png",
        "rich-lengths.png",
        "rich-mlp-figure2.png",
        "rich-mlp-figure3.png",
        "rich-mlp-figure4.png",
        "rich-mlp-landscapes.png",
        "rich-mlp-radius.png",
    }
    page = (tmp_path / "evidence.md").read_text()
    for name in names - {"evidence.md"}:
        assert f"](evidence/{name})" in page


def test_the_papers_order_is_that_of_its_numbers():
    means = {
        m: statistics.fmean(c.mean for c in CIFAR + IMAGENET if c.method == m) for m in PAPER_ORDER
    }
    assert sorted(means, key=means.__getitem__) == list(PAPER_ORDER)


CIFAR10 = "CIFAR-10, 5,000 images, ResNet-18 of a quarter width, default strengths, untuned"
CIFAR10_TUNED = CIFAR10.replace("default strengths, untuned", "tuned strengths")
GAINERS = ("SAM", "RWP", "ARWP", "m-RWP", "m-ARWP", "MSAM")


def test_the_committed_page_is_what_the_committed_lines_say():
    text, shown = compose(ROOT / "evidence")
    assert (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8") == text
    drawn = {file.name for file in (ROOT / "docs" / "evidence").glob("*.png")}
    assert drawn == set(shown)


def test_the_readme_says_what_the_committed_page_says():
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    told = readme.partition("What CIFAR-10 at CPU size has shown")[2].partition("\n##")[0]
    rows = [row(page, CIFAR10, name) for name in ("SGD", "RWP", "m-ARWP", "m-ARWP, one batch")]
    rows.append(row(page, CIFAR10, "SGD, steps doubled"))
    rows.append(row(page, CIFAR10_TUNED, "SGD"))
    assert [cells[-1] for cells in rows] == ["5"] * 6
    assert re.findall(r"[\d.]+ ± [\d.]+", told) == [cells[2] for cells in rows]
    best = float(rows[-1][2].split()[0])
    assert all(float(row(page, CIFAR10_TUNED, name)[2].split()[0]) < best for name in GAINERS)


def test_the_advice_on_choosing_is_what_the_committed_page_says():
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    advice = " ".join((ROOT / "docs" / "choosing.md").read_text(encoding="utf-8").split())
    usual, tuned = CIFAR10, CIFAR10_TUNED

    def first(table, method, column):
        return float(row(page, table, method)[column].split()[0])

    plain, longer = (first(usual, name, 2) for name in ("SGD", "SGD, steps doubled"))
    assert f"from {plain:.1f} to {longer:.1f} %" in advice
    assert f"on validation data, to {first(tuned, 'SGD', 2):.1f};" in advice
    means = [first(usual, method, 2) for method in GAINERS]
    assert f"means of {min(means):.1f} to {max(means):.1f} (n = 5)" in advice
    sharp = [first(f"Minima: {usual}", method, 1) for method in GAINERS]
    against = first(f"Minima: {usual}", "SGD", 1)
    assert f"({min(sharp):.0f} to {max(sharp):.0f} against {against:.0f})" in advice
    assert f"({first(f'Minima: {tuned}', 'SGD', 1):.0f})" in advice
    noisy = [
        float(gains[method].strip("*"))
        for gains in in_short(page)
        if "digits" in gains["study and setting"] and "noise" in gains["study and setting"]
        for method in ("RWP", "ARWP", "m-RWP", "m-ARWP")
        if gains["strengths"] == "default"
    ]
    assert f"{min(noisy):.1f} to {max(noisy):.1f} points at their defaults" in advice


def test_where_the_default_fails_is_told_with_the_pages_numbers():
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    conv = "Fashion-MNIST, 2,000 images, small convolution net, default strengths, untuned"
    cells = {name: row(page, conv, name) for name in ("SGD", *GAINERS)}
    assert {each[-1] for each in cells.values()} == {"10"}
    means = {name: float(each[2].split()[0]) for name, each in cells.items()}
    noisy = [f"{name} {means[name]:.1f}" for name in ("RWP", "ARWP", "m-RWP", "m-ARWP")]
    words = f"SGD has {means['SGD']:.1f} %, {', '.join(noisy[:-1])} and {noisy[-1]}"
    assert words in " ".join((ROOT / "docs" / "choosing.md").read_text(encoding="utf-8").split())
    lost = [means["SGD"] - means[name] for name in ("RWP", "ARWP", "m-RWP", "m-ARWP")]
    words = f"costs RWP, ARWP and the m-methods {min(lost):.1f} to {max(lost):.1f} points"
    assert words in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def test_the_equal_footing_is_the_decay_that_the_committed_trials_chose():
    chosen = make_plan(STUDIES["cifar10"], Evidence(ROOT / "evidence", "cifar10")).choices
    (setting,) = STUDIES["cifar10-decay"].settings
    assert chosen["resnet18"]["sgd"].spec.fields == {"weight_decay": setting.config.weight_decay}


@pytest.mark.parametrize("name", STUDIES)
def test_every_committed_line_belongs_to_its_study_once(name):
    """A line whose method had another default then stays: the page counts it and shows it not."""
    evidence = Evidence(ROOT / "evidence", name)
    plan = make_plan(STUDIES[name], evidence)
    known = {entry.run for entry in plan.entries}
    stale = [line for run, line in evidence.lines.items() if run not in known]
    assert {line.label.split()[0] for line in stale} <= {s.name for s in STUDIES[name].settings}
    assert {line.result.config.method.split(":")[0] for line in stale} <= {"msam"}
    whole, cut = evidence._read()
    assert (len(whole), cut) == (len(evidence.lines), b"")
