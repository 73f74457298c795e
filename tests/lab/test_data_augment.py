import pytest
import torch

from steppe.lab.data import MemorySplit, Pipeline, epoch_order
from steppe.lab.data.augment import Crop, Cutout, Flip, parse
from steppe.lab.data.randaugment import RandAugment

FLIP_CROP_CUTOUT = ("flip", "crop", "cutout")


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


def bytes_images(n=64, channels=3, side=32, seed=0):
    return torch.randint(
        1, 256, (n, channels, side, side), generator=draws(seed), dtype=torch.uint8
    )


def split(n=100, names=FLIP_CROP_CUTOUT):
    return MemorySplit(bytes_images(n), torch.arange(n), Pipeline(mean=(0.5,) * 3)).augmented(names)


def test_flip_mirrors_half_of_the_images_and_leaves_the_others():
    images = bytes_images(2000, side=4)
    flipped = Flip()(images, draws())
    same = (flipped == images).flatten(1).all(1)
    assert torch.equal(flipped[~same], images[~same].flip(3))
    assert abs(int(same.sum()) - 1000) < 5 * 22.4  # binomial: sd = sqrt(2000) / 2
    assert torch.equal(Flip(probability=0)(images, draws()), images)


@pytest.mark.parametrize(
    ("side", "padding", "reach"),
    [(32, None, 4), (28, None, 4), (16, None, 2), (32, 3, 3), (8, 0, 0)],
)
def test_crop_is_a_shift_with_zeros_and_every_shift_occurs(side, padding, reach):
    images = bytes_images(500, side=side)
    cropped = Crop(padding)(images, draws())
    shifts = set()
    for image, result in zip(images, cropped, strict=True):
        wide = torch.nn.functional.pad(image, (reach,) * 4)
        found = [
            (y, x)
            for y in range(2 * reach + 1)
            for x in range(2 * reach + 1)
            if torch.equal(wide[:, y : y + side, x : x + side], result)
        ]
        assert len(found) == 1
        shifts.add(found[0])
    # 500 draws over at most 81 shifts: the chance to miss a given one is (80/81)^500 = 0.2 %.
    assert len(shifts) >= (2 * reach + 1) ** 2 - 2
    assert {y for y, _ in shifts} == {x for _, x in shifts} == set(range(2 * reach + 1))


def test_cutout_is_a_square_of_zeros_clipped_at_the_border_in_half_of_the_images():
    images = torch.ones(4000, 3, 32, 32)
    cut = Cutout()(images.clone(), draws()) == 0
    assert torch.equal(cut[:, 0], cut[:, 1])
    holes = cut[:, 0]
    rows, columns = holes.any(2), holes.any(1)
    assert torch.equal(holes, rows.unsqueeze(2) & columns.unsqueeze(1))  # rectangles
    hit = rows.any(1)
    assert abs(int(hit.sum()) - 2000) < 5 * 31.6
    heights = rows.sum(1)[hit]
    assert (heights.min(), heights.max()) == (8, 16)  # the centre is inside: half at least stays
    # A centre in rows 8 to 24 leaves the square whole: 17 of 32 places.
    whole = (heights == 16).float().mean().item()
    assert abs(whole - 17 / 32) < 5 * (0.25 / int(hit.sum())) ** 0.5
    assert (Cutout(probability=1, size=4)(images.clone(), draws()) == 0).flatten(1).any(1).all()


def test_cutout_fills_with_the_mean_colour():
    x, _ = next(split(50, ("cutout:probability=1",)).batches([torch.arange(50)], augment_seed=1))
    raw = split(50).inputs.float() / 255 - 0.5
    changed = x != raw
    changed[(raw - x).abs() < 1e-6] = False
    assert changed.any(dim=1).flatten(1).any(1).all()
    assert (x[changed] == 0).all()


def test_normalisation_is_per_channel():
    pipeline = Pipeline(mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    images = bytes_images(5)
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.6, 0.7])
    expected = (images.double() / 255 - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)
    torch.testing.assert_close(pipeline(images, None).double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("names", [FLIP_CROP_CUTOUT, ("randaugment", "crop", "flip")])
def test_a_resumed_epoch_is_the_same_to_the_bit(names):
    data = split(names=names)
    order = epoch_order(100, 16, seed=0, epoch=0)
    whole = list(data.batches(order, augment_seed=7))
    assert len(whole) == 7
    for start in (1, 4, 6):
        rest = list(data.batches(order, augment_seed=7, start=start))
        assert len(rest) == 7 - start
        for (x, y), (u, v) in zip(whole[start:], rest, strict=True):
            assert torch.equal(x, u)
            assert torch.equal(y, v)
    assert list(data.batches(order, augment_seed=7, start=7)) == []


def test_threads_do_not_change_a_bit():
    data, order = split(names=("randaugment", *FLIP_CROP_CUTOUT)), [torch.arange(100)]
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(next(data.batches(order, augment_seed=3))[0])
    torch.set_num_threads(before)
    assert torch.equal(*results)


def test_positions_and_seeds_are_augmented_differently_and_nothing_global_moves():
    data = split(names=("flip",))
    before = torch.get_rng_state()
    same = torch.arange(100)
    (a, _), (b, _) = data.batches([same, same], augment_seed=0)
    c, _ = next(data.batches([same], augment_seed=1))
    plain, _ = next(data.batches([same], augment_seed=None))
    assert torch.equal(torch.get_rng_state(), before)
    flips = [(x != plain).flatten(1).any(1) for x in (a, b, c)]
    for i in range(3):
        for j in range(i):
            # Independent coins agree in 50 of 100 places, sd 5.
            assert abs(int((flips[i] == flips[j]).sum()) - 50) < 25
    assert torch.equal(plain, data.inputs.float().mul_(1 / 255).sub_(0.5))


def test_the_stored_images_are_never_changed():
    data = split(names=("randaugment", *FLIP_CROP_CUTOUT))
    before = data.inputs.clone()
    list(data.batches([torch.arange(100)] * 3, augment_seed=0))
    list(data.batches([torch.arange(100)], augment_seed=None))
    assert torch.equal(data.inputs, before)


def test_names_carry_options():
    assert parse("crop:padding=2") == Crop(2)
    assert parse("cutout:size=8,probability=1") == Cutout(8, 1)
    assert parse("randaugment:count=3,magnitude=9") == RandAugment(3, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cutuot", "No augmentation is called 'cutuot'. Did you mean cutout?"),
        ("cutout:probabilty=1", "Did you mean probability?"),
        ("cutout:probability=2", "cutout: probability must be in [0, 1], got 2"),
        ("cutout:size=0", "cutout: size must be at least 1, got 0"),
        ("flip:probability=x", "probability must be a number, got 'x'"),
        ("crop:padding=-1", "crop: padding must be at least 0, got -1"),
    ],
)
def test_wrong_names_and_options_are_explained(text, message):
    with pytest.raises(ValueError) as error:
        parse(text)
    assert message in str(error.value)


def test_rows_of_numbers_cannot_be_flipped():
    rows = MemorySplit(torch.zeros(3, 5), torch.zeros(3))
    with pytest.raises(
        ValueError, match=r"work on byte images .* got torch.float32 of shape \(3, 5\)"
    ):
        rows.augmented(("flip",))
    with pytest.raises(ValueError, match="must have one length, got 3 and 2"):
        MemorySplit(torch.zeros(3, 5), torch.zeros(2))
