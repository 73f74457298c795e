import math
import sys
import types

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from steppe.lab import models
from steppe.lab.models.resnet import Convolution

CIFAR, IMAGENET = (3, 32, 32), (3, 224, 224)
PUBLISHED = {  # torchvision's and timm's counts; CIFAR's from the reference implementations
    ("vgg16-bn", 10, CIFAR): 14_728_266,
    ("vgg16-bn", 1000, IMAGENET): 138_365_992,
    ("resnet18", 10, CIFAR): 11_173_962,
    ("resnet18", 1000, IMAGENET): 11_689_512,
    ("resnet34", 10, CIFAR): 21_282_122,
    ("resnet34", 1000, IMAGENET): 21_797_672,
    ("resnet50", 10, CIFAR): 23_520_842,
    ("resnet50", 1000, IMAGENET): 25_557_032,
    ("wrn-28-10", 10, CIFAR): 36_479_194,
    ("wrn-16-4", 10, CIFAR): 2_748_890,
    ("wrn-40-2", 10, CIFAR): 2_243_546,
    ("vit-s", 1000, IMAGENET): 22_878_952,
}
SMALL = ["mlp", "small-resnet", "small-conv", "small-vit"]
NARROW = {"wrn-28-10": 0.1, "resnet50": 0.125, "vit-s": 0.125}


def count(model):
    return sum(p.numel() for p in model.parameters())


def narrow(name, classes, shape):
    width = 1.0 if name in SMALL else NARROW.get(name, 0.125)
    return models.build(name, classes=classes, shape=shape, width=width)


@pytest.mark.parametrize(("name", "classes", "shape"), PUBLISHED)
def test_parameter_counts_are_the_published_ones(name, classes, shape):
    with torch.device("meta"):
        model = models.build(name, classes=classes, shape=shape)
    assert count(model) == PUBLISHED[name, classes, shape]


def test_vgg_for_small_images_can_have_three_layers_as_classifier():
    with torch.device("meta"):
        model = models.build("vgg16-bn", classes=10, shape=CIFAR, hidden=512)
    assert count(model) == 14_728_266 + 2 * (512 * 512 + 512)
    assert count(model) == 15_253_578


def test_cifar_vit_is_dim_512_depth_6_mlp_512_without_qkv_bias():
    with torch.device("meta"):
        model = models.build("vit-s", classes=10, shape=CIFAR)
    layer = 512 * 3 * 512 + (512 * 512 + 512) + 2 * (512 * 512 + 512) + 2 * 2 * 512
    embedding = (3 * 4 * 4 * 512 + 512) + 65 * 512 + 512
    assert count(model) == 6 * layer + embedding + 2 * 512 + (512 * 10 + 10) == 9_523_722
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.1}


def test_the_cpu_sized_resnet18_has_width_16():
    model = models.build("resnet18", classes=10, shape=CIFAR, width=0.25)
    assert model.stem[0].weight.shape == (16, 3, 3, 3)
    assert count(model) == 701_466  # the paper's network at a sixteenth of its size


