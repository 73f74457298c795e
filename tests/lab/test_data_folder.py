import math
from pathlib import Path

import pytest
import torch

from steppe.lab import data
from steppe.lab.data.folder import Decoder, crop_box, folder, opened

Image = pytest.importorskip("PIL.Image")


def write_tree(
    root, sizes=((40, 30),), classes=("ant", "bee"), parts=("train", "val"), per_class=4
):
    for part in parts:
        for k, name in enumerate(classes):
            place = root / part / name
            place.mkdir(parents=True)
            for i in range(per_class):
                draws = torch.Generator().manual_seed(1000 * k + i)
                width, height = sizes[i % len(sizes)]
                pixels = torch.randint(
                    0, 256, (height, width, 3), generator=draws, dtype=torch.uint8
                )
                Image.fromarray(pixels.numpy()).save(place / f"{i}.png")
    return root


def batches(split, **options):
    order = data.epoch_order(len(split), 16, seed=0, epoch=0)
    return list(split.batches(order, **({"augment_seed": 5} | options)))


def assert_same(some, others):
    assert len(some) == len(others) > 0
    for (x, y), (u, v) in zip(some, others, strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)


@pytest.fixture(scope="module")
def photos(real_data):
    return data.load(f"folder:{real_data('photos') / 'tiny-imagenet-mini'}", size=56)


def test_real_photographs_load_with_their_classes(photos):
    assert (len(photos.train), len(photos.test), photos.classes) == (500, 200, 10)
    assert photos.train.targets.bincount().tolist() == [50] * 10
    grey = [f for f in photos.train.files if Image.open(f).mode == "L"]
    assert grey, "the sample has grayscale pictures"
    x, y = next(photos.test.batches([torch.arange(32)], augment_seed=None))
    assert (x.shape, x.dtype, y.shape) == ((32, 3, 56, 56), torch.float32, (32,))


def test_full_size_photographs_of_many_sizes(real_data):
    root = real_data("imagenet") / "imagenet-sample-4"
    sample = data.load(f"folder:{root}")
    assert (len(sample.train), len(sample.test), sample.classes) == (104, 40, 4)
    assert sample.shape == (3, 224, 224)
    for split, seed in ((sample.train, 0), (sample.test, None)):
        x, _ = next(split.batches([torch.arange(0, 40, 5)], augment_seed=seed))
        assert x.shape == (8, 3, 224, 224)
        assert x.std() > 0.3
    assert (
        data.verify(f"folder:{root}")
        == f"folder:{root}: 104 + 40 images in 4 classes, every one opens."
    )


def test_workers_change_nothing_and_leave_the_global_generators_alone(photos):
    small = photos.train.subset(torch.arange(0, 500, 8))
    before = torch.get_rng_state()
    alone = batches(small)
    assert_same(alone, batches(small, workers=2))
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(alone[2:], batches(small, start=2, workers=1))
    assert not torch.equal(alone[0][0], batches(small, augment_seed=6)[0][0])


def test_test_images_are_resized_and_cut_from_the_middle(tmp_path):
    write_tree(tmp_path, sizes=((40, 30), (30, 47), (9, 11), (100, 20)))
    tree = folder(tmp_path, size=16, resize=20)
    x, _ = next(tree.test.batches([torch.arange(4)], augment_seed=None))
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    for file, ours in zip(tree.test.files[:4], x, strict=True):
        image = Image.open(file).convert("RGB")
        scale = 20 / min(image.size)
        width, height = max(20, int(image.width * scale)), max(20, int(image.height * scale))
        image = image.resize((width, height), Image.Resampling.BILINEAR)
        left, top = round((width - 16) / 2), round((height - 16) / 2)
        image = image.crop((left, top, left + 16, top + 16))
        pixels = (
            torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(16, 16, 3) / 255
        )
        torch.testing.assert_close(ours, ((pixels - mean) / std).permute(2, 0, 1))


def test_training_crops_have_the_area_and_shape_they_should():
    draws = torch.rand(4000, 10, 4, generator=torch.Generator().manual_seed(0)).tolist()
    boxes = torch.tensor([crop_box(100, 100, tries) for tries in draws])
    left, top, right, bottom = boxes.unbind(1)
    assert left.min() >= 0
    assert top.min() >= 0
    assert right.max() <= 100
    assert bottom.max() <= 100
    width, height = right - left, bottom - top
    area, aspect = width * height / 10_000, (width / height).log()
    assert 0.07 < area.min() < 0.1
    assert area.max() > 0.95
    # Rounding to whole pixels moves the ratio of the smallest crop (25 x 33) by at most 4 %.
    assert aspect.abs().max() < math.log(4 / 3) + 0.04
    assert abs(aspect.mean().item()) < 5 * (2 * math.log(4 / 3) / 12**0.5) / 4000**0.5
    # Places are uniform: the mean of left / (free columns) is 1/2.
    free = 100 - width
    place = (left / free)[free > 5]
    assert abs(place.mean().item() - 0.5) < 0.02


