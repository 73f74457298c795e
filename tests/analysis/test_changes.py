"""What rounding, pruning, noise, blur and contrast do to tensors, against torch's and torchao's own."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from steppe.analysis import (
    Blur,
    Contrast,
    InputNoise,
    Problem,
    Pruning,
    Rounding,
    TwoOfFour,
    WeightNoise,
    robustness,
)
from steppe.analysis.changes import input_scale, rounded
from steppe.noise import Draw

DRAW = Draw(seed=0, step=0)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounding_is_torchs_fake_quantise(bits):
    w, top = drawn(6, 4, 3, 3), 2 ** (bits - 1) - 1
    scale = w.abs().amax((1, 2, 3)) / top
    zero = torch.zeros(6, dtype=torch.int32)
    by_torch = torch.fake_quantize_per_channel_affine(w, scale, zero, 0, -top, top)
    torch.testing.assert_close(rounded(w, bits, "filter"), by_torch)
    whole = torch.fake_quantize_per_tensor_affine(w, float(w.abs().max() / top), 0, -top, top)
    torch.testing.assert_close(rounded(w, bits, "tensor"), whole)


def test_a_group_has_a_scale_of_its_own_and_the_last_may_be_shorter():
    w = drawn(3, 10)
    parts = [rounded(part, 3, "filter") for part in w.split(4, dim=1)]
    assert torch.equal(rounded(w, 3, 4), torch.cat(parts, 1))


def test_two_bits_are_three_levels_and_a_filter_of_zeros_stays():
    w = torch.cat([drawn(1, 50), torch.zeros(1, 50)])
    there = rounded(w, 2, "filter")
    assert len(there[0].unique()) == 3
    assert torch.equal(there[1], w[1])


def test_thirty_two_bits_change_nothing_that_counts():
    w = drawn(8, 20)
    bound = w.abs().amax(1, keepdim=True) / 2**31
    assert ((rounded(w, 32, "filter") - w).abs() <= bound).all()


@pytest.mark.parametrize("amount", [0.0, 0.3, 0.75, 1.0])
def test_pruning_is_torchs(amount):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3))
    last = torch.channels_last  # which torch's own pruning cannot take
    weights = [layer.weight.detach().contiguous(memory_format=last) for layer in net]
    apart, together = copy.deepcopy(net), copy.deepcopy(net)
    for layer in apart:
        prune.l1_unstructured(layer, "weight", amount)
    prune.global_unstructured(
        [(layer, "weight") for layer in together], prune.L1Unstructured, amount=amount
    )
    for scope, other in (("tensor", apart), ("global", together)):
        ours = Pruning(amount, scope).weights(weights, DRAW)
        for w, layer in zip(ours, other, strict=True):
            assert torch.equal(w, layer.weight)


def test_two_of_four_keeps_the_largest_two_along_the_inputs():
    w = torch.tensor([[1.0, -4.0, 3.0, 2.0, 0.1, 0.2, 0.3, -0.4]])
    conv = w.T.reshape(1, 8, 1, 1).expand(2, 8, 3, 3).contiguous(memory_format=torch.channels_last)
    kept = torch.tensor([[0.0, -4.0, 3.0, 0.0, 0.0, 0.0, 0.3, -0.4]])
    linear, convolution, odd, vector = TwoOfFour().weights(
        [w, conv, drawn(4, 6), torch.ones(4)], DRAW
    )
    assert torch.equal(linear, kept)
    assert torch.equal(convolution, kept.T.reshape(1, 8, 1, 1).expand(2, 8, 3, 3))
    assert torch.equal(odd, drawn(4, 6))
    assert torch.equal(vector, torch.ones(4))


def test_weight_noise_displaces_each_filter_by_its_ratio_and_signs_are_opposite():
    weights = [drawn(50, 400), 3 * drawn(20, 10, 6, 6, seed=1), drawn(3000, seed=2)]
    plus = WeightNoise(0.2).weights(weights, Draw(seed=3, step=0))
    minus = WeightNoise(0.2).weights(weights, Draw(seed=3, step=0, sign=-1.0))
    other = WeightNoise(0.2).weights(weights, Draw(seed=3, step=1))
    for w, a, b, c in zip(weights, plus, minus, other, strict=True):
        torch.testing.assert_close(a - w, w - b, rtol=1e-4, atol=1e-6)
        assert not torch.equal(a, c)
        rows = len(w) if w.ndim > 1 else 1
        moved = (a - w).reshape(rows, -1).norm(dim=1) / w.reshape(rows, -1).norm(dim=1)
        entries = w.numel() // rows
        # ‖z‖/sqrt(d) has a standard deviation of 1/sqrt(2d).
        assert ((moved / 0.2 - 1).abs() < 5 / (2 * entries) ** 0.5).all()


def test_weight_noise_does_not_depend_on_the_memorys_order():
    w = drawn(8, 8, 3, 3)
    last = w.contiguous(memory_format=torch.channels_last)
    (a,), (b,) = (WeightNoise(0.1).weights([one], DRAW) for one in (w, last))
    torch.testing.assert_close(a, b)  # the norms are summed in another order


def test_input_noise_is_in_units_of_each_channel_and_the_same_in_any_batches():
    x = torch.stack([drawn(64, 8, 8), 10 * drawn(64, 8, 8, seed=1)], 1)
    scale = input_scale(x)
    whole = InputNoise(0.5).inputs(x, 0, scale, DRAW)
    later = InputNoise(0.5).inputs(x[40:], 40, scale, DRAW)
    assert torch.equal(whole[40:], later)
    moved = (whole - x).std((0, 2, 3)) / x.std((0, 2, 3))
    torch.testing.assert_close(moved, torch.full((2,), 0.5), rtol=0.05, atol=0)


def test_blur_keeps_a_flat_image_and_spreads_a_point():
    flat = torch.full((1, 2, 9, 9), 3.0)
    torch.testing.assert_close(Blur(1.0).inputs(flat, 0, torch.ones(()), DRAW), flat)
    point = torch.zeros(1, 1, 21, 21)
    point[0, 0, 10, 10] = 1
    blurred = Blur(1.5).inputs(point, 0, torch.ones(()), DRAW)[0, 0]
    at = torch.arange(21.0) - 10
    variance = (blurred.sum(0) * at**2).sum() / blurred.sum()
    torch.testing.assert_close(variance, torch.tensor(1.5**2), rtol=0.05, atol=0)


def test_contrast_keeps_the_mean_and_shrinks_the_rest():
    x = drawn(3, 2, 6, 6) + 5
    y = Contrast(0.25).inputs(x, 0, torch.ones(()), DRAW)
    torch.testing.assert_close(y.mean((2, 3)), x.mean((2, 3)))
    torch.testing.assert_close(y.std((2, 3)), 0.25 * x.std((2, 3)))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Rounding(1), "bits must be a whole number from 2 to 32, got 1"),
        (lambda: Rounding(4, "row"), "per must be .* got 'row'"),
        (lambda: Rounding(4, True), "per must be .* got True"),
        (lambda: Pruning(1.5), r"amount must be in \[0, 1\], got 1.5"),
        (lambda: Pruning(0.5, "layer"), "scope must be .* got 'layer'"),
        (lambda: WeightNoise(-1.0), "ratio must be finite and at least 0, got -1"),
        (lambda: Blur(float("nan")), "pixels must be finite"),
    ],
)
def test_what_no_change_can_be_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.fixture(scope="module")
def trained_mlp():
    """A net trained on scikit-learn's digits, and test images."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 8 - 1, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for rows in torch.randint(900, (250, 64)):
        optimizer.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
    return net.eval(), (x[900:], y[900:])


