"""Frozen layers: noise on weights that are not trained, without a copy of them.

A backup of a frozen base is as large as the base. So a frozen linear layer computes with W + E out of
place, a few rows at a time, and its backward draws the same E again. The slope of the loss along E is the
sum of <dL/dy, x Eᵀ>, which needs no gradient of the weight.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from steppe.distributed import is_sharded
from steppe.noise import PARALLEL_FROM, Draw, Perturbed, Stretch, spread, standard_normal_

if TYPE_CHECKING:
    from steppe.methods import Method

CHUNK = 2**18
"""Weights that exist at once with noise in them, or one block of noise where that is more."""

LowRank = Callable[[], "tuple[Tensor, Tensor] | None"]
"""(B, A) where a layer computes with W + B A, None where it has nothing to add."""


@dataclass(eq=False)
class Noise:
    """The noise of one pass in one layer, and what it is seen to do to the loss."""

    seed_of: Callable[[int], int]
    std: Tensor
    """One for each row, with the sign of the draw."""
    slope: Tensor | None
    """<dL/dy, x Eᵀ> so far; None where it is not measured."""
    ran: bool = False


class Piece(NamedTuple):
    """Rows of a weight that take their values from one block of noise, of this size."""

    number: int
    size: int
    rows: Stretch


class FrozenLinear:
    """One frozen weight of linear layers, and the noise that is in it during a pass."""

    def __init__(
        self, param: nn.Parameter, modules: Sequence[nn.Linear], low_rank: LowRank | None = None
    ) -> None:
        self.param, self.modules, self.low_rank = param, list(modules), low_rank
        self.noise: Noise | None = None
        self.chunks: list[list[Piece]] = []
        """Rows that exist at once, cut from the blocks that their noise is drawn in."""
        self._wide = torch.promote_types(param.dtype, torch.float32)

    def place(self, piece: Piece) -> None:
        """Take these rows, which follow those of before, into the last chunk if it is not full."""
        if not self.chunks or sum(p.rows.stop - p.rows.start for p in self.chunks[-1]) >= CHUNK:
            self.chunks.append([])
        self.chunks[-1].append(piece)

    @torch.no_grad()
    def row_norms(self, dtype: torch.dtype) -> Tensor:
        """‖·‖ of each row of what the layer computes with: W, or the merged W + B A."""
        low = None if self.low_rank is None else self.low_rank()
        norms = []
        for pieces in self.chunks:
            rows = _rows(pieces)
            part = self.param.detach()[rows].to(self._wide)
            if low is not None:
                B, A = (t.detach().to(self._wide) for t in low)
                part = torch.addmm(part, B[rows], A)
            norms.append(torch.linalg.vector_norm(part, dim=1, dtype=dtype))
        return torch.cat(norms)

    def unit_noise(self, noise: Noise) -> Iterator[tuple[slice, Tensor]]:
        """Standard normal values for one chunk of rows after the other."""
        serial = self.param.device.type != "cpu" or self.param.numel() < PARALLEL_FROM
        for pieces in self.chunks:
            rows = _rows(pieces)
            shape = (rows.stop - rows.start, self.param.shape[1])
            unit = torch.empty(shape, dtype=self._wide, device=self.param.device)

            def draw(piece: Piece, unit: Tensor = unit, first: int = rows.start) -> None:
                part = unit[piece.rows.first - first : piece.rows.last - first].view(-1)
                # a block is drawn whole and then cut: torch's values depend on the number
                whole = part if piece.size == part.numel() else part.new_empty(piece.size)
                standard_normal_(whole, noise.seed_of(piece.number))
                if whole is not part:
                    part.copy_(whole[piece.rows.start : piece.rows.stop])

            spread(draw, pieces, 1 if serial else torch.get_num_threads())
            yield rows, unit

    def moved(self, rows: slice, unit: Tensor, std: Tensor) -> Tensor:
        """Rows of W + E in the weight's own format, in the memory of the unit noise where possible."""
        torch.addcmul(self.param.detach()[rows], unit, std[rows, None].to(unit), out=unit)
        return unit.to(self.param.dtype)


def _rows(pieces: Sequence[Piece]) -> slice:
    return slice(pieces[0].rows.first, pieces[-1].rows.last)


