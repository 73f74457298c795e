import pytest

from steppe.lab import Config, LabError
from steppe.lab.specs import parse
from steppe.lab.sweeps import SEARCHES, parse_grid, search, sweep, with_values
from steppe.lab.tuning import better

TINY = Config(steps=10, batch=64, train_size=200, eval_every=0)


def test_options_and_fields_in_one_grid():
    base = Config(method="m-arwp:sigma=.015,lam=.5")
    changed = with_values(base, {"lam": 0.3, "sigma": 0.02, "lr": 0.05, "epochs": "3"})
    assert parse(changed.method).options == {"lam": 0.3, "sigma": 0.02}
    assert (changed.lr, changed.epochs) == (0.05, 3.0)
    with pytest.raises(LabError, match="Did you mean lr"):
        with_values(base, {"lrr": 1})
    with pytest.raises(LabError, match="lam must be in"):
        with_values(base, {"lam": 3})


def test_texts():
    assert parse_grid(["eta=.01,.1", "same-batch=true,false"]) == {
        "eta": [0.01, 0.1],
        "same_batch": [True, False],
    }
    with pytest.raises(LabError, match="NAME=VALUE,VALUE"):
        parse_grid(["eta"])


def test_the_papers_searches():
    assert len(SEARCHES["eta-beta"]["eta"]) * len(SEARCHES["eta-beta"]["beta"]) == 9
    assert max(search("rho")["rho"]) == 0.5
    with pytest.raises(LabError, match="Did you mean sigma"):
        search("sgma")


def test_validation_chooses_and_test_does_not(tmp_path):
    grid = {"lr": [1e-6, 0.1]}
    found = sweep(
        TINY.replace(validation=0.3, steps=30), grid, seeds=2, store=tmp_path, progress=False
    )
    assert found.split == "validation"
    assert found.best().values == {"lr": 0.1}
    assert "Best on the validation split: lr=0.1" in found.table()
    assert len(found.to_dict()["points"][0]["runs"]) == 2
    on_test = sweep(TINY, grid, store=tmp_path, progress=False)
    assert "test accuracy" in on_test.table("markdown")
    assert "Best" not in on_test.table()
    with pytest.raises(LabError, match="a best point is chosen on validation data"):
        on_test.best()


def test_a_search_for_the_rise_keeps_the_method_as_it_is_unless_one_is_better(tmp_path):
    config = TINY.replace(validation=0.3, method="rwp", steps=5)
    found = sweep(config, search("rise"), seeds=2, store=tmp_path, progress=False)
    first, *others = found.points
    assert first.values == {}
    assert [point.values["rise"] for point in others] == list(SEARCHES["rise"]["rise"])
    gained = [p for p in others if better(p.results, first.results)]
    assert (found.best() is first) == (not gained)
    assert "as it is" in found.table()
