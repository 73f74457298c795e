"""Vision transformers (Dosovitskiy et al. 2021): ViT-S for CIFAR and ImageNet, and a small one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from steppe.lab.models.layers import image_shape, initialise_transformer, is_small, scaled


@dataclass(frozen=True)
class Size:
    """The measures of a transformer; `grid` patches lie along the shorter side of an image."""

    depth: int
    heads: int
    head_dim: int
    mlp: int
    grid: int
    dropout: float
    qkv_bias: bool

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim


CIFAR = Size(depth=6, heads=8, head_dim=64, mlp=512, grid=8, dropout=0.1, qkv_bias=False)
IMAGENET = Size(depth=12, heads=6, head_dim=64, mlp=1536, grid=7, dropout=0.0, qkv_bias=True)
TINY = Size(depth=3, heads=4, head_dim=16, mlp=128, grid=4, dropout=0.0, qkv_bias=True)


class Attention(nn.Module):
    """Softmax attention, written out: torch's fused kernel has no second derivative on the CPU,
    and Hessian-vector products need one."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.dim, 3 * size.dim, bias=size.qkv_bias)
        self.out = nn.Linear(size.dim, size.dim)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, dim = x.shape
        qkv = self.qkv(x).view(samples, tokens, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(dim=-1)
        mixed = (weights @ v).transpose(1, 2).reshape(samples, tokens, dim)
        return self.dropout(self.out(mixed))  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(size.dim), Attention(size))
        self.mlp = nn.Sequential(
            nn.LayerNorm(size.dim),
            nn.Linear(size.dim, size.mlp),
            nn.GELU(),
            nn.Dropout(size.dropout),
            nn.Linear(size.mlp, size.dim),
            nn.Dropout(size.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)  # type: ignore[no-any-return]


class ViT(nn.Module):
    """Patches and a class token with learned positions, blocks, norm, linear.

    By default CIFAR's ViT-S or ImageNet's ViT-S/32, by `shape`. `width` takes away whole heads, so a
    head keeps its dimension.
    """

    def __init__(
        self,
        classes: int,
        shape: tuple[int, ...],
        width: float = 1.0,
        *,
        size: Size | None = None,
        patch: int | None = None,
        depth: int | None = None,
        dropout: float | None = None,
    ) -> None:
        super().__init__()
        colours, height, side = image_shape("A vision transformer", shape)
        size = size or (CIFAR if is_small(shape) else IMAGENET)
        size = replace(
            size,
            heads=scaled(size.heads, width),
            mlp=scaled(size.mlp, width),
            depth=size.depth if depth is None else depth,
            dropout=size.dropout if dropout is None else dropout,
        )
        patch = patch_size(height, side, size.grid) if patch is None else patch
        if height % patch or side % patch:
            raise ValueError(f"Patches of {patch}x{patch} do not tile images of {height}x{side}.")
        tokens = (height // patch) * (side // patch)
        self.embed = nn.Conv2d(colours, size.dim, patch, stride=patch)
        self.token = nn.Parameter(torch.empty(1, 1, size.dim))
        self.positions = nn.Parameter(torch.empty(1, tokens + 1, size.dim))
        self.dropout = nn.Dropout(size.dropout)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.depth)))
        self.norm = nn.LayerNorm(size.dim)
        self.head = nn.Linear(size.dim, classes)
        initialise_transformer(self)
        nn.init.trunc_normal_(self.token, std=0.02)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.embed(images).flatten(2).transpose(1, 2)
        token = self.token.expand(len(patches), -1, -1)
        x = self.dropout(torch.cat([token, patches], dim=1) + self.positions)
        return self.head(self.norm(self.blocks(x))[:, 0])  # type: ignore[no-any-return]


def patch_size(height: int, width: int, grid: int) -> int:
    """The patch that tiles the image and is nearest to `grid` patches along the shorter side.

    >>> patch_size(32, 32, 8), patch_size(28, 28, 8), patch_size(224, 224, 7)
    (4, 4, 32)
    """
    divisors = [d for d in range(1, min(height, width) + 1) if not (height % d or width % d)]
    return min(divisors, key=lambda d: (abs(min(height, width) / grid - d), d))


small_vit = partial(ViT, size=TINY)