class NoisyLinear(torch.autograd.Function):
    """x (W + E)ᵀ + b with an E that exists in chunks alone, and is drawn again for the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        anchor: Tensor | None,
        layer: FrozenLinear,
        noise: Noise,
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        y = flat.new_empty(len(flat), len(weight))
        for rows, unit in layer.unit_noise(noise):
            moved = layer.moved(rows, unit, noise.std).to(flat.dtype)
            torch.mm(flat, moved.t(), out=y[:, rows])
        if bias is not None:
            y += bias
        # the weight is kept as F.linear does: whoever writes it before backward is found out
        ctx.save_for_backward(weight, x if anchor is not None else None)
        ctx.layer, ctx.noise = layer, noise
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _, x = ctx.saved_tensors
        layer, noise = ctx.layer, ctx.noise
        flat = gradient.reshape(-1, gradient.shape[-1])
        towards_x: Tensor | None = None
        needed = ctx.needs_input_grad[0] or x is not None
        for rows, unit in layer.unit_noise(noise) if needed else ():
            part = flat[:, rows]
            if x is not None:
                along = x.reshape(-1, x.shape[-1]) @ unit.to(x.dtype).t()
                std = noise.std[rows]
                noise.slope += (along.to(std) * part).sum(0) @ std
            if ctx.needs_input_grad[0]:
                new = part @ layer.moved(rows, unit, noise.std).to(flat.dtype)
                if towards_x is None:
                    towards_x = new if len(layer.chunks) == 1 else new.to(unit.dtype)
                else:
                    towards_x += new
        if towards_x is not None:
            towards_x = towards_x.to(flat.dtype).view(*gradient.shape[:-1], -1)
        bias = flat.sum(0) if ctx.needs_input_grad[2] else None
        return towards_x, None, bias, None, None, None


class Forward:
    """Stands in for the forward of a frozen linear layer; outside of a pass it is that forward."""

    def __init__(self, layer: FrozenLinear, module: nn.Linear) -> None:
        self._layer, self._module = layer, module

    def __call__(self, input: Tensor) -> Tensor:  # named as in nn.Linear.forward
        noise = self._layer.noise
        return (
            nn.Linear.forward(self._module, input) if noise is None else self._noisy(input, noise)
        )

    @_disable_dynamo
    def _noisy(self, x: Tensor, noise: Noise) -> Tensor:
        layer, module, noise.ran = self._layer, self._module, True
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(kind))
        bias = None if module.bias is None else module.bias.to(x.dtype)
        # of a layer whose input needs no gradient, backward is asked for by this alone
        measured = noise.slope is not None and torch.is_grad_enabled()
        anchor = torch.zeros((), requires_grad=True) if measured else None
        return NoisyLinear.apply(x, module.weight, bias, anchor, layer, noise)  # type: ignore[no-untyped-call,no-any-return]


class FrozenLayers:
    """All frozen weights that take part in the noise."""

    def __init__(
        self, params: Sequence[Perturbed], noise: Sequence[Mapping[int, list[Stretch]]]
    ) -> None:
        """`noise`: the blocks of noise of all `params`, by their numbers."""
        self.places = [(p.layer, p.filters) for p in params if p.layer is not None]
        """Which filters among all are whose."""
        self.metered = False  # whether the next pass measures what its noise does to the loss
        blocks = (block for group in noise for block in group.items())
        for number, stretches in blocks if self.places else ():
            for rows in stretches:
                if (layer := rows.owner.layer) is not None:
                    layer.place(Piece(number, stretches[-1].stop, rows))

    @property
    def now(self) -> list[tuple[FrozenLinear, slice]]:
        """Those that are frozen still: others are written like everything that is trained."""
        return [(layer, place) for layer, place in self.places if not layer.param.requires_grad]

    @property
    def _noises(self) -> list[Noise]:
        return [layer.noise for layer, _ in self.places if layer.noise is not None]

    @property
    def noisy(self) -> bool:
        return bool(self._noises)

    def write_norms(self, norms: Tensor) -> None:
        for layer, place in self.now:
            norms[place] = layer.row_norms(norms.dtype).to(norms.device)

    def begin(
        self, draw: Draw, seed_of: Callable[[int], int], std: Tensor, *, shaped: bool = False
    ) -> None:
        """Until `end()` the layers compute with noise of this std per filter."""
        if self.noisy or (shaped and self.now):
            raise RuntimeError(
                "Frozen layers take noise once a pass, with one std for each filter: a perturbation may "
                "call add_noise() twice, or with factor=, only without include_frozen."
            )
        for layer, place in self.now:
            rows = (draw.sign * std[place]).to(layer.param.device)
            slope = rows.new_zeros(()) if self.metered else None
            layer.noise = Noise(seed_of, rows, slope)

    def check_begun(self, noise: object) -> None:
        """Raise where a perturbation moved the weights in a way that frozen layers cannot follow."""
        if self.now and not self.noisy:
            raise RuntimeError(
                f"{type(noise).__name__} did not call weights.add_noise(), which alone reaches frozen "
                "layers. Leave include_frozen out."
            )

    def end(self) -> None:
        for layer, _ in self.places:
            layer.noise = None

    def slope(self, like: Tensor) -> Tensor | None:
        """<E, dL/dW> of the pass so far, over all layers; None where none is measured."""
        there = [noise.slope.to(like) for noise in self._noises if noise.slope is not None]
        return torch.stack(there).sum() if there else None

    def check_ran(self) -> None:
        """Raise where a pass is over and no layer was called with its noise."""
        if (noises := self._noises) and not any(noise.ran for noise in noises):
            raise RuntimeError(
                "No frozen layer that takes noise was called in this pass, so its noise did nothing: the "
                "model reads their weights without calling them (fused attention or encoder layers do). "
                "Leave these layers out."
            )

    def install(self) -> None:
        for layer, _ in self.places:
            for module in layer.modules:
                vars(module)["forward"] = Forward(layer, module)

    def remove(self) -> None:
        self.end()
        for layer, _ in self.places:
            for module in layer.modules:
                if isinstance(vars(module).get("forward"), Forward):
                    del vars(module)["forward"]
            layer.modules, layer.low_rank = [], None


def find_frozen(
    model: nn.Module,
    method: Method,
    names: Mapping[nn.Parameter, Sequence[str]],
    patterns: Sequence[str],
) -> dict[nn.Parameter, FrozenLinear]:
    """The frozen weights with these names, or why they cannot have noise."""
    low_rank: Mapping[nn.Module, LowRank] = {}
    if "peft" in sys.modules:
        from steppe.integrations.peft import low_rank_parts

        low_rank = low_rank_parts(model, strict=method.merged)
    if method.merged and not low_rank:
        raise ValueError(
            "flat_lora() perturbs LoRA layers, and this model has none. Make them with peft.get_peft_model("
            "model, LoraConfig(...)), or give its frozen linear layers to steppe.rwp() with include_frozen."
        )
    found: dict[nn.Parameter, FrozenLinear] = {}
    refused: dict[str, str] = {}
    for pattern in patterns or (["*base_layer.weight"] if method.merged else []):
        named = {p: n for p, known in names.items() for n in known if fnmatchcase(n, pattern)}
        if not named and patterns:
            frozen = [known[0] for p, known in names.items() if not p.requires_grad]
            raise ValueError(
                f"include_frozen={pattern!r} matches no parameter of the model. Its frozen ones are "
                f"{first_few(frozen) or 'none'}."
            )
        for p, name in named.items():
            if not p.requires_grad and p not in found:
                owners: list[Any] = [m for m in model.modules() if p in {*m._parameters.values()}]
                if reason := _reason_to_refuse(p, owners):
                    refused[name] = reason
                else:
                    found[p] = FrozenLinear(p, owners, low_rank.get(owners[0]))
    if (found or refused) and any(is_sharded(p) for p in model.parameters()):
        raise ValueError(
            "Noise on frozen layers is not supported in a model under fully_shard(). Use "
            "DistributedDataParallel."
        )
    if refused or (method.merged and not found):
        nothing = "the frozen weights under LoRA layers", "all are trained, excluded or quantized"
        name, reason = next(iter(refused.items()), nothing)
        who = "include_frozen names" if patterns else f"{method.name}() perturbs"
        advice = f"Leave out with exclude: {first_few([*map(repr, refused)])}."
        if method.merged and not found:
            advice = "No LoRA layer can have noise; steppe.rwp() perturbs what is trained."
        raise ValueError(f"{who} {name}, but {reason}. {advice}")
    for noise in (p.perturbation for p in method.passes if found):
        if noise is not None and (noise.needs_gradient or noise.learns_from != "nothing"):
            raise ValueError(
                f"{method.name}() learns from the gradients of what it perturbs, and frozen weights have "
                "none. Use rwp, m_rwp, lpf_sgd or antithetic_rwp, or flat_lora for a PEFT model."
            )
    return found


def first_few(names: Sequence[str]) -> str:
    """For messages: not every parameter of a large model."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _reason_to_refuse(param: nn.Parameter, owners: Sequence[nn.Module]) -> str | None:
    """Why this weight of these layers cannot have noise."""
    if type(param) is not nn.Parameter or not param.is_floating_point():
        kind = f"{type(param).__name__}, {param.dtype}"
        return f"it is quantized ({kind}), and noise needs a base loaded in floating point"
    if kind := next((type(m).__name__ for m in owners if type(m) is not nn.Linear), ""):
        return f"it belongs to {kind}, and only nn.Linear computes with noise out of place"
    if param.dim() != 2:
        return "it is the bias of a linear layer; only its weight can have noise"
    if any("forward" in vars(m) for m in owners):
        return "something else replaced the forward of its layer (accelerate's offloading does)"
    return None