@pytest.mark.parametrize(
    "shape", [(1, 8, 8), (1, 28, 28), (3, 16, 16), CIFAR, (3, 64, 64), (3, 96, 128)]
)
@pytest.mark.parametrize("name", models.names())
def test_every_network_takes_every_image_size(name, shape):
    model = narrow(name, 7, shape)
    assert model(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("name", models.names())
def test_every_network_has_gradients_everywhere_and_second_derivatives(name):
    torch.manual_seed(0)
    model = narrow(name, 5, (3, 16, 16))
    loss = nn.functional.cross_entropy(model(torch.randn(4, 3, 16, 16)), torch.arange(4))
    params = list(model.parameters())
    grads = torch.autograd.grad(loss, params, create_graph=True)
    assert all(g.isfinite().all() for g in grads)
    dead = [n for (n, p), g in zip(model.named_parameters(), grads, strict=True) if not g.any()]
    # One image of the batch may leave a narrow layer's bias unused, never a weight.
    assert not [n for n in dead if n.endswith("weight")]
    product = torch.autograd.grad(sum((g * g).sum() for g in grads), params)
    assert all(h.isfinite().all() for h in product)


def test_small_images_get_a_3x3_stem_without_pooling():
    small = models.build("resnet18", classes=10, shape=CIFAR, width=0.25)
    large = models.build("resnet18", classes=10, shape=IMAGENET, width=0.25)
    assert small.stem(torch.zeros(1, *CIFAR)).shape[2:] == (32, 32)
    assert large.stem(torch.zeros(1, *IMAGENET)).shape[2:] == (56, 56)
    assert large.stages(large.stem(torch.zeros(1, *IMAGENET))).shape[2:] == (7, 7)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_of_2x2_pixels_is_the_plain_one_to_its_second_derivatives(bias, layout):
    torch.manual_seed(0)
    plain = nn.Conv2d(5, 7, 3, padding=1, bias=bias, dtype=torch.float64).to(memory_format=layout)
    ours = Convolution(5, 7, 3, padding=1, bias=bias, dtype=torch.float64).to(memory_format=layout)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(3, 5, 2, 2, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    found = []
    for module in (plain, ours):
        inputs = [x, *module.parameters()]
        out = module(x)
        grads = torch.autograd.grad(out.sin().sum(), inputs, create_graph=True)
        seconds = torch.autograd.grad(sum(g.sin().sum() for g in grads), inputs)
        found.append((out, *grads, *seconds))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2, "padding": 1},
        {"padding": 0, "kernel_size": 2},
        {"padding": 1, "padding_mode": "circular"},
        {"padding": 2, "dilation": 2},
        {"padding": 1, "groups": 2},
    ],
)
def test_another_convolution_of_2x2_pixels_is_left_to_torch(options):
    options = {"kernel_size": 3, **options}
    plain = nn.Conv2d(4, 6, **options)
    ours = Convolution(4, 6, **options)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(3, 4, 2, 2)
    assert torch.equal(ours(x), plain(x))


def test_only_2x2_pixels_become_a_matrix_product():
    conv = Convolution(8, 8, 3, padding=1, bias=False)
    products = {}
    for size in (1, 2, 3, 4):
        with FlopCounterMode(display=False) as counter:
            conv(torch.randn(2, 8, size, size))
        products[size] = set(counter.flop_counts["Global"])
    aten = torch.ops.aten
    assert products == {
        1: {aten.convolution},
        2: {aten.mm},
        3: {aten.convolution},
        4: {aten.convolution},
    }


@pytest.mark.parametrize("name", ["vgg16-bn", "resnet18", "wrn-16-4", "small-conv"])
def test_convolutions_start_he_normal_over_the_fan_out(name):
    torch.manual_seed(0)
    model = models.build(name, classes=10, shape=CIFAR, width=0.5)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            weight = module.weight
            expected = math.sqrt(2 / (weight.shape[0] * weight[0, 0].numel()))
            # The std of n normal values is off by a share of 1/sqrt(2n); five of those.
            assert weight.std().item() == pytest.approx(
                expected, rel=5 / math.sqrt(2 * weight.numel())
            )
            assert module.bias is None or not module.bias.any()
        elif isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert not module.bias.any()
        elif isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
            assert bound * 0.97 < module.weight.abs().max() <= bound


def test_transformers_start_normal_with_std_002():
    torch.manual_seed(0)
    model = models.build("vit-s", classes=10, shape=CIFAR, width=0.5)
    for name, parameter in model.named_parameters():
        if "embed.weight" in name:
            assert parameter.std().item() == pytest.approx(1 / math.sqrt(48), rel=0.02)
        elif parameter.dim() > 1:
            assert parameter.std().item() == pytest.approx(
                0.02, rel=5 / math.sqrt(2 * parameter.numel())
            )
        elif "bias" in name:
            assert not parameter.any()


