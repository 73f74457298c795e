import pickle

import numpy as np
import pytest
import torch

from steppe.lab import data
from steppe.lab.data.catalog import CATALOGUE, content_digest
from steppe.lab.data.readers import NORMALISATION, averaged

FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


def write_small(root, name="cifar10", n=20):
    """A tiny data set in CIFAR's format; returns its training images."""
    folder = root / FOLDERS[name]
    folder.mkdir(parents=True)
    numbers = np.random.default_rng(0)
    if name == "cifar10":
        files, key = [f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"], b"labels"
    else:
        files, key = ["train", "test"], b"fine_labels"
    images = []
    for file in files:
        pixels = numbers.integers(0, 256, (n, 3072), dtype=np.uint8)
        batch = {b"data": pixels, key: [k % 10 for k in range(n)]}
        (folder / file).write_bytes(pickle.dumps(batch, protocol=2))
        images.append(pixels)
    return torch.from_numpy(np.concatenate(images[:-1])).view(-1, 3, 32, 32)


@pytest.fixture(scope="module")
def cifar10(real_data):
    return data.load("cifar10", root=real_data("cifar10"))


@pytest.fixture(scope="module")
def cifar100(real_data):
    return data.load("cifar100", root=real_data("cifar100"))


def test_cifar10_is_the_published_one(cifar10):
    assert (len(cifar10.train), len(cifar10.test)) == (50_000, 10_000)
    assert (cifar10.classes, cifar10.shape, cifar10.task) == (10, (3, 32, 32), "classification")
    assert cifar10.train.targets[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert cifar10.test.targets.bincount().tolist() == [1000] * 10
    assert content_digest(cifar10) == CATALOGUE["cifar10"].content


def test_cifar100_is_the_published_one_with_fine_labels(cifar100, real_data):
    assert (cifar100.classes, cifar100.shape) == (100, (3, 32, 32))
    assert cifar100.train.targets.bincount().tolist() == [500] * 100
    sentence = data.verify("cifar100", real_data("cifar100"))
    assert "50,000 + 10,000 images" in sentence
    assert "as published" in sentence


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_each_set_is_normalised_with_its_own_pixels_mean_and_std(name, request):
    pipeline = request.getfixturevalue(name).train.pipeline
    images = request.getfixturevalue(name).train.inputs
    values = torch.arange(256, dtype=torch.float64) / 255
    for channel, (mean, std) in enumerate(zip(pipeline.mean, pipeline.std, strict=True)):
        counts = images[:, channel].flatten().bincount(minlength=256).double()
        true_mean = (counts * values).sum() / counts.sum()
        true_std = ((counts * (values - true_mean) ** 2).sum() / counts.sum()).sqrt()
        assert mean == pytest.approx(true_mean.item(), abs=6e-5)  # four digits are written down
        assert std == pytest.approx(true_std.item(), abs=6e-5)


def test_cifar100_with_cifar10s_numbers_says_so(real_data, cifar10, cifar100):
    other = data.load("cifar100", root=real_data("cifar100"), normalisation="cifar10")
    assert other.train.pipeline.mean == cifar10.train.pipeline.mean != cifar100.train.pipeline.mean
    assert "normalised with the numbers of cifar10" in other.note


def test_the_released_codes_deviation_is_the_mean_of_the_images_own(cifar10):
    own = (cifar10.train.inputs[:10_000].float() / 255).flatten(2).std(2).mean(0)
    released = torch.tensor(NORMALISATION["released"].std)
    torch.testing.assert_close(own, released, atol=2e-3, rtol=0)


def test_real_images_are_augmented_as_the_paper_says(cifar10):
    names = [type(a).__name__ for a in cifar10.train.pipeline.augmentations]
    assert names == ["Flip", "Crop", "Cutout"]
    assert cifar10.test.pipeline.augmentations == ()
    order = data.epoch_order(50_000, 256, seed=0, epoch=0)
    x, _ = next(cifar10.train.batches(order, augment_seed=0))
    cut = ((x == 0).all(dim=1).flatten(1).sum(1) >= 64).float().mean()
    assert 0.3 < cut < 0.7


def test_a_subset_is_stratified_small_and_named(real_data):
    small = data.load(
        "cifar10",
        root=real_data("cifar10"),
        train_size=5000,
        downsample=16,
        augment=("flip", "crop"),
    )
    assert small.train.targets.bincount().tolist() == [500] * 10
    assert (small.shape, len(small.test)) == ((3, 16, 16), 10_000)
    assert small.note == "averaged to 16x16; 5000 training samples of 50000"


def test_averaging_is_the_rounded_mean_of_each_square():
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    expected = torch.nn.functional.avg_pool2d(images.double(), 2).add(0.5).floor().to(torch.uint8)
    assert torch.equal(averaged(images, 16), expected)
    assert torch.equal(averaged(images, 32), images)
    with pytest.raises(ValueError, match="must divide the image size 32x32, got 12"):
        averaged(images, 12)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_the_images_of_a_folder(tmp_path, name):
    images = write_small(tmp_path, name)
    assert torch.equal(data.load(name, root=tmp_path).train.inputs, images)


def test_a_changed_pixel_does_not_verify(tmp_path):
    write_small(tmp_path)
    with pytest.raises(ValueError, match=r"is not the published data set: its content's sha256 is"):
        data.verify("cifar10", tmp_path)


class Evil:
    def __reduce__(self):
        return print, ("code from a data file ran",)


def test_a_pickle_cannot_run_code(tmp_path, capsys):
    write_small(tmp_path)
    (tmp_path / FOLDERS["cifar10"] / "data_batch_3").write_bytes(pickle.dumps({b"data": Evil()}))
    with pytest.raises(
        ValueError, match=r"data_batch_3 is not a batch of CIFAR images \(it asks for"
    ):
        data.load("cifar10", root=tmp_path)
    assert capsys.readouterr().out == ""


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="`steppe data fetch cifar10`"):
        data.load("cifar10", root=tmp_path)
    write_small(tmp_path)
    batch = tmp_path / FOLDERS["cifar10"] / "data_batch_2"
    batch.write_bytes(batch.read_bytes()[:1000])
    with pytest.raises(ValueError, match="data_batch_2 is not a batch of CIFAR images"):
        data.load("cifar10", root=tmp_path)
    batch.unlink()
    with pytest.raises(FileNotFoundError, match="has no file data_batch_2"):
        data.load("cifar10", root=tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "cifar10",
            {"downsampl": 16},
            "cifar10 has no option 'downsampl'. Did you mean downsample?",
        ),
        (
            "cifar100",
            {"normalisation": "mnist"},
            "No normalisation is called 'mnist'",
        ),
        ("cifr10", {}, "No data set is called 'cifr10'. Did you mean cifar10"),
        ("fashion-mnist", {"downsample": 14}, "fashion-mnist has no option 'downsample'"),
        ("digits", {"size": 3}, "digits has no option 'size'. It takes none."),
    ],
)
def test_wrong_names_and_options_are_explained(tmp_path, name, options, message):
    write_small(tmp_path, "cifar100")
    with pytest.raises(ValueError) as error:
        data.load(name, root=tmp_path, **options)
    assert message in str(error.value)
