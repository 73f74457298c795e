import dataclasses

import pytest

from steppe.lab import Config, LabError, train
from steppe.lab.recipes import recipe
from steppe.lab.reproduction import table
from steppe.lab.runs import Store


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    return train(
        Config(steps=2, train_size=50, threads=1),
        store=tmp_path_factory.mktemp("example"),
        progress=False,
    )


def put(store, example, config, accuracy, radius=None):
    """A finished run of this config in the store."""
    metrics = {"test": {"accuracy": accuracy}, "train": {"accuracy": 100.0}}
    result = dataclasses.replace(
        example,
        config=config,
        metrics=metrics,
        perturbation={} if radius is None else {"radius": radius},
    )
    run = Store(store).place(config)
    run.folder.mkdir(parents=True)
    run.write_json("config.json", config.to_dict())
    run.write_json("result.json", result.to_dict())


def row(rendered, *words):
    (found,) = [line for line in rendered.splitlines() if all(word in line for word in words)]
    return found


def test_full_recipes_fill_the_table_and_smaller_runs_never_do(tmp_path, example):
    full = recipe("cifar100-resnet18", "m-arwp")
    for seed, accuracy in ((0, 81.0), (1, 81.4)):
        put(tmp_path, example, full.replace(seed=seed, device="cuda", threads=8), accuracy)
    put(tmp_path, example, full.replace(seed=2, epochs=100), 10.0)
    put(tmp_path, example, full.replace(seed=3, width=0.25), 10.0)
    put(tmp_path, example, full.replace(seed=4, train_size=5000), 10.0)
    found = table("cifar", tmp_path).markdown()
    line = row(found, "cifar100-resnet18", "| m-ARWP |")
    assert "| 81.38 ± 0.12 | 81.20 ± 0.28 | 2 | −0.18 |" in line
    assert "| 80.48 ± 0.25 | – | 0 | – |" in row(found, "cifar100-resnet18", "| SAM |")
    assert len(table("cifar", tmp_path).rows) == 48
    assert len(table("imagenet", tmp_path).rows) == 24
    batches = table("batches", tmp_path).markdown()
    assert "| 81.20 ± 0.28 | 2 |" in row(batches, "| m-ARWP |")
    assert "| 0 |" in row(batches, "m-ARWP (same_batch true)")


def test_the_overviews_radius_is_measured(tmp_path, example):
    put(tmp_path, example, recipe("imagenet-resnet50", "sam"), 77.0, radius=0.05)
    found = table("overview", tmp_path).markdown()
    assert "| small | 0.05 | yes | 2× | 2× | 77.15 | 77.00 | 1 | −0.15 |" in row(found, "| SAM |")
    assert "| large | – |" in row(found, "| m-ARWP |")


def test_unknown(tmp_path):
    with pytest.raises(LabError, match="Did you mean cifar"):
        table("cifra", tmp_path)
