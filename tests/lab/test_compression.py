"""What compare says about compressed models, against models compressed by hand and made-up numbers."""

import csv
import io
import json
import logging
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch.nn.utils import prune

from steppe.analysis.changes import rounded
from steppe.lab import Comparison, Config, compare, compression
from steppe.lab.comparison import judged
from steppe.lab.compression import CHANGES, name_of
from steppe.lab.problems import Sources, load_problem, training_batches
from steppe.lab.runs import Run
from steppe.lab.specs import PAPER, usual_methods
from steppe.lab.survival import survival_cells, survival_sentence, survival_table
from steppe.lab.tuning import Tune
from steppe.report.subjects import find_comparison

QUICK = {"steps": 15, "batch": 50, "train_size": 150, "eval_every": 0, "threads": 1}
NAMES = [name_of(change) for change in CHANGES]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def found(store) -> Comparison:
    config = Config(**QUICK)
    return compare(
        methods=["sgd", "rwp:ratio=.6"], seeds=2, config=config, store=store, progress=False
    )


def accuracy(model, data):
    x, y = next(iter(data.test.batches([torch.arange(len(data.test))], augment_seed=None)))
    with torch.no_grad():
        return 100 * (model.eval()(x).argmax(1) == y).double().mean().item()


def test_the_numbers_are_those_of_models_compressed_by_hand(found):
    result = found.row("rwp").results[1]
    problem = load_problem(result.config, Sources())
    model, weights = problem.model, torch.load(Run(result.folder).model_file)
    measured = result.compressed["as is"]
    assert measured["none"] == pytest.approx(result.metrics["test"])
    for bits in (4, 3):
        model.load_state_dict(
            {n: rounded(w, bits, "filter") if w.ndim > 1 else w for n, w in weights.items()}
        )
        expected = accuracy(model, problem.data)
        assert measured[f"{bits} bits, per filter"]["accuracy"] == pytest.approx(expected)
    for amount in (0.5, 0.8):
        model.load_state_dict(weights)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                prune.l1_unstructured(module, "weight", amount)
                prune.remove(module, "weight")
        name = f"{100 * amount:g} % pruned, per tensor"
        assert measured[name]["accuracy"] == pytest.approx(accuracy(model, problem.data))


def test_they_are_kept_with_the_run_and_not_measured_again(found, store, monkeypatch, caplog):
    run = Run(found.row("sgd").results[0].folder)
    assert run.compressed == found.row("sgd").results[0].compressed
    monkeypatch.setattr(compression, "compress", None)
    with caplog.at_level(logging.INFO, "steppe"):
        again = compare(methods=["sgd"], seeds=2, config=Config(**QUICK), store=store)
    assert again.baseline.results[1].compressed == found.baseline.results[1].compressed
    assert "measuring" not in caplog.text


def test_without_it_nothing_is_measured_or_shown(store, tmp_path, caplog):
    config = Config(**QUICK)
    off = compare(
        methods=["sgd"], seeds=1, config=config, store=tmp_path, robustness=False, progress=False
    )
    assert not list(tmp_path.glob("*/compressed.json"))
    assert survival_table(off) is None
    assert "compression" not in off.table() + off.sentence()
    with caplog.at_level(logging.INFO, "steppe"):
        kept_nowhere = compare(methods=["sgd"], seeds=1, config=config, store=None)
    assert "the models are not kept" in caplog.text
    assert survival_table(kept_nowhere) is None
    # A comparison that asks for it measures the run that is there already.
    later = compare(methods=["sgd"], seeds=1, config=config, store=tmp_path, progress=False)
    assert later.baseline.results[0].reused
    assert set(later.baseline.results[0].compressed["as is"]) == {"none", *NAMES}


def test_batchnorm_is_recalibrated_from_the_augmented_training_batches(tmp_path):
    config = Config(model="small-resnet", width=0.5, augment=("crop",), **QUICK)
    small = compare(methods=["sgd"], seeds=1, config=config, store=tmp_path, progress=False)
    result = small.baseline.results[0]
    assert set(result.compressed) == {"as is", "recalibrated"}
    assert result.compressed["as is"]["none"] == pytest.approx(result.metrics["test"], rel=1e-4)
    header = survival_table(small).header
    assert header == ("method", "BatchNorm", "unchanged", *(n.partition(",")[0] for n in NAMES))
    assert [row[1] for row in survival_table(small).rows] == ["as is", "recalibrated"]
    parts = survival_table(small).text(width=40).split("\n\n")
    named = [part for part in parts if part.startswith("method")]
    assert len(named) > 1  # too wide for one part, and every part says which row is which
    assert all("as is" in part and "recalibrated" in part for part in named)
    problem = load_problem(result.config, Sources())
    batches = training_batches(problem, result.config, 120)
    assert [len(batch) for batch in batches] == [50, 50, 50]
    plain = training_batches(
        load_problem(result.config.replace(augment=()), Sources()), result.config, 120
    )
    assert not torch.equal(batches[0], plain[0])