@pytest.mark.parametrize(("bits", "more_levels"), [(8, 256 / 255), (4, 16 / 15)])
def test_rounding_predicts_what_torchao_does(trained_mlp, bits, more_levels):
    """torchao has one level more below zero and clips the largest weight by half a step."""
    ao = pytest.importorskip("torchao.quantization")
    net, (x, y) = trained_mlp
    quantised = copy.deepcopy(net)
    config = {8: ao.Int8WeightOnlyConfig, 4: lambda: ao.IntxWeightOnlyConfig(torch.int4)}[bits]()
    ao.quantize_(quantised, config)
    for theirs, layer in zip(quantised[::2], net[::2], strict=True):
        w = layer.weight.detach()
        step = w.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        ours, real = rounded(w, bits, "filter"), theirs.weight.dequantize()
        assert ((ours - real).abs() <= step * 1.001).all()
        error = (ours - w).norm() / (real - w).norm()
        assert 0.9 < error / more_levels < 1.1
    with torch.no_grad():
        real_accuracy = (quantised(x).argmax(1) == y).double().mean().item()
    predicted = robustness(Problem(net, F.cross_entropy, (x, y)), [Rounding(bits)]).accuracy[0, 1]
    # Two roundings of equal size disagree on few samples.
    assert abs(predicted.item() - real_accuracy) < 0.01
