import pytest
import torch

from steppe.lab import data


def test_digits_are_400_training_images_and_the_rest_test():
    digits = data.load("digits")
    assert (len(digits.train), len(digits.test), digits.classes) == (400, 1397, 10)
    assert digits.shape == (1, 8, 8)
    counts = digits.train.targets.bincount().tolist()
    assert max(counts) - min(counts) <= 2  # the classes of the whole set differ by 9 in 180
    every = torch.cat([digits.train.inputs, digits.test.inputs]).flatten(1)
    assert len(every.unique(dim=0)) == 1797


def test_batches_are_floats_in_0_to_1_and_match_scikit_learn():
    from sklearn.datasets import load_digits

    digits = data.load("digits", train_size=1000)
    x, y = next(digits.train.batches(data.sequential_order(1000, 1000), augment_seed=None))
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert (x.min(), x.max()) == (0, 1)
    known = {
        tuple(row.reshape(-1)): label
        for row, label in zip(*load_digits(return_X_y=True), strict=True)
    }
    for image, label in zip(x[:50], y[:50], strict=True):
        assert known[tuple((image * 16).round().flatten().tolist())] == label


def test_the_seed_fixes_the_split():
    one, same, other = (data.load("digits", seed=s).train.inputs for s in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_label_noise_is_exact_named_and_only_in_training():
    clean, noisy = data.load("digits"), data.load("digits", label_noise=0.2)
    assert (clean.train.targets != noisy.train.targets).sum() == 80
    assert torch.equal(clean.test.targets, noisy.test.targets)
    assert torch.equal(clean.train.inputs, noisy.train.inputs)
    assert "20% of the training labels replaced" in noisy.note
    assert "replaced" not in clean.note


def test_validation_is_split_off_the_training_data_and_keeps_its_noise():
    whole = data.load("digits", label_noise=0.2)
    split = data.load("digits", label_noise=0.2, validation=0.25)
    assert (len(split.train), len(split.validation), len(split.test)) == (300, 100, 1397)
    labels = {
        tuple(i.flatten().tolist()): t
        for i, t in zip(whole.train.inputs, whole.train.targets, strict=True)
    }
    for part in (split.train, split.validation):
        for image, target in zip(part.inputs, part.targets, strict=True):
            assert labels.pop(tuple(image.flatten().tolist())) == target
    assert not labels
    counts = split.validation.targets.bincount().tolist()
    assert sum(counts) == 100
    assert min(counts) >= 8


def test_loading_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    data.load("digits", label_noise=0.3, validation=0.2)
    assert torch.equal(torch.get_rng_state(), before)


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match="No data set is called 'digit'"):
        data.load("digit")
    with pytest.raises(ValueError, match=r"label_noise must be in \[0, 1\], got 1.5"):
        data.load("digits", label_noise=1.5)
    with pytest.raises(ValueError, match="train_size must be 10 to 1796, got 5000"):
        data.load("digits", train_size=5000)
    with pytest.raises(ValueError, match="leaves nothing to train on"):
        data.load("digits", validation=0.9999)


def test_diabetes_is_a_regression_on_the_scale_of_its_training_half():
    diabetes = data.load("diabetes")
    assert (len(diabetes.train), len(diabetes.test)) == (221, 221)
    assert (diabetes.task, diabetes.classes, diabetes.shape) == ("regression", None, (10,))
    x, y = next(diabetes.train.batches([torch.arange(221)], augment_seed=0))
    assert (x.dtype, y.dtype, y.shape) == (torch.float32, torch.float32, (221,))
    torch.testing.assert_close(x.mean(0), torch.zeros(10), atol=1e-5, rtol=0)
    assert y.std() == pytest.approx(1, abs=1e-5)
    # Least squares explains about half of the variance of patients it has not seen.
    solution = torch.linalg.lstsq(x.double(), y.double()).solution
    u, v = next(diabetes.test.batches([torch.arange(221)], augment_seed=None))
    assert 0.35 < ((u.double() @ solution - v) ** 2).mean() < 0.75


def test_diabetes_can_be_split_but_has_no_labels_to_replace():
    assert len(data.load("diabetes", train_size=100, validation=0.2).validation) == 20
    with pytest.raises(ValueError, match="label_noise replaces class labels; this is a regression"):
        data.load("diabetes", label_noise=0.2)


@pytest.mark.parametrize(
    ("name", "train", "test", "columns", "classes"),
    [("breast-cancer", 284, 285, 30, 2), ("wine", 89, 89, 13, 3)],
)
def test_tables_of_classes_are_split_in_half(name, train, test, columns, classes):
    table = data.load(name)
    assert (len(table.train), len(table.test)) == (train, test)
    assert (table.task, table.classes, table.shape) == ("classification", classes, (columns,))
    every = torch.cat([table.train.inputs, table.test.inputs])
    assert len(every.unique(dim=0)) == train + test
    torch.testing.assert_close(table.train.inputs.mean(0), torch.zeros(columns), atol=1e-5, rtol=0)
    torch.testing.assert_close(table.train.inputs.std(0), torch.ones(columns))
    assert table.train.targets.bincount().tolist() != [0] * classes
    assert torch.equal(table.test.inputs, data.load(name, label_noise=0.2).test.inputs)


@pytest.mark.parametrize("name", ["digits", "diabetes", "wine"])
def test_scikit_learn_is_asked_for_where_it_is_missing(monkeypatch, name):
    import sys

    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"pip install 'steppe\[lab\]'"):
        data.load(name)