def test_a_written_comparison_brings_them_back(found, store, tmp_path):
    file = tmp_path / "comparison.json"
    file.write_text(json.dumps(found.to_dict()))
    again = find_comparison([str(file)], store)
    assert again.table() == found.table()
    by_name = find_comparison([str(run.folder) for run in map(Run, store.glob("*seed?-*"))], store)
    assert survival_table(by_name) is not None


def made_up(found, gains, seeds=6):
    """A comparison of SGD and methods whose accuracy after each change is SGD's and a gain."""

    def one(base, seed, number, gain):
        metrics = {
            name: {"accuracy": 80 - 10 * i + seed + gain[i] + 0.1 * (-1) ** seed * number}
            for i, name in enumerate(("none", *NAMES))
        }
        return replace(
            base,
            config=base.config.replace(seed=seed),
            metrics={"test": metrics["none"], "train": metrics["none"]},
            compressed={"as is": metrics},
        )

    base, rows = found.baseline.results[0], []
    for number, (label, gain) in enumerate({"SGD": [0] * 5, **gains}.items()):
        results = tuple(one(base, seed, number, gain) for seed in range(seeds))
        rows.append(replace(found.baseline, spec=label.lower(), label=label, results=results))
    return Comparison(found.config, tuple(range(seeds)), judged(rows))


def test_differences_are_paired_and_corrected_over_all_cells(found):
    comparison = made_up(found, {"A": [0, 0, 3, 0, 8], "B": [0, 0, -2, 0, 0]})
    cells = survival_cells(comparison)
    assert len(cells) == 3 * 5
    (cell,) = [c for c in cells if c.row.label == "A" and c.change == "3 bits, per filter"]
    base = next(c.values for c in cells if c.row.label == "SGD" and c.change == cell.change)
    expected = stats.ttest_rel(cell.values, base)
    assert cell.difference.p == pytest.approx(expected.pvalue)
    assert cell.difference.mean == pytest.approx(3)
    ps = sorted(c.difference.p for c in cells if c.difference is not None)
    assert len(ps) == 2 * 4
    assert cell.difference.p_holm == pytest.approx(
        max((8 - i) * p for i, p in enumerate(ps) if p <= cell.difference.p), rel=0.2
    )


def test_the_sentence_says_what_was_gained_where(found):
    said = survival_sentence(made_up(found, {"A": [0, 0, 3, 0, 8], "B": [0, 0, -2, 0, 5]}))
    assert said == (
        "After compression (test accuracy, in points): at 3 bits A (+3.0) is better and B (−2.0) is "
        "worse than SGD; with 80 % pruned A (+8.0) and B (+5.0) are better than SGD. "
        "The change itself moves each method's own accuracy, with 80 % pruned, by −40.0 (SGD), "
        "−32.0 (A) and −35.0 (B)."
    )
    gains = {name: [0, 0, 0, 0, gain] for name, gain in (("A", 8), ("B", 5), ("C", 6))}
    assert "with 80 % pruned all 3 methods are better than SGD (+5.0 to +8.0)." in (
        survival_sentence(made_up(found, gains))
    )
    nothing = survival_sentence(made_up(found, {"A": [0] * 5}))
    assert "no significant difference from SGD (minimum detectable difference 0." in nothing
    few = survival_sentence(made_up(found, {"A": [0] * 5}, seeds=3))
    assert few == "After compression: too few seeds for a verdict (3; 5 are needed)."
    whole = made_up(found, {"A": [0, 0, 3, 0, 8]})
    assert whole.sentence().endswith(survival_sentence(whole))


