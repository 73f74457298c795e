"""Folders and files as data, through training, comparison and the commands."""

import json

import pytest
from test_data_folder import write_tree
from test_data_table import written

from steppe.cli import run
from steppe.lab import Config, LabError, compare, data, train
from steppe.lab.runs import Store

QUICK = ["--steps", "2", "--batch", "8", "-q"]
SMALL = {"steps": 2, "batch": 8, "data_options": {"size": 8}, "eval_every": 0}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path / "split")
    write_tree(tmp_path / "whole", parts=("",), per_class=5)
    written(tmp_path / "things.csv")
    return tmp_path


@pytest.mark.parametrize("name", ["split", "folder:split", "whole", "folder:./whole"])
def test_a_folder_in_every_command(capsys, here, name):
    small = ["--data", name, "--set", "data_options.size=8", *QUICK]
    assert run(["train", *small]) == 0, capsys.readouterr().err
    assert run(["compare", "sgd", "rwp", *small, "--seeds", "1", "--jobs", "1"]) == 0
    assert run(["sweep", *small, "--over", "lr=.1,.01", "--jobs", "1"]) == 0
    folder = here / name.removeprefix("folder:")
    stored = {r.config.data for r in Store().runs()}
    assert stored == {f"folder:{folder.resolve()}"}
    assert len(Store().runs()) == 3, "the same run is found whatever the folder was called"
    (run_folder,) = Store().folder.glob("*-rwp-seed0-*")
    assert run_folder.name.startswith(f"{folder.name}-mlp-rwp-seed0-")
    assert run(["analyze", "landscape", run_folder.name, "--n", "3", "-q"]) == 0
    assert run(["data", "verify", name]) == 0


def test_class_folders_without_a_split_give_a_stratified_one(here):
    whole = data.load("whole", size=8)
    assert (len(whole.train), len(whole.test), whole.classes) == (8, 2, 2)
    assert whole.test.targets.tolist() == [0, 1]
    assert not set(whole.train.files) & set(whole.test.files)
    assert whole.note == "2 of 10 images are the test split"
    assert len(data.load("whole", size=8, test=0.4).test) == 4


def test_from_python(here):
    config = Config(**SMALL)
    assert train(config.replace(data="whole"), store=None, progress=False).steps == 2
    found = compare(data="folder:split", methods=["sgd"], seeds=1, config=config, store=None)
    assert found.table().startswith("split, mlp, 2 steps")
    assert "on 1 seed;" in repr(found)


def test_a_table_from_python_takes_the_column_that_the_error_asks_for(here):
    quick = {"steps": 2, "batch": 4}
    given = {"data": "things.csv", "methods": ["sgd"], "seeds": 1, "store": None, "progress": False}
    with pytest.raises(LabError, match="config={'data_options': {'target': 'grade'}}"):
        compare(**given, config=quick)
    found = compare(**given, config={**quick, "data_options": {"target": "grade"}})
    assert found.example.metric == "accuracy"


def test_another_file_in_the_folder_is_another_run(here):
    first = train(Config(**SMALL, data="whole"), progress=False)
    again = train(Config(**SMALL, data="whole"), progress=False)
    assert again.reused
    data.located.__globals__["_folder_fingerprint"].cache_clear()
    (here / "whole" / "ant" / "0.png").unlink()
    other = train(Config(**SMALL, data="whole"), progress=False)
    assert not other.reused
    assert other.config.identity != first.config.identity


def test_a_table_in_every_command(capsys, here):
    table = ["--data", "things.csv", "--target", "price", *QUICK]
    assert run(["train", *table]) == 0, capsys.readouterr().err
    assert "rmse" in capsys.readouterr().out
    shared = ["--jobs", "1", "--out", "out.json"]
    assert run(["compare", "sgd", "rwp", *table, "--seeds", "1", *shared]) == 0
    assert "RMSE" in capsys.readouterr().out
    assert json.loads((here / "out.json").read_text())["metric"] == "rmse"
    assert run(["sweep", *table, "--over", "lr=.1,.01", "--jobs", "1"]) == 0
    assert run(["train", *table, "--task", "regression"]) == 0
    classes = ["--data", "things.csv", "--target", "grade", *QUICK]
    assert run(["train", *classes]) == 0
    assert "accuracy" in capsys.readouterr().out


MISTAKES = [
    (["--data", "things.csv"], "say which one to predict, --target grade"),
    (["--data", "thing.csv", "--target", "price"], "things.csv? In"),
    (["--data", "./wole"], "there is no folder or file wole. Did you mean whole?"),
    (["--data", "whol"], "No data set is called 'whol'. Did you mean whole?"),
    (["--data", "folder:whole/ant"], "must have one folder of images per class; it has 0.png"),
    (["--data", "digits", "--target", "price"], "digits has no option 'target'"),
]


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize(("arguments", "said"), MISTAKES, ids=lambda v: str(v)[:40])
def test_a_mistake_names_what_exists(capsys, here, command, arguments, said):
    assert run([command, *arguments, *QUICK]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_half_of_the_split_is_said(here):
    (here / "split" / "val").rename(here / "split" / "vall")
    with pytest.raises(LabError, match="both a folder 'train' and a folder 'val'"):
        train(Config(**SMALL, data="split"), store=None, progress=False)
