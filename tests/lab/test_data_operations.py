"""RandAugment: what each of its operations does, how it draws them, and what it refuses."""

import numpy as np
import pytest
import torch

from steppe.lab.data.randaugment import OPERATIONS, RandAugment, apply

Image = pytest.importorskip("PIL.Image")


def one(name, images, strength, way=1):
    """An operation on each image of a batch."""
    done = []
    for image in images:
        array = image.permute(1, 2, 0).numpy()
        picture = Image.fromarray(array[..., 0] if len(image) == 1 else array)
        result = np.atleast_3d(np.array(apply(name, picture, strength, way)))
        done.append(torch.from_numpy(result).permute(2, 0, 1))
    return torch.stack(done)


def pictures(channels):
    """Noise, a smooth ramp, few values, one value: what real and degenerate images look like."""
    draws = torch.Generator().manual_seed(channels)
    noise = torch.randint(0, 256, (8, channels, 32, 24), generator=draws)
    ramp = torch.arange(32).view(1, 1, 32, 1) * 3 + torch.arange(24) * 2 + noise[:4] // 64
    few = torch.randint(0, 3, (2, channels, 32, 24), generator=draws) * 90 + 20
    flat = torch.full((1, channels, 32, 24), 77)
    return torch.cat([noise, ramp, few, flat]).to(torch.uint8)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_batch_holds_what_the_operations_make_of_each_image(channels):
    images = pictures(channels)
    for seed in range(20):
        draws = torch.Generator().manual_seed(seed)
        result = RandAugment(count=1)(images, draws)
        draws = torch.Generator().manual_seed(seed)
        chosen = torch.randint(len(OPERATIONS), (len(images),), generator=draws)
        sign = 1 - 2 * torch.randint(2, (len(images),), generator=draws)
        for k, way, before, after in zip(chosen, sign.tolist(), images, result, strict=True):
            expected = one(OPERATIONS[k], before[None], 14 / 30, way)[0]
            assert torch.equal(after, expected), OPERATIONS[k]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("way", [-1, 1])
@pytest.mark.parametrize("strength", [0.1, 14 / 30, 1.0])
def test_values_change_by_the_stated_amounts(strength, way, channels):
    images = pictures(channels)
    brighter = images.float() * (1 + 0.9 * strength * way)
    found = one("brightness", images, strength, way)
    assert (found.float() - brighter.clamp(0, 255)).abs().max() <= 1
    kept = 8 - round(4 * strength)
    assert torch.equal(one("posterize", images, strength), images >> (8 - kept) << (8 - kept))
    threshold = 255 * (1 - strength)
    inverted = torch.where(images.double() < threshold, images, 255 - images)
    assert torch.equal(one("solarize", images, strength), inverted)
    stretched = one("autocontrast", images[:8], strength)
    assert (stretched.flatten(2).amin(2) == 0).all()
    assert (stretched.flatten(2).amax(2) == 255).all()


def test_a_turn_goes_anticlockwise_by_30_degrees_at_full_strength():
    image = torch.zeros(1, 1, 41, 41, dtype=torch.uint8)
    image[0, 0, 20, 36] = 255  # 16 pixels to the right of the middle
    row, column = one("rotate", image, 1.0)[0, 0].nonzero()[0].tolist()
    assert abs(row - (20 - 16 * 0.5)) <= 1
    assert abs(column - (20 + 16 * 3**0.5 / 2)) <= 1


def test_shears_move_by_three_tenths_of_the_distance():
    image = torch.zeros(1, 1, 21, 41, dtype=torch.uint8)
    image[0, 0, 10, 20] = 255
    assert one("shear-x", image, 1.0)[0, 0].nonzero().tolist() == [[10, 17]]
    assert one("shear-y", image, 1.0, -1)[0, 0].nonzero().tolist() == [[16, 20]]


def test_moves_go_as_far_as_their_strength_says():
    image = torch.zeros(1, 1, 20, 20, dtype=torch.uint8)
    image[0, 0, 10, 10] = 255
    right = one("translate-x", image, 4 / 9, -1)  # .45 * 4/9 * 20 = 4 pixels
    assert right.nonzero().tolist() == [[0, 0, 10, 14]]
    up = one("translate-y", image, 4 / 9)
    assert up.nonzero().tolist() == [[0, 0, 6, 10]]


def test_every_operation_but_identity_changes_noise_and_keeps_its_shape():
    images = pictures(3)[:4] // 2 + 20
    for name in OPERATIONS[1:]:
        result = one(name, images, 14 / 30)
        assert result.shape == images.shape
        assert result.dtype == torch.uint8
        assert not torch.equal(result, images), name


def test_randaugment_draws_every_operation_equally_often(monkeypatch):
    images, draws = torch.zeros(100, 3, 8, 8, dtype=torch.uint8), torch.Generator().manual_seed(0)
    seen = dict.fromkeys(OPERATIONS, 0)

    def spy(name, image, strength, way):
        assert strength == 14 / 30
        seen[name] += 1
        return image

    monkeypatch.setattr("steppe.lab.data.randaugment.apply", spy)
    for _ in range(70):
        RandAugment()(images, draws)
    # 14,000 draws over 14 operations: 1000 each with a standard deviation of 30.5.
    assert all(abs(count - 1000) < 5 * 30.5 for count in seen.values())


def test_randaugment_is_a_function_of_its_generator_and_leaves_its_input_alone():
    images = pictures(3)
    before = images.clone()
    first, same, other = (
        RandAugment()(images, torch.Generator().manual_seed(s)) for s in (1, 1, 2)
    )
    assert torch.equal(images, before)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.equal(RandAugment(count=0)(images, torch.Generator()), images)


def test_wrong_strengths_are_refused():
    with pytest.raises(ValueError, match="magnitude must be 0 to 30, got 31"):
        RandAugment(magnitude=31)
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        RandAugment(count=-1)