def test_table_and_csv_have_the_same_numbers(found):
    comparison = made_up(found, {"A": [0, 0, 3, 0, 8]})
    row = survival_table(comparison).rows[1]
    assert row[1] == "82.5"
    assert row[3].startswith("65.5 +3.0 [+")
    numbers = list(csv.DictReader(io.StringIO(comparison.table("csv"))))
    assert float(numbers[1]["3 bits, per filter, as is difference"]) == pytest.approx(3)
    assert float(numbers[1]["unchanged, as is"]) == pytest.approx(82.5)
    assert numbers[0]["3 bits, per filter, as is low"] == ""
    assert "Test accuracy after compression" in comparison.table("markdown")
    assert "80 % pruned" in comparison._repr_html_()


def test_methods_of_several_settings_stand_side_by_side(store):
    config = Config(**QUICK)
    methods = ["sgd", "rwp:ratio=.6", "rwp:ratio=.2", "m-rwp:lam=.3,ratio=.5"]
    both = compare(methods=methods, seeds=2, config=config, store=store, progress=False)
    labels = [row[0] for row in survival_table(both).rows]
    assert labels == ["SGD", "RWP (ratio 0.6)", "RWP (ratio 0.2)", "m-RWP (lam 0.3)"]
    assert both.table().splitlines()[6].startswith("RWP (ratio 0.2)")
    assert both.table().endswith("setting for compression. Add rwp, m-rwp and rwp:rise=0.2.")


@pytest.mark.parametrize(
    ("rows", "absent"),
    [
        ([("rwp:rise=0.2", "given")], "rwp"),
        ([("rwp", "default")], "rwp:rise=0.2"),
        ([("rwp:rise=0.02", "given"), ("m-rwp:rise=0.2", "given")], "m-rwp"),
        ([("rwp:rise=0.1", "best of 3"), ("rwp:rise=0.2", "given")], ""),
        ([("arwp", "default"), ("rwp:rise=0.2", "given"), ("rwp", "default")], ""),
        ([("sam", "default")], ""),
    ],
)
def test_a_table_without_both_settings_of_ours_says_which_is_missing(found, rows, absent):
    made = []
    for spec, how in rows:
        rise = spec.partition("rise=")[2]
        results = [
            replace(r, strength=("rise", float(rise or 0.02))) for r in found.rows[1].results
        ]
        made.append(replace(found.rows[1], spec=spec, chosen=how, results=tuple(results)))
    *_, note = survival_table(replace(found, rows=(found.baseline, *made))).notes
    assert note.endswith(f"Add {absent}." if absent else "all cells of this table.")


def test_recalibration_that_moves_unchanged_models_is_flagged(found):
    made = made_up(found, {"A": [0] * 5})

    def recalibrated(row, by):
        results = []
        for r in row.results:
            fresh = {
                name: {"accuracy": of["accuracy"] + by}
                for name, of in r.compressed["as is"].items()
            }
            results.append(replace(r, compressed={**r.compressed, "recalibrated": fresh}))
        return replace(row, results=tuple(results))

    rows = [recalibrated(row, by) for row, by in zip(made.rows, (-1.5, 0.3), strict=True)]
    notes = " ".join(survival_table(replace(made, rows=tuple(rows))).notes)
    assert "Recalibrating alone moves the unchanged model by SGD -1.50 points. Compare" in notes
    assert "Recalibrating alone" not in " ".join(survival_table(made).notes)


def test_the_setting_for_compression_stands_beside_the_default(store):
    assert usual_methods(robustness=True) == (*PAPER, "rwp:rise=0.2")
    assert usual_methods(robustness=False) == PAPER
    config = Config(**QUICK)
    made = compare(seeds=1, config=config, store=store, progress=False)
    default, large = (row for row in made.rows if row.spec.startswith("rwp"))
    assert large.label == "RWP (rise 0.2)"
    assert default.label == f"RWP ({default.strength})"
    table = made.table(width=80)
    assert max(map(len, table.splitlines())) <= 80
    assert table.count("RWP (rise 0.2)") >= 2  # in both tables
    assert "(2 bits would be three)" in " ".join(table.split())
    assert "not in this table" not in table


def test_the_setting_for_compression_is_not_tuned(store):
    how = Tune(rises=(0.05, 0.1), seeds=1, keep=False)
    methods = ["sgd", "rwp:rise=.2", "rwp"]
    options = {"config": Config(**QUICK), "store": store, "progress": False}
    made = compare(methods=methods, seeds=1, tune=how, robustness=False, **options)
    assert [(row.strength, row.chosen) for row in made.rows][1] == ("rise 0.2", "given")
    assert made.rows[2].chosen.startswith("best of 2")
    assert [row.trials for row in made.rows] == [0, 0, 2]
