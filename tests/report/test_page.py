"""The page as text: what it shows, what it leaves out, and that nobody can write into it."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest
import torch

from steppe.analysis import Pruning, Result
from steppe.analysis.robustness_result import BORNE
from steppe.lab.runs import Run
from steppe.lab.sentences import comparison_sentence
from steppe.lab.survival import survival_sentence
from steppe.report import minima, summary
from steppe.report.analyses import described
from steppe.report.charts import Scale, scale_for, shown
from steppe.report.gathered import Gathered
from steppe.report.maps import contour, grid_of, heights_of
from steppe.report.page import page
from steppe.report.subjects import compared, find_comparison, find_results
from steppe.report.summary import _cards, best_row, notices

EVIL = "<script>alert(1)</script>\"'&"
VOID = {"meta"}


class Checker(HTMLParser):
    """Fails on a tag that closes what is not open, and collects elements."""

    def __init__(self, markup):
        super().__init__()
        self.open, self.found, self.words = [], [], []
        self.feed(markup)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def count(self, tag):
        return sum(name == tag for name, _ in self.found)


@pytest.fixture
def gathered(in_lab):
    names = ["comparison.json"]
    return Gathered(find_comparison(names, in_lab / "runs"), names)


def test_every_section_is_there_and_the_markup_is_sound(gathered):
    checked = Checker(page(gathered))
    keys = [a["id"] for tag, a in checked.found if tag == "section"]
    assert keys == ["result", "accuracy", "convergence", "cost", "robustness", "landscapes", "spectra", "radius", "sharpness", "provenance"]  # fmt: skip
    assert checked.count("canvas") == 3
    ids = [a["id"] for _, a in checked.found if "id" in a]
    assert len(ids) == len(set(ids))
    linked = {a["href"][1:] for tag, a in checked.found if tag == "a"}
    assert linked == set(keys)


def test_the_table_and_the_sentence_are_the_comparisons_own(gathered):
    words = " ".join(Checker(page(gathered)).words)
    assert comparison_sentence(gathered.comparison) in words
    assert survival_sentence(gathered.comparison) in words
    for row in gathered.rows:
        mean = sum(row.values("test", "accuracy")) / 2
        assert f"{mean:.2f} ± " in words
        assert row.results[0].config.method in words
    assert torch.__version__ in words
    assert gathered.rows[0].results[0].folder.name in words


def test_robustness_has_the_comparisons_table_and_a_chart_a_change(gathered):
    made = page(gathered)
    words = " ".join(Checker(made).words)
    assert "Test accuracy after compression, and the difference from SGD [interval]" in words
    section = made[made.index('id="robustness"') : made.index('id="landscapes"')]
    # Rounding and pruning in two ways, 2:4, noise on weights and inputs, blur and contrast.
    assert section.count("<figure>") == 9
    assert "Share pruned, 2:4." in section
    assert "Measured on 48 samples" in section
    stored = list(gathered.every("robustness").values())
    assert [len(results) for results in stored] == [2] * 3
    place = stored[0][0].place(Pruning(0.9))
    mean = 50 * sum(float(result.accuracy[0, place]) for result in stored[0])
    assert f"SGD: {shown(mean)} ± " in section
    assert "Mean over 2 runs a method" in section
    assert f"{BORNE} (mean over runs): SGD " in section


def test_recalibration_that_moves_a_model_is_said_beside_the_charts(gathered):
    """Statistics made up: those after recalibration are two points lower."""

    def twice(result):
        fresh = result.values.clone()
        fresh[1] -= 0.02
        both = torch.cat([result.values, fresh], 1)
        return dataclasses.replace(result, values=both, statistics=("as is", "recalibrated"))

    groups = {i: [twice(r) for r in of] for i, of in gathered.every("robustness").items()}
    said = minima._charts(gathered, groups)
    labels = [gathered.rows[i].label for i in groups]
    moved = ", ".join(f"{label} -2.00" for label in labels)
    assert f"Recalibrating alone moves the unchanged model by {moved} points." in said
    assert re.search(r"SGD [\d.]+ as is, [\d.]+ recalibrated; ", said)
    words = described(groups[0][0])
    assert "moves the unchanged model by -2.00" in words
    assert re.search(r"noise borne [\d.]+ / [\d.]+ \(as is / recal", words)


def test_the_card_on_compression_has_every_method(gathered):
    (card,) = [words for title, _, words in _cards(gathered) if title.startswith("What survives")]
    for row in gathered.rows:
        assert re.search(rf"{re.escape(row.label)} [\d.]+ → [\d.]+", card)


def test_what_the_baseline_bears_best_is_grouped_by_panel(gathered, monkeypatch):
    results = {
        0: [[0, 90.0, 0], [0.3, 80.0, 0], [0.5, 70.0, 0], [0.7, 20.0, 0]],
        1: [[0, 89.0, 0], [0.3, 79.0, 0], [0.5, 60.0, 0], [0.7, 30.0, 0]],
    }
    ways = ("as is", "recalibrated")
    curves = {i: {way: {"share pruned, global": p} for way in ways} for i, p in results.items()}
    curves[1][ways[1]] = {"share pruned, global": results[0]}
    monkeypatch.setattr(summary, "shared_curves", lambda groups: (True, curves))
    (said,) = summary._lost(gathered)
    assert said == (
        "After these changes, BatchNorm as is, SGD has the best mean of all (share pruned, global: "
        "0.3 and 0.5)."
    )


def test_robustness_not_measured_alike_is_not_drawn(gathered):
    results = gathered.every("robustness")[0]
    other = dataclasses.replace(results[1], origin={**results[1].origin, "samples": 1})
    assert "not measured alike" in minima._charts(gathered, {0: results, 1: [other]})


def test_the_page_asks_for_nothing(gathered):
    made = page(gathered)
    for _, attributes in Checker(made).found:
        for name in ("src", "href", "xlink:href", "action", "poster"):
            assert attributes.get(name, "#").startswith(("#", "data:image/png"))
    assert "default-src 'none'" in made
    assert not re.search(r"url\((?!#)|@import|https?://", made)


def test_what_is_absent_is_named_with_its_command(in_lab):
    name = ["digits-rwp-seed?-*"]
    made = page(Gathered(find_comparison(name, in_lab / "runs"), name, in_lab / "runs"))
    words = "".join(Checker(made).words)
    assert '<section id="landscapes"' not in made
    for kind in ("landscape", "spectrum", "radius", "sharpness"):
        assert f"steppe analyze {kind} 'digits-rwp-seed?-*' --store" in words


def test_what_users_write_stays_text(gathered):
    def written(words):
        rows = []
        for row in gathered.rows:
            results = tuple(
                dataclasses.replace(
                    r,
                    config=dataclasses.replace(r.config, data=words, recipe=words),
                    data_note=words,
                    environment={**r.environment, "processor": words},
                )
                for r in row.results
            )
            rows.append(dataclasses.replace(row, label=f"{words}{row.label}", results=results))
        config = gathered.comparison.config.replace(data=words, model=words)
        made = dataclasses.replace(gathered.comparison, config=config, rows=tuple(rows))
        return Checker(page(Gathered(made, [words])))

    evil, harmless = written(EVIL), written("x" * len(EVIL))
    assert evil.count("script") == 1
    assert EVIL in " ".join(evil.words)
    assert [tag for tag, _ in evil.found] == [tag for tag, _ in harmless.found]


def test_a_run_folder_with_a_tag_in_its_name(gathered, tmp_path):
    folder = gathered.rows[0].results[0].folder
    evil = tmp_path / "<script>alert(2)<"
    evil.symlink_to(folder)
    first = gathered.rows[0]
    moved = tuple(dataclasses.replace(r, folder=evil) for r in first.results)
    rows = (dataclasses.replace(first, results=moved), *gathered.rows[1:])
    made = page(Gathered(dataclasses.replace(gathered.comparison, rows=rows), ["x"]))
    assert "<script>alert(2)" not in made
    assert "&lt;script&gt;alert(2)&lt;" in made


def test_runs_make_the_comparison_that_they_were_part_of(gathered, in_lab):
    again = find_comparison(["digits-*"], in_lab / "runs")
    assert {row.label for row in again.rows} == {row.label for row in gathered.rows}
    assert again.baseline.label == "SGD"
    for row in gathered.rows[1:]:
        other = again.row(row.spec)
        assert other.difference.mean == pytest.approx(row.difference.mean)
        assert other.difference.p == pytest.approx(row.difference.p)


def test_only_common_seeds_are_paired(in_lab):
    results = find_results(["digits-*"], in_lab / "runs")
    few = [r for r in results if not (r.config.method == "sam:rho=0.1" and r.config.seed == 0)]
    assert compared(few).seeds == (1,)
    lonely = [r for r in results if (r.config.seed == 0) == (r.config.method == "sgd")]
    with pytest.raises(Exception, match="share no seed"):
        compared(lonely)
    other = dataclasses.replace(results[0], config=results[0].config.replace(data="diabetes"))
    with pytest.raises(Exception, match="different data \\(diabetes, digits\\)"):
        compared([*results, other])


def test_settings_that_differ_tell_rows_apart(in_lab):
    results = find_results(["digits-sgd-*"], in_lab / "runs")
    slow = [dataclasses.replace(r, config=r.config.replace(lr=0.01)) for r in results]
    assert [row.label for row in compared([*results, *slow]).rows] == ["SGD", "SGD (lr 0.01)"]


def test_holes_of_a_landscape_stay_holes(gathered):
    stored = gathered.analyses["landscape"][0]
    torn = stored.result.loss.clone()
    torn[0, 0], torn[3, 2] = float("nan"), float("inf")
    surface = dataclasses.replace(stored.result, loss=torn)
    heights = heights_of([surface])
    grid = grid_of(surface, heights)
    assert [grid[0][0], grid[3][2]] == [None, None]
    known = [h for row in grid for h in row if h is not None]
    assert (min(known), max(known)) == (0, 1)
    gathered.analyses["landscape"][0] = dataclasses.replace(stored, result=surface)
    made = page(gathered)
    assert "2 points not finite" in made
    heights = json.loads(re.search(r'data-surface="(.*?)"', made).group(1))
    assert heights[0][0] is None


def test_contours_lie_where_the_level_is():
    """On a plane z = x the line of level 0.5 is straight, in the middle."""
    grid = [[j / 4 for j in range(5)] for _ in range(5)]
    d = contour(grid, 0.6, Scale(0, 4, 0, 4))
    xs = [float(x) for x in re.findall(r"[ML]([0-9.]+) ", d)]
    assert len(xs) == 5
    assert set(xs) == {2.4}


def test_scales():
    linear = scale_for([0, 10], 0, 100, margin=0)
    assert linear(5) == 50
    assert linear.ticks() == [0, 2, 4, 6, 8, 10]
    log = scale_for([1, 1000], 0, 3, log=True, margin=0)
    assert log(100) == pytest.approx(2)
    assert log.ticks() == [1, 10, 100, 1000]
    assert scale_for([3.0, 3.0, float("nan")], 0, 1)(3.0) == pytest.approx(0.5)


def test_the_same_run_is_counted_once(in_lab):
    results = find_results(["digits-sgd-*", "comparison.json"], in_lab / "runs")
    assert len(results) == len({r.config.identity for r in results}) == 8
    assert all(Run(r.folder).status == "finished" for r in results)


def test_one_seed_a_diverged_row_and_a_metric_that_should_be_low(in_lab, tmp_path, monkeypatch):
    from steppe.cli import run

    monkeypatch.chdir(tmp_path)
    quick = ["--data", "diabetes", "--steps", "3", "--seeds", "1", "--jobs", "1", "-q"]
    assert run(["compare", "sgd", "rwp:ratio=.1", "sgd:lr=1e30", *quick, "--out", "d.json"]) == 0
    made = page(Gathered(find_comparison(["d.json"], tmp_path / "runs"), ["d.json"]))
    words = " ".join(Checker(made).words)
    assert "Test RMSE of the final model (lower is better)" in words
    assert "Test rmse" not in words
    assert "Diverged: SGD (lr 1e+30) in 1 of 1 seeds." in words
    assert "nan" not in re.findall(r"[a-z]+", words.lower())
    assert not re.search(r'[ "](nan|inf)[ "]', made)


def test_analyses_of_other_samples_are_told_apart():
    """Six surfaces of which one was made on other data looked like one measurement."""
    origin = {"samples": 400, "parameters": 10, "bn": "eval", "data_hash": "a"}
    few = {**origin, "samples": 256, "data_hash": "b"}
    same, other = Result(origin=origin), Result(origin=few)
    assert minima.origin_words([same, same]) == (
        "Measured on 400 samples without augmentation, 10 weights, BatchNorm mode eval."
    )
    told = minima.origin_words([same, other])
    assert told.startswith("Not measured alike: on 400 samples")
    assert "256 samples" in told


def test_long_names_stand_in_a_key(gathered):
    assert gathered.shortened() == (gathered, {})
    names = ["SGD (lr 0.01, batch 8)", "SGD (lr 0.1, batch 8)", "SGD (lr 1)", "x" * 40]
    rows = [dataclasses.replace(r, label=n) for r, n in zip(gathered.rows, names, strict=True)]
    long = Gathered(dataclasses.replace(gathered.comparison, rows=tuple(rows)))
    short, key = long.shortened()
    assert [row.label for row in short.rows] == ["SGD 1", "SGD 2", "SGD (lr 1)", "x" * 16 + "…"]
    assert list(key.values()) == [names[0], names[1], names[3]]
    made = page(long)
    assert "<b>SGD 1</b>: SGD (lr 0.01, batch 8)" in made
    assert "batch 8)</text>" not in made


def test_a_method_and_its_rise_is_no_long_name(gathered):
    names = ["SGD", "RWP (rise 0.02)", "m-RWP (rise 0.02)", "RWP (rise 0.2)"]
    rows = [dataclasses.replace(r, label=n) for r, n in zip(gathered.rows, names, strict=True)]
    usual = Gathered(dataclasses.replace(gathered.comparison, rows=tuple(rows)))
    assert usual.shortened() == (usual, {})


def won(gathered, verdict, mean):
    """The comparison as if every method had this difference."""
    base, *rows = gathered.rows
    rows = [
        dataclasses.replace(
            r, difference=dataclasses.replace(r.difference, verdict=verdict, mean=mean + i)
        )
        for i, r in enumerate(rows)
    ]
    return Gathered(dataclasses.replace(gathered.comparison, rows=(base, *rows)))


def test_the_best_method_is_significantly_better_or_there_is_none(gathered):
    assert best_row(won(gathered, "better", 1.0)).label == gathered.rows[-1].label
    for verdict in ("worse", "no difference seen", "too few seeds"):
        none = won(gathered, verdict, 1.0)
        assert best_row(none) is None
        assert "No method is significantly better than SGD" in page(none)


def test_what_contradicts_the_methods_is_noticed(gathered):
    """Metrics that got worse, minima that got sharper, changes that the baseline bears best."""
    rows = []
    for i, row in enumerate(gathered.rows):
        results = [
            dataclasses.replace(
                r,
                metrics={**r.metrics, "test": {**r.metrics["test"], "ece": 3.0 + 10 * i + k / 100}},
            )
            for k, r in enumerate(row.results * 3)
        ]
        rows.append(dataclasses.replace(row, results=tuple(results)))
    spectra = gathered.analyses["spectrum"]
    spectra[2] = spectra[0]
    spectra.pop(3, None)
    for i, size in enumerate((2.0, 1.0, 4.0)):
        result = dataclasses.replace(spectra[i].result, largest=size)
        spectra[i] = dataclasses.replace(spectra[i], result=result)
    worse = dataclasses.replace(gathered.comparison, rows=tuple(rows))
    made = Gathered(worse, store=gathered.store)
    made.analyses["spectrum"] = spectra
    said = " ".join(notices(made))
    assert survival_sentence(worse) in said
    names = [row.label for row in gathered.rows]
    assert (
        f"Calibration (ECE %) got significantly worse: SGD 3.02, {names[1]} 13, {names[2]} 23"
        in said
    )
    assert f"(SGD 2): lower for {names[1]} 1; higher for {names[2]} 4." in said
