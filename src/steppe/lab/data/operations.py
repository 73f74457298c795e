"""Operations on batches of byte images (N, C, H, W), equal to Pillow's pixel for pixel.

Each takes a strength per batch, or per image where noted, and returns new images.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def grey(images: Tensor) -> Tensor:
    """Luminance (N, 1, H, W) with Pillow's fixed-point weights; one channel is its own."""
    if images.shape[1] == 1:
        return images
    weights = torch.tensor([19595, 38470, 7471], dtype=torch.int32).view(1, 3, 1, 1)
    total = (images.to(torch.int32) * weights).sum(dim=1, keepdim=True)
    return ((total + 0x8000) >> 16).to(torch.uint8)


def blend(base: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """base + factor (images - base) with one factor per image: 0 gives the base, 1 the images."""
    start = base.to(torch.float32)
    mixed = start + factor.view(-1, 1, 1, 1) * (images.to(torch.float32) - start)
    return mixed.clamp_(0, 255).to(torch.uint8)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with black."""
    return blend(torch.zeros_like(images), images, factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image's mean luminance."""
    mean = grey(images).to(torch.float64).mean(dim=(1, 2, 3), keepdim=True).add(0.5).floor()
    return blend(mean.to(torch.uint8).expand_as(images), images, factor)


def colour(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the grey image."""
    return blend(grey(images).expand_as(images), images, factor)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with a smoothed image: 3x3 mean with weight 5 in the middle, border kept."""
    wide = images.to(torch.int32)
    total = 4 * wide[..., 1:-1, 1:-1]
    height, width = images.shape[2] - 2, images.shape[3] - 2
    for row in range(3):
        for column in range(3):
            total = total + wide[..., row : row + height, column : column + width]
    smooth = images.clone()
    smooth[..., 1:-1, 1:-1] = ((2 * total + 13) // 26).to(torch.uint8)  # round(total / 13)
    return blend(smooth, images, factor)


def posterize(images: Tensor, bits: int) -> Tensor:
    """Keep the highest `bits` of every value."""
    return images & (0xFF & ~((1 << (8 - bits)) - 1))


def solarize(images: Tensor, threshold: float) -> Tensor:
    """Invert the values at or above the threshold (256 inverts none)."""
    return torch.where(images >= float(threshold), 255 - images, images)


def autocontrast(images: Tensor) -> Tensor:
    """Stretch every channel to 0..255."""
    values = images.flatten(2).to(torch.float64)
    low, high = values.amin(2, keepdim=True), values.amax(2, keepdim=True)
    scale = 255.0 / (high - low).clamp(min=1)
    stretched = (values * scale - low * scale).clamp(0, 255)
    return torch.where(high > low, stretched, values).to(torch.uint8).view_as(images)


def equalize(images: Tensor) -> Tensor:
    """Make every channel's histogram flat."""
    values = images.flatten(2).to(torch.int64)
    histogram = torch.zeros(*values.shape[:2], 256, dtype=torch.int64)
    histogram.scatter_add_(2, values, torch.ones_like(values))
    brightest = values.amax(2, keepdim=True)
    step = (values.shape[2] - histogram.gather(2, brightest)) // 255
    before = histogram.cumsum(2) - histogram
    table = (before + step // 2) // step.clamp(min=1)
    equalized = table.clamp(max=255).gather(2, values)
    return torch.where(step > 0, equalized, values).to(torch.uint8).view_as(images)


def affine(images: Tensor, matrices: Tensor) -> Tensor:
    """Pixel (x, y) of image n becomes the source pixel at matrices[n] (x, y, 1); 0 outside.

    Nearest neighbour in 16.16 fixed point, as Pillow computes it; `matrices` is (N, 6) float64.
    """
    n, channels, height, width = images.shape
    a, b, c, d, e, f = (matrices[:, k].view(-1, 1, 1) for k in range(6))
    x, y = torch.arange(width).view(1, 1, -1), torch.arange(height).view(1, -1, 1)
    column = (_fixed(c + a * 0.5 + b * 0.5) + _fixed(a) * x + _fixed(b) * y) >> 16
    row = (_fixed(f + d * 0.5 + e * 0.5) + _fixed(d) * x + _fixed(e) * y) >> 16
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    source = torch.where(inside, row * width + column, 0).view(n, 1, -1)
    moved = images.flatten(2).gather(2, source.expand(-1, channels, -1)).view_as(images)
    return moved.masked_fill_(~inside.unsqueeze(1), 0)


def _fixed(values: Tensor) -> Tensor:
    return (values * 65536 + 0.5).floor().to(torch.int64)


def rotation(degrees: float, height: int, width: int) -> list[float]:
    """The affine matrix that turns an image around its centre, anticlockwise."""
    angle = -math.radians(degrees)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = width / 2, height / 2
    return [cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y]
