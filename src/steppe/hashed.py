"""Gaussian noise from a hash of each weight's place, in one compiled kernel that also adds it.

torch's own generators draw one value after the other; a hash has no order, so Inductor spreads it
over vector lanes and threads and fuses it with scaling and addition. Logarithm and cosine are
polynomials of plain multiplications and additions, right to 1e-7: the same bits come out whatever
the number of threads, where library functions differ between vector and scalar code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from steppe.noise import Draw
from steppe.slots import Rows, Slot

FEW = 2**14
"""Parameters with fewer weights (and vectors) are drawn together: each call of a kernel costs
about 50 µs."""


def standard_normal(places: Tensor, key: Tensor) -> Tensor:
    """One standard normal value for each place (int32), by Box and Muller from a keyed hash.

    The keys come between its rounds: added to the place they would only shift the sequence. The angle
    is one more round on what the radius was made of: a value has 32 random bits, as a torch float has 24.
    """
    x = (places ^ _shifted(places, 16)) * -2048144789 ^ key[0]
    x = (x ^ _shifted(x, 13)) * -1028477387 + key[1]
    x = (x ^ _shifted(x, 16)) * -2048144789 ^ key[2]
    x = x ^ _shifted(x, 14)
    turns = ((x * -1640531535 + key[3]) ^ _shifted(x, 15)) * -1028477387
    radius = ((x & 0x7FFFFFFF).to(torch.float32) + 0.5) * 2.0**-31
    return (-2 * _log(radius)).clamp_min(0).sqrt() * _cos(turns.to(torch.float32) * 2.0**-32)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift right without copies of the sign bit."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def _log(u: Tensor) -> Tensor:
    """ln u = exponent ln 2 + ln m with m in [sqrt(1/2), sqrt(2))."""
    bits = u.view(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23
    x = (bits - (exponent << 23)).view(torch.float32) - 1
    p = 0.08743945352816888 * x - 0.143773305682485
    p = p * x + 0.1494909547622369
    p = p * x - 0.16560695991922683
    p = p * x + 0.1995697748305246
    p = p * x - 0.2500215346095921
    p = p * x + 0.3333418333852432
    p = p * x - 0.4999998703228477
    p = p * x + 0.9999999742674385
    return exponent.to(torch.float32) * 0.6931471805599453 + p * x


def _cos(turns: Tensor) -> Tensor:
    """cos(2 pi turns) for turns in [-1/2, 1/2], as a sine around a quarter turn."""
    t = 0.25 - turns.abs()
    s = t * t
    p = 39.760722075176005 * s - 76.58128455935035
    p = p * s + 81.60248074286918
    p = p * s - 41.34168066806331
    p = p * s + 6.283185280261412
    return p * t


def _add(values: Tensor, std: Tensor, key: Tensor) -> None:
    places = torch.arange(values.numel(), dtype=torch.int32, device=values.device)
    values.add_(standard_normal(places.view(values.shape), key) * std)


class _Add(Protocol):
    def __call__(self, values: Tensor, std: Tensor, key: Tensor) -> None: ...


@cache
def compiled_add() -> _Add:
    # fullgraph: beyond torch's limit of recompilations it raises, instead of running uncompiled,
    # which would round otherwise
    return torch.compile(_add, dynamic=True, fullgraph=True)


def check(device: torch.device) -> None:
    """Compile now, before anything depends on it, or say what is missing."""
    try:
        with torch.no_grad():
            key = torch.tensor(Draw(0, 0).key(0), dtype=torch.int32, device=device)
            compiled_add()(torch.zeros(2, 3, device=device), torch.ones(2, 1, device=device), key)
    except Exception as error:
        raise RuntimeError(
            "compile_noise=True needs what torch.compile needs (a C++ compiler on the CPU, Triton on "
            f"a GPU), and it failed: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error


@torch.no_grad()
def add_noise(slots: Sequence[Slot], std: Tensor, draw: Draw) -> None:
    """Add noise with this std per filter to the (whole) parameters of these slots."""
    all_rows = [Rows(slot, std, draw.sign) for slot in slots]
    large = [rows.values.numel() >= FEW and rows.values.dim() == 2 for rows in all_rows]
    keys = torch.tensor([draw.key(number) for number in range(len(slots) + 1)], dtype=torch.int32)
    keys = keys.to(std.device, non_blocking=True)
    add = compiled_add()
    for number, rows in enumerate(all_rows):
        if large[number]:
            add(rows.values, rows.std, keys[number + 1].to(rows.values.device))
    few = [rows for rows, is_large in zip(all_rows, large, strict=True) if not is_large]
    if not few:
        return
    counts = [rows.values.numel() for rows in few]
    drawn = torch.zeros(2, -(-sum(counts) // 2), device=std.device)
    add(drawn, torch.ones(2, 1, device=std.device), keys[0])
    for rows, part in zip(few, drawn.view(-1)[: sum(counts)].split(counts), strict=True):
        eps = part.view(rows.values.shape).to(rows.values.device)
        rows.values.add_(eps * rows.std)