def test_attention_is_torchs_own():
    torch.manual_seed(0)
    attention = models.build("small-vit", classes=10, shape=CIFAR).blocks[0].attention[1]
    x = torch.randn(3, 5, 64, dtype=torch.float64)
    attention.double()
    reference = nn.MultiheadAttention(64, 4, batch_first=True, dtype=torch.float64)
    reference.in_proj_weight.data = attention.qkv.weight.data
    reference.in_proj_bias.data = attention.qkv.bias.data
    reference.out_proj.weight.data = attention.out.weight.data
    reference.out_proj.bias.data = attention.out.bias.data
    torch.testing.assert_close(attention(x), reference(x, x, x, need_weights=False)[0])


def test_the_global_generator_fixes_the_initial_weights():
    def weights(seed):
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(
            models.build("small-vit", classes=3, shape=(1, 8, 8)).parameters()
        )

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet81", {}, "No model is called 'resnet81'. Did you mean resnet18"),
        ("wrn-27-10", {}, "wrn-27-10: the depth must be 6 n + 4"),
        ("mlp", {"hiden": (3,)}, "mlp has no option 'hiden'. Did you mean hidden?"),
        ("wrn-28-10", {"depth": 16}, "wrn-28-10 has no option 'depth'"),
        ("resnet18", {"width": 0}, "width must be above 0, got 0"),
        ("vit-s", {"patch": 5}, "Patches of 5x5 do not tile images of 32x32"),
        ("torchvision:resnet50", {"width": 0.5}, "has no width multiplier"),
        ("nowhere_at_all:net", {}, "neither installed nor in"),
    ],
)
def test_wrong_names_and_options_say_what_is_right(name, options, message):
    with pytest.raises(ValueError) as error:
        models.build(name, classes=10, shape=CIFAR, **options)
    assert message in str(error.value)


def test_images_are_asked_for_where_a_network_needs_them():
    with pytest.raises(ValueError, match=r"shape must be \(channels, height, width\); got \(12,\)"):
        models.build("resnet18", classes=2, shape=(12,))
    assert models.build("mlp", classes=1, shape=(12,))(torch.zeros(4, 12)).shape == (4, 1)


def test_torchvision_and_timm_get_the_class_count(monkeypatch):
    def resnet50(num_classes=1000, zero_init_residual=False):
        return nn.Linear(2, num_classes, bias=zero_init_residual)

    vision = types.ModuleType("torchvision.models")
    vision.resnet50 = resnet50
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", vision)
    timm = types.ModuleType("timm")
    timm.create_model = lambda name, num_classes, in_chans, **k: nn.Linear(in_chans, num_classes)
    monkeypatch.setitem(sys.modules, "timm", timm)
    model = models.build("torchvision:resnet50", classes=7, shape=CIFAR, zero_init_residual=True)
    assert (model.out_features, model.bias is not None) == (7, True)
    model = models.build("timm:deit_tiny", classes=5, shape=(1, 28, 28))
    assert (model.in_features, model.out_features) == (1, 5)
    with pytest.raises(ValueError, match="Did you mean resnet50"):
        models.build("torchvision:resnet500", classes=7, shape=CIFAR)


def test_a_library_that_does_not_import_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match="timm is not installed"):
        models.build("timm:resnet18", classes=2, shape=CIFAR)


def test_a_users_function_in_the_working_folder(tmp_path, monkeypatch):
    source = """
from torch import nn
def net(classes, hidden=3): return nn.Linear(hidden, classes)
def everything(**kw): return nn.Linear(len(kw), 1)
def wrong(): return 5
"""
    (tmp_path / "my_nets_for_steppe.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    build = models.build
    net = build("my_nets_for_steppe:net", classes=4, shape=CIFAR, hidden=6)
    assert net.weight.shape == (4, 6)
    assert build("my_nets_for_steppe:everything", classes=4, shape=CIFAR, a=1).in_features == 3
    with pytest.raises(ValueError, match="takes classes, hidden, but was given width"):
        build("my_nets_for_steppe:net", classes=4, shape=CIFAR, width=0.5)
    with pytest.raises(TypeError, match=r"must return a torch.nn.Module, got int"):
        build("my_nets_for_steppe:wrong", classes=4, shape=CIFAR)
    with pytest.raises(ValueError, match="No function of the module"):
        build("my_nets_for_steppe:nett", classes=4, shape=CIFAR)
