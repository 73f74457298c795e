"""Wide residual networks (Zagoruyko and Komodakis 2016): WRN-depth-width, for any of both."""

from __future__ import annotations

from torch import Tensor, nn

from steppe.lab.models.layers import image_shape, initialised, is_small, scaled
from steppe.lab.models.resnet import convolution, normed


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
