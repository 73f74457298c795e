"""Every operation of RandAugment against Pillow, pixel for pixel, where Pillow has it."""

import numpy as np
import pytest
import torch

from steppe.lab.data import operations
from steppe.lab.data.randaugment import BLENDS, MOVES, OPERATIONS, RandAugment, apply, matrices

Image = pytest.importorskip("PIL.Image")
ImageEnhance = pytest.importorskip("PIL.ImageEnhance")
ImageOps = pytest.importorskip("PIL.ImageOps")


def pictures(channels):
    """Noise, a smooth ramp, few values, one value: what real and degenerate images look like."""
    draws = torch.Generator().manual_seed(channels)
    noise = torch.randint(0, 256, (8, channels, 32, 24), generator=draws)
    ramp = torch.arange(32).view(1, 1, 32, 1) * 3 + torch.arange(24) * 2 + noise[:4] // 64
    few = torch.randint(0, 3, (2, channels, 32, 24), generator=draws) * 90 + 20
    flat = torch.full((1, channels, 32, 24), 77)
    return torch.cat([noise, ramp, few, flat]).to(torch.uint8)


def through_pillow(images, change):
    done = []
    for image in images:
        array = image.permute(1, 2, 0).numpy()
        picture = Image.fromarray(array[..., 0] if len(image) == 1 else array)
        result = np.array(change(picture))
        done.append(
            torch.from_numpy(result if result.ndim == 3 else result[..., None]).permute(2, 0, 1)
        )
    return torch.stack(done)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("factor", [0.0, 0.1, 0.58, 1.0, 1.42, 1.9])
@pytest.mark.parametrize(
    ("name", "enhance"),
    [
        ("brightness", "Brightness"),
        ("contrast", "Contrast"),
        ("colour", "Color"),
        ("sharpness", "Sharpness"),
    ],
)
def test_blends_are_pillows(name, enhance, factor, channels):
    images = pictures(channels)
    ours = BLENDS[name](images, torch.full((len(images),), factor))
    theirs = through_pillow(images, lambda p: getattr(ImageEnhance, enhance)(p).enhance(factor))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("channels", [1, 3])
def test_tables_are_pillows(channels):
    images = pictures(channels)
    assert torch.equal(
        operations.autocontrast(images), through_pillow(images, ImageOps.autocontrast)
    )
    assert torch.equal(operations.equalize(images), through_pillow(images, ImageOps.equalize))
    for bits in range(1, 9):
        theirs = through_pillow(images, lambda p, bits=bits: ImageOps.posterize(p, bits))
        assert torch.equal(operations.posterize(images, bits), theirs)
    for threshold in (0, 100, 136.5, 255, 256):
        theirs = through_pillow(images, lambda p, t=threshold: ImageOps.solarize(p, t))
        assert torch.equal(operations.solarize(images, threshold), theirs)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("strength", [0.1, 14 / 30, 1.0])
@pytest.mark.parametrize("name", MOVES)
def test_moves_are_pillows(name, strength, channels):
    images = pictures(channels)
    sign = torch.ones(len(images), dtype=torch.long)
    sign[::2] = -1
    ours = apply(name, images, strength, sign)
    for image, way, matrix, result in zip(
        images, sign.tolist(), matrices(name, images, strength, sign), ours, strict=True
    ):

        def change(picture, way=way, matrix=matrix):
            if name == "rotate":
                return picture.rotate(way * 30 * strength)
            return picture.transform(picture.size, Image.Transform.AFFINE, matrix.tolist())

        assert torch.equal(result, through_pillow(image[None], change)[0])


def test_moves_go_as_far_as_their_strength_says():
    image = torch.zeros(1, 1, 20, 20, dtype=torch.uint8)
    image[0, 0, 10, 10] = 255
    right = apply("translate-x", image, 4 / 9, torch.tensor([-1]))  # .45 * 4/9 * 20 = 4 pixels
    assert right.nonzero().tolist() == [[0, 0, 10, 14]]
    up = apply("translate-y", image, 4 / 9, torch.tensor([1]))
    assert up.nonzero().tolist() == [[0, 0, 6, 10]]


def test_every_operation_but_identity_changes_noise_and_keeps_its_shape():
    images = pictures(3)[:4] // 2 + 20
    for name in OPERATIONS[1:]:
        result = apply(name, images, 14 / 30, torch.ones(4))
        assert result.shape == images.shape
        assert result.dtype == torch.uint8
        assert not torch.equal(result, images), name


def test_randaugment_draws_every_operation_equally_often(monkeypatch):
    images, draws = torch.zeros(100, 3, 8, 8, dtype=torch.uint8), torch.Generator().manual_seed(0)
    seen = dict.fromkeys(OPERATIONS, 0)

    def spy(name, part, strength, sign):
        assert strength == 14 / 30
        seen[name] += len(part)
        return part

    monkeypatch.setattr("steppe.lab.data.randaugment.apply", spy)
    for _ in range(70):
        RandAugment()(images, draws)
    # 14,000 draws over 14 operations: 1000 each with a standard deviation of 30.5.
    assert seen.pop("identity") == 0
    assert all(abs(count - 1000) < 5 * 30.5 for count in seen.values())


def test_randaugment_is_a_function_of_its_generator_and_leaves_its_input_alone():
    images = pictures(3)
    before = images.clone()
    one, same, other = (RandAugment()(images, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(images, before)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(RandAugment(count=0)(images, torch.Generator()), images)


def test_wrong_strengths_are_refused():
    with pytest.raises(ValueError, match="magnitude must be 0 to 30, got 31"):
        RandAugment(magnitude=31)
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        RandAugment(count=-1)
