"""Watch: who else writes a parameter while a perturbation is in it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from steppe.layout import Perturbed, stored

CLOSE_LOOKS = 2
"""In so many moves, values are compared too: data-dependent initialisation, in the first forward, may
write through `.data`, which leaves no trace."""

ALREADY = (
    "The weights are perturbed already. Leave the perturbed() block, or end the pass that is under way "
    "(backward(), perturber.restore()) first."
)


Marks = tuple[tuple[int, ...], tuple[int, ...]]
"""Versions and places of all parameters."""

_version = attrgetter("_version")


class Watch:
    """Compares versions and places of parameters, between a move and the way back."""

    def __init__(self, params: Sequence[Perturbed]) -> None:
        self._params = params
        plain = all(type(p.param) is nn.Parameter for p in params)
        self._stored = stored(params) if plain else None
        self._moved: Sequence[Perturbed] = ()
        self._marks: Marks = ((), ())
        self._norms: Tensor | None = None
        self._close_looks = 0 if any(p.device.type == "meta" for p in params) else CLOSE_LOOKS

    def marks(self) -> Marks:
        tensors = stored(self._params) if self._stored is None else self._stored
        return tuple(map(_version, tensors)), tuple(map(Tensor.data_ptr, tensors))

    def begin(self, moved: Sequence[Perturbed]) -> None:
        self._moved, self._marks = moved, self.marks()
        if moved and self._close_looks:
            self._close_looks -= 1
            self._norms = self._norms_now()

    def written(self) -> bool:
        return bool(self._moved) and self._marks != self.marks()

    def end(self) -> list[str]:
        """The names of the moved parameters that were written since `begin`."""
        moved, norms, written, marks = self._moved, self._norms, [], self.marks()
        if not moved:
            return []
        if marks != self._marks:
            rows = zip(self._params, *self._marks, *marks, strict=True)
            written = [p.name for p, *then, v, at in rows if then != [v, at] and p in moved]
        if not written and norms is not None:
            now = self._norms_now()
            same = ((norms == now) | (norms.isnan() & now.isnan())).tolist()
            written = [p.name for p, equal in zip(moved, same, strict=True) if not equal]
        self._moved, self._norms = (), None
        return written

    @torch.no_grad()
    def _norms_now(self) -> Tensor:
        wide = torch.promote_types(
            max((p.dtype for p in self._moved), key=lambda dtype: dtype.itemsize), torch.float32
        )
        norms = torch._foreach_norm([p.values for p in self._moved], 2, dtype=wide)
        return torch.stack([norm.cpu() for norm in norms])


def written_by_others(names: Sequence[str]) -> RuntimeError:
    return RuntimeError(
        f"{', '.join(names[:3])}{', …' if names[3:] else ''} changed in the middle of a perturbed pass (or a "
        "perturbed() block), and not by steppe: nn.Embedding(max_norm=…), an optimizer's step, an initialisation "
        "in the first forward, … The weights are back at their values of before the pass, without that change. "
        f"Leave the parameter out, exclude=({names[0]!r},), or change it outside of the pass: before the forward "
        "or after perturber.restore()."
    )
