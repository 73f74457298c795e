import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from steppe.lab import data


class Noisy(Dataset):
    """A dataset that augments with each of the three global generators."""

    def __init__(self, n=20, **attributes):
        self.n = n
        vars(self).update(attributes)

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()]), index % 3


def all_batches(split, **options):
    order = data.epoch_order(len(split), 6, seed=0, epoch=0)
    return list(split.batches(order, **({"augment_seed": 1} | options)))


def test_pairs_of_tensors_or_arrays_become_data():
    inputs, labels = torch.randn(30, 5, dtype=torch.float64), np.arange(30) % 4
    own = data.wrap((inputs, labels), (inputs[:8], labels[:8]), name="mine")
    assert (own.task, own.classes, own.shape, own.name) == ("classification", 4, (5,), "mine")
    x, y = all_batches(own.train)[0]
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)


def test_real_numbers_as_targets_mean_regression():
    pair = TensorDataset(torch.randn(12, 5), torch.randn(12, dtype=torch.float64))
    own = data.wrap(pair, pair)
    assert (own.task, own.classes) == ("regression", None)
    assert all_batches(own.train)[0][1].dtype == torch.float32


def test_byte_images_of_the_user_are_scaled_and_can_be_augmented(tmp_path, monkeypatch):
    source = """
import torch
def images(n=10):
    make = lambda: (torch.full((n, 3, 8, 8), 51, dtype=torch.uint8), torch.arange(n) % 2)
    return make(), make()
"""
    (tmp_path / "my_images_for_steppe.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    own = data.load(
        "my_images_for_steppe:images", augment=("cutout:probability=1",), n=14, label_noise=0.5
    )
    assert (len(own.train), own.shape, own.classes) == (14, (3, 8, 8), 2)
    assert (own.train.targets != torch.arange(14) % 2).sum() == 7
    x, _ = next(own.train.batches([torch.arange(14)], augment_seed=0))
    assert set(x.unique().tolist()) == {0.0, torch.tensor(51.0).mul(1 / 255).item()}


def test_a_datasets_own_augmentation_is_reproducible_and_isolated():
    split = data.wrap(Noisy(classes="abc"), Noisy()).train
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    whole = all_batches(split)
    for options in ({}, {"workers": 2}, {"start": 2}):
        again = all_batches(split, **options)
        for (x, y), (u, v) in zip(whole[options.get("start", 0) :], again, strict=True):
            assert torch.equal(x, u)
            assert torch.equal(y, v)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    other = all_batches(split, augment_seed=2)
    for column in (1, 2, 3):  # torch, random, numpy: each varies with seed and batch
        assert not torch.equal(whole[0][0][:, column], other[0][0][:, column])
        assert not torch.equal(whole[0][0][:2, column], whole[1][0][:2, column])


def test_a_dataset_with_targets_can_be_cut_and_relabelled(tmp_path, monkeypatch):
    labels = [k % 3 for k in range(20)]
    own = data.wrap(Noisy(targets=labels), Noisy(targets=labels))
    assert own.classes == 3
    from steppe.lab.data.named import prepared

    changed = prepared(own, 12, 0.5, 0.25, seed=0)
    assert (len(changed.train), len(changed.validation)) == (9, 3)
    x, y = (
        torch.cat(parts)
        for parts in zip(*all_batches(changed.train), *all_batches(changed.validation), strict=True)
    )
    assert (x[:, 0] % 3 != y).sum() == 6


def test_augmentations_of_the_users_data_stay_unless_others_are_named(tmp_path, monkeypatch):
    source = """
import torch
from steppe.lab import data
def flipped():
    images = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.arange(4) % 2
    own = data.wrap(images, images)
    return data.Data("own", own.train.augmented(("flip",)), own.test, classes=2, shape=(3, 8, 8))
"""
    (tmp_path / "my_flipped_for_steppe.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    for augment, expected in ((None, 1), ((), 0), ([], 0), (("crop", "flip"), 2)):
        own = data.load("my_flipped_for_steppe:flipped", augment=augment)
        assert len(own.train.pipeline.augmentations) == expected


def test_what_cannot_be_used_is_explained(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="how many classes are there"):
        data.wrap(Noisy(), Noisy())
    assert data.wrap(Noisy(), Noisy(), classes=3).classes == 3
    with pytest.raises(TypeError, match=r"a split must be a pair .* got int"):
        data.wrap(5, 6)
    with pytest.raises(ValueError, match="augments its samples itself"):
        data.wrap(Noisy(), Noisy(), classes=3).train.augmented(("flip",))
    from steppe.lab.data.named import prepared

    with pytest.raises(ValueError, match="label_noise needs to know all targets"):
        prepared(data.wrap(Noisy(), Noisy(), classes=3), None, 0.2, 0.0, seed=0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_wrong_data.py").write_text("def five(): return 5\nimport nowhere_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        data.load("my_wrong_data:five")
    (tmp_path / "my_other_data.py").write_text("def five(): return 5\n")
    with pytest.raises(TypeError, match=r"must return .* got int"):
        data.load("my_other_data:five")
    with pytest.raises(ValueError, match="neither installed nor in"):
        data.load("my_absent_data:five")


def test_regression_data_refuses_label_noise_and_splits_without_strata(tmp_path, monkeypatch):
    source = "import torch\ndef rows(): return (torch.randn(40, 3), torch.randn(40)), (torch.randn(9, 3), torch.randn(9))\n"
    (tmp_path / "my_rows_for_steppe.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    own = data.load("my_rows_for_steppe:rows", validation=0.25)
    assert (len(own.train), len(own.validation), own.task) == (30, 10, "regression")
    with pytest.raises(ValueError, match="this is a regression"):
        data.load("my_rows_for_steppe:rows", label_noise=0.1)