@pytest.mark.parametrize(("width", "height"), [(500, 10), (10, 500), (1, 1)])
def test_odd_shapes_fall_back_to_the_middle(width, height):
    never = [[1.0, 0.5, 0.5, 0.5]] * 10
    left, top, right, bottom = crop_box(width, height, never)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    assert abs((left + right) - width) <= 1
    assert abs((top + bottom) - height) <= 1
    assert (right - left) / (bottom - top) == pytest.approx(
        min(max(width / height, 3 / 4), 4 / 3), rel=0.1
    )


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16"])
def test_every_kind_of_picture_becomes_colour(tmp_path, mode):
    suffix = ".tif" if mode == "CMYK" else ".png"
    Image.new(mode, (20, 14)).save(tmp_path / f"picture{suffix}")
    batch = Decoder(8, 10).batch([tmp_path / f"picture{suffix}"], None)
    assert (batch.shape, batch.dtype) == ((1, 3, 8, 8), torch.uint8)


def test_augmentations_are_chosen_by_name(tmp_path):
    write_tree(tmp_path)
    plain = data.load(f"folder:{tmp_path}", size=16, augment=())
    usual = data.load(f"folder:{tmp_path}", size=16)
    richer = data.load(
        f"folder:{tmp_path}", size=16, augment=("resized-crop", "flip", "randaugment", "cutout")
    )
    x, y, z, t = (
        next(s.batches([torch.arange(8)], augment_seed=1))[0]
        for s in (plain.train, usual.train, richer.train, plain.test)
    )
    assert torch.equal(x, t)  # the same pictures lie in both folders of this tree
    assert not torch.equal(x, y)
    assert (z == 0).any()  # Cutout's mean colour
    assert not (y == 0).any()


def test_subsets_noise_and_validation_work_on_folders(tmp_path):
    write_tree(tmp_path, per_class=10)
    tree = data.load(
        f"folder:{tmp_path}", size=16, train_size=16, label_noise=0.25, validation=0.25
    )
    assert (len(tree.train), len(tree.validation), len(tree.test)) == (12, 4, 20)
    truth = {"ant": 0, "bee": 1}
    wrong = sum(
        truth[Path(file).parent.name] != label
        for split in (tree.train, tree.validation)
        for file, label in zip(split.files, split.targets.tolist(), strict=True)
    )
    assert wrong == 4


def test_imagenet_is_a_folder_of_the_data_root(tmp_path):
    write_tree(tmp_path / "imagenet")
    assert data.load("imagenet", root=tmp_path).shape == (3, 224, 224)
    assert "imagenet" in [found.name for found in data.available(tmp_path)]
    with pytest.raises(FileNotFoundError, match="imagenet is not in .*looked for imagenet/train"):
        data.load("imagenet", root=tmp_path / "nowhere")


def test_a_damaged_picture_is_named_also_by_a_worker(tmp_path):
    write_tree(tmp_path)
    (tmp_path / "train" / "bee" / "1.png").write_bytes(b"not a picture")
    tree = folder(tmp_path, size=16)
    for workers in (0, 1):
        with pytest.raises(ValueError, match=r"bee/1.png cannot be read as an image"):
            batches(tree.train, workers=workers)
    half = (tmp_path / "train" / "ant" / "1.png").read_bytes()
    (tmp_path / "train" / "ant" / "1.png").write_bytes(half[: len(half) // 2])
    with pytest.raises(ValueError, match=r"ant/1.png cannot be read"):
        opened(tmp_path / "train" / "ant" / "1.png")
    with pytest.raises(ValueError, match="cannot be read"):
        data.verify(f"folder:{tmp_path}")


def test_a_wrong_tree_is_explained(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        folder(tmp_path / "nowhere")
    write_tree(tmp_path / "a", parts=("train",))
    with pytest.raises(
        FileNotFoundError, match=r"both a folder 'train' and a folder 'val'.*it has train"
    ):
        folder(tmp_path / "a")
    write_tree(tmp_path / "b")
    (tmp_path / "b" / "val" / "wasp").mkdir()
    with pytest.raises(ValueError, match=r"has classes that .* has not: wasp"):
        folder(tmp_path / "b")
    (tmp_path / "c" / "train").mkdir(parents=True)
    (tmp_path / "c" / "val").mkdir()
    (tmp_path / "c" / "train" / "1.png").touch()
    with pytest.raises(ValueError, match=r"must have one folder of images per class; it has 1.png"):
        folder(tmp_path / "c")
    with pytest.raises(ValueError, match="size=64, resize=32"):
        folder(tmp_path / "b", size=64, resize=32)
    with pytest.raises(ValueError, match=r"has no option 'sise'. Did you mean size"):
        data.load(f"folder:{tmp_path / 'b'}", sise=3)
