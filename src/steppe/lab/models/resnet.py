"""Residual networks in CIFAR's and ImageNet's form: ResNet-18, -34, -50 (He et al. 2016), and the wide
WRN-depth-width (Zagoruyko and Komodakis 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from steppe.lab.models.layers import image_shape, initialised, is_small, scaled


class Convolution(nn.Conv2d):
    """A convolution that on a CPU multiplies images of 2x2 pixels by a matrix.

    There a padded 3x3 kernel takes every pixel to every pixel, and five of its nine products are
    with zeros; the last stage of a ResNet on 16x16 images is such (docs/decisions.md).
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1:] != (self.in_channels, 2, 2) or x.device.type != "cpu" or not self._plain:
            return super().forward(x)
        kernel = self.weight.permute(0, 2, 3, 1)
        seen = [kernel[:, 1 - i : 3 - i, 1 - j : 3 - j] for i in (0, 1) for j in (0, 1)]
        matrix = torch.stack(seen).flatten(2).flatten(0, 1)
        bias = None if self.bias is None else self.bias.repeat(4)
        out = nn.functional.linear(x.permute(0, 2, 3, 1).flatten(1), matrix, bias)
        return out.unflatten(1, (2, 2, -1)).permute(0, 3, 1, 2)  # type: ignore[no-any-return]

    @property
    def _plain(self) -> bool:
        """Whether this is a 3x3 convolution padded with zeros, and nothing more."""
        sizes = (self.kernel_size, self.stride, self.padding, self.dilation, self.groups)
        return sizes == ((3, 3), (1, 1), (1, 1), (1, 1), 1) and self.padding_mode == "zeros"


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the image size at stride 1, without a bias (a norm follows)."""
    return Convolution(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)


def normed(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    """A convolution with BatchNorm and ReLU."""
    layer = convolution(inputs, outputs, size, stride)
    return [layer, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


class Residual(nn.Module):
    """relu(body(x) + shortcut(x)); the shortcut is a 1x1 convolution where shapes differ."""

    def __init__(self, body: nn.Sequential, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*normed(inputs, outputs, 1, stride)[:2])
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.shortcut(x))  # type: ignore[no-any-return]


def basic_block(inputs: int, channels: int, stride: int) -> Residual:
    """Two 3x3 convolutions."""
    layers = [*normed(inputs, channels, 3, stride), *normed(channels, channels, 3)[:2]]
    return Residual(nn.Sequential(*layers), inputs, channels, stride)


def bottleneck(inputs: int, channels: int, stride: int) -> Residual:
    """1x1, 3x3 (with the stride, as in ResNet v1.5) and 1x1 to four times the channels."""
    layers = [*normed(inputs, channels, 1), *normed(channels, channels, 3, stride)]
    layers += normed(channels, 4 * channels, 1)[:2]
    return Residual(nn.Sequential(*layers), inputs, 4 * channels, stride)


class ResNet(nn.Module):
    """Stem, stages of residual blocks (each stage halves the image but the first), mean, linear.

    `blocks` says how many a stage has; stage k has `base * 2^k` channels.
    """

    def __init__(
        self,
        classes: int,
        shape: tuple[int, ...],
        width: float = 1.0,
        *,
        blocks: Sequence[int],
        expand: bool = False,
        base: int = 64,
    ) -> None:
        super().__init__()
        colours, _, _ = image_shape("A ResNet", shape)
        small, inputs = is_small(shape), scaled(base, width)
        stem = normed(colours, inputs, 3 if small else 7, 1 if small else 2)
        if not small:
            stem.append(nn.MaxPool2d(3, stride=2, padding=1))
        self.stem = nn.Sequential(*stem)
        block = bottleneck if expand else basic_block
        stages = []
        for stage, count in enumerate(blocks):
            layers, channels = [], scaled(base * 2**stage, width)
            for k in range(count):
                layers.append(block(inputs, channels, 2 if k == 0 and stage > 0 else 1))
                inputs = 4 * channels if expand else channels
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)
        initialised(self)

    def forward(self, x: Tensor) -> Tensor:
        features = self.stages(self.stem(x)).mean(dim=(2, 3))
        return self.head(features)  # type: ignore[no-any-return]


resnet18 = partial(ResNet, blocks=(2, 2, 2, 2))
resnet34 = partial(ResNet, blocks=(3, 4, 6, 3))
resnet50 = partial(ResNet, blocks=(3, 4, 6, 3), expand=True)
small_resnet = partial(ResNet, blocks=(1, 1, 1), base=12)


class PreActivation(nn.Module):
    """x + body(relu(norm(x))); where shapes differ the shortcut starts from relu(norm(x)) too."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.activate = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(inplace=True))
        self.body = nn.Sequential(
            *normed(inputs, outputs, 3, stride),
            nn.Dropout(dropout),
            convolution(outputs, outputs, 3),
        )
        self.shortcut: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        activated = self.activate(x)
        kept = x if self.shortcut is None else self.shortcut(activated)
        return kept + self.body(activated)  # type: ignore[no-any-return]


def wide_resnet(
    classes: int,
    shape: tuple[int, ...],
    width: float = 1.0,
    *,
    depth: int,
    widen: int,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Three stages of (depth - 4) / 6 blocks with 16, 32 and 64 times `widen` channels."""
    if depth < 10 or (depth - 4) % 6 or widen < 1:
        raise ValueError(
            f"wrn-{depth}-{widen}: the depth must be 6 n + 4 (10, 16, 22, 28, 34, 40 …) "
            "and the width at least 1, as in wrn-28-10."
        )
    colours, _, _ = image_shape(f"wrn-{depth}-{widen}", shape)
    inputs = scaled(16, width)
    layers: list[nn.Module] = [convolution(colours, inputs, 3)]
    if not is_small(shape):
        layers = [convolution(colours, inputs, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1)]
    for stage in range(3):
        channels = scaled(16 * widen * 2**stage, width)
        for block in range((depth - 4) // 6):
            stride = 2 if stage and not block else 1
            layers.append(PreActivation(inputs, channels, stride, dropout))
            inputs = channels
    layers += [nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return initialised(nn.Sequential(*layers))
