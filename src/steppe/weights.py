"""The weights: a backup, and the only code that writes parameter values.

Moves are made in place under `no_grad`, so autograd's version counters still catch a stale graph.
A full backup is taken before anything is written: putting back is a copy, bit-exact and safe to
repeat, and the noise itself never exists as a whole (one extra copy of the weights in all).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from weakref import WeakSet

import torch
from torch import Tensor, nn

from steppe.flat import Block, Flat, FlatMemory, Scratch, by_block, copy, decay_and_add
from steppe.frozen import FrozenLayers, FrozenLinear
from steppe.layout import ALREADY, Perturbed, Watch, group_factors, local, repeated, widest
from steppe.noise import Draw
from steppe.shards import Shards

_away: WeakSet[Weights] = WeakSet()
"""Who has moved weights at present: two must never move the same ones."""


class Weights:
    """Every perturbed parameter, its filters in one row of numbers, and the way back.

    Quantities per filter (norms, history, std) are vectors over the filters of all parameters, in the
    order of `params`: a few thousand numbers, the same on every rank that holds a shard. The groups of
    `optimizer` say what is perturbed how much; without one, all alike, also frozen ones.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        optimizer: torch.optim.Optimizer | None,
        shards: Shards | None = None,
        frozen: Mapping[nn.Parameter, FrozenLinear] | None = None,
    ) -> None:
        self.shards, self._optimizer = shards or Shards(), optimizer
        self.frozen = FrozenLayers(frozen)
        self.params: list[Perturbed] = []
        self.filters = 0
        for name, param in named:
            count = (param.shape[0] if param.dim() > 1 else 1) if param.numel() else 0
            place = slice(self.filters, self.filters + count)
            at, kind = self.shards.offset(param), (param.shape, param.dtype, param.device)
            more = (optimizer is None, self.frozen.of.get(param))
            self.params.append(Perturbed(name, param, place, at, *kind, *more))
            self.filters += count
        self.device = self.params[0].device if self.params else torch.device("cpu")
        self.dtype = widest(p.dtype for p in self.params)
        self.sizes = repeated(self.params, [float(p.length) for p in self.params], self.dtype)
        self._per_entry = self.sizes.rsqrt()
        self.gain: Tensor | None = None
        """A scalar on the device that multiplies the std of all noise."""
        self.moved: list[Perturbed] = []
        """The parameters that are away from their true values, in the order of `params`."""
        self._flat = FlatMemory(self.params, self.device)
        self.frozen.place(self.params, self._flat.noise)
        self._written = False
        self._watch = Watch(self.params)
        self._factors: tuple[list[float], Tensor] = ([], self.sizes)
        self._known_norms = torch.full_like(self.sizes, torch.nan)
        if self.shards.several:
            self.filter_norms()

    # ------------------------------------------------------------------ what there is

    @property
    def active(self) -> list[Perturbed]:
        return [p for p in self.params if p.active]

    @property
    def away(self) -> bool:
        """Whether a perturbation is at work, in place or out of place."""
        return bool(self.moved) or self.frozen.noisy

    def marks(self) -> tuple[object, ...]:
        """A mark for every perturbed parameter, which differs if somebody has written it since."""
        return self._watch.marks()

    @torch.no_grad()
    def filter_norms(self, tensors: Sequence[Tensor | None] | None = None) -> Tensor:
        """‖·‖ of each filter of the true weights (or of tensors shaped like them; None counts as 0)."""
        if tensors is None and self.shards.several and self.shards.silent:
            return self._known_norms
        flats = self._memory() if tensors is None else self._memory(last=True)
        norms = self.sizes.new_empty(self.filters)
        if sum(len(flat.filters) for flat in flats) != self.filters:  # frozen ones have none
            norms.zero_()
        given = None if tensors is None else dict(zip(self.params, tensors, strict=True))
        for flat in flats:
            if tensors is None and not self.moved:  # the backup is free memory then
                copy(flat.views, flat.values, flat.odd)
            norms.index_copy_(0, flat.filters, flat.row_norms(self.dtype, given).to(self.device))
        if tensors is None:
            self.frozen.write_norms(norms)
        if self.shards.several:
            for p in self.params:
                if not self.shards.counts(p.param):
                    norms[p.filters] = 0.0
            norms = self.shards.sum_(norms.square_()).sqrt_()
            if tensors is None:
                self._known_norms = norms
        return norms

    def norms_per_entry(self) -> Tensor:
        """‖w_j‖ / sqrt(d_j): the std at which a filter of d_j entries is displaced by its length."""
        return self.filter_norms() * self._per_entry

    def per_filter(self, parts: Sequence[Tensor | None]) -> Tensor:
        """One vector over all filters from each parameter's part of it (None counts as 0)."""
        zero = self.sizes.new_zeros(1)
        rows = [
            zero.expand(p.filter_count) if part is None else part.to(self.device, self.dtype)
            for p, part in zip(self.params, parts, strict=True)
        ]
        return torch.cat(rows) if rows else zero[:0]

    def per_parameter(self, vector: Tensor) -> list[Tensor]:
        """Each parameter's part of a vector over all filters."""
        return list(vector.split([p.filter_count for p in self.params]))

    @torch.no_grad()
    def total_norm(self, tensors: Sequence[Tensor | None], params: Sequence[Perturbed]) -> Tensor:
        """‖·‖ over all of the given tensors together, one (or None) for each of these parameters."""
        pairs = zip(params, tensors, strict=True)
        given = {p: t if self.shards.counts(p.param) else None for p, t in pairs}

        def squared(flat: Flat, block: Block) -> Tensor:
            there = block.in_place(given)
            there = flat.loaded(block, given).flat if there is None else there
            norm: Tensor = torch.linalg.vector_norm(there, dtype=flat.wide)
            return norm.square_()

        return self._total(self._memory(last=True), squared).sqrt_()

    def zeros(self) -> list[Tensor]:
        """Memory shaped (and sharded) like the parameters, in at least 32 bits."""
        kinds = [(p.param, torch.promote_types(p.dtype, torch.float32)) for p in self.params]
        return [torch.zeros_like(param, dtype=kind) for param, kind in kinds]

    def strengths(self) -> Tensor:
        """Each filter's factor on the strength, from the parameter groups; 0 where there is no noise."""
        factors = group_factors(self.params, self._optimizer)
        noisy = [f * p.noisy for f, p in zip(factors, self.params, strict=True)]
        return repeated(self.params, noisy, self.dtype)

    def _with_factors(self, size: Tensor, *, uphill: bool = False) -> Tensor:
        """Something per filter (or for all) times the groups' own factors."""
        factors = group_factors(self.params, self._optimizer, uphill=uphill)
        if all(factor == 1 for factor in factors):
            return size.expand(self.filters)
        if factors != self._factors[0]:
            self._factors = (factors, repeated(self.params, factors, self.dtype))
        return size * self._factors[1]

    # ------------------------------------------------------------------ moves

    @torch.no_grad()
    def save(self) -> None:
        """Back up the true weights. From here until `restore()` they may be written."""
        mine = {id(p.param) for p in self.active} if _away else ()
        if any(id(p.param) in mine for other in _away for p in other.moved):
            raise RuntimeError(ALREADY)
        for flat in self._memory():
            copy(flat.views, flat.values, flat.odd)
        self.moved, self._written = self.active, False
        _away.add(self)

    def watch(self) -> None:
        """The move is made: whoever writes a moved parameter from now on is found out by `restore()`."""
        self._watch.begin(self.moved)

    def written(self) -> bool:
        """Whether somebody wrote a moved parameter since the move."""
        return bool(self.moved) and self._watch.written()

    def restore(self, *, quiet: bool = False) -> None:
        """Put the true weights back, bit for bit. Harmless when nothing was moved.

        Raises, with the true weights in place, if somebody wrote a parameter in the meantime; `quiet`
        never raises (for `__del__`, and the end of the interpreter).
        """
        self.frozen.end()
        if not self.moved:
            return
        with suppress(Exception) if quiet else nullcontext(), torch.no_grad():
            written = self._watch.end()
            for flat in self._flat.flats:
                copy(flat.values_now() if written else flat.values, flat.views, flat.odd)
            self.moved = []
            _away.discard(self)
            self.shards.reshard()
            if written and not quiet:
                raise written

    def free(self) -> None:
        """Put the true weights back and let go of the memory for them."""
        self.restore()
        self._flat.clear()
        self.shards.let_go()

    def add_noise(
        self,
        draw: Draw,
        std: Tensor,
        factor: Callable[[Tensor], Tensor] | None = None,
        of: Sequence[Tensor] = (),
    ) -> None:
        """Add Gaussian noise with this std per filter.

        If given, `factor(part)` multiplies it element by element, for parts of the tensors `of`, one
        like each of `params`.
        """
        seed_of = draw.block_seeds(self._flat.blocks)
        others = dict(zip(self.params, of, strict=True)) if factor else {}

        def fill(block: Block, eps: Scratch) -> None:
            if factor is None:
                block.draw_(eps.flat, seed_of(block.number))
                return
            copy(eps.views, block.of(others), block.odd)
            factors = factor(eps.flat.clone())
            block.draw_(eps.flat, seed_of(block.number))
            eps.flat.mul_(factors)

        std = self._with_factors(std if self.gain is None else std * self.gain)
        self._write(fill, std, draw.sign)
        self.frozen.begin(draw, seed_of, std, shaped=factor is not None)

    def add(
        self, directions: Sequence[Tensor | None], scale: Tensor, *, uphill: bool = False
    ) -> None:
        """Add `scale * direction` to each moved parameter; `scale` stays on the device.

        `uphill`: the directions are gradients, to be turned round where the optimizer maximizes.
        """
        given = dict(zip(self.moved, directions, strict=True))

        def fill(block: Block, eps: Scratch) -> None:
            copy(eps.views, block.of(given), block.odd)

        self._write(fill, self._with_factors(scale, uphill=uphill))

    def _write(
        self, fill: Callable[[Block, Scratch], None], size: Tensor, sign: float = 1.0
    ) -> None:
        """weights <- weights + sign * size * filled, block by block; `size` has one for each filter."""
        again, self._written = self._written, True
        sizes = {
            flat: size.index_select(0, flat.filters).to(flat.device, flat.wide)[:, None]
            for flat in self._flat.flats
        }

        def write(flat: Flat, block: Block) -> None:
            eps, its = flat.scratch(block), sizes[flat][block.rows]
            fill(block, eps)
            if block.direct is not None:
                block.direct.addcmul_(eps.matrices[0], its, value=sign)
                return
            base = block.true
            if again:  # a second write goes on from the first
                now = Scratch(block, flat.dtype)
                copy(now.views, block.targets, block.odd)
                base = now.matrices
            for true, part, rows in zip(base, eps.matrices, its.split(block.counts), strict=True):
                torch.addcmul(true, part, rows, value=sign, out=part)
            copy(block.targets, eps.views, block.odd)

        by_block(self._flat.flats, write)
        self.shards.reshard()

    # ------------------------------------------------------------------ what is learnt

    @torch.no_grad()
    def dot_eps(self, grads: Sequence[Tensor | None]) -> Tensor:
        """<eps, g> for one gradient (or None) of each moved parameter, while eps is in the weights."""
        pairs = zip(self.moved, grads, strict=True)
        given = {p: g if self.shards.counts(p.param) else None for p, g in pairs}

        def multiplied(flat: Flat, block: Block) -> Tensor:
            eps = flat.scratch(block)
            copy(eps.views, block.targets, block.odd)
            eps.flat.sub_(flat.backup[block.place])
            pairs = list(zip(eps.views, block.of(given), strict=True))
            if none := [view for view, grad in pairs if grad is None]:
                torch._foreach_zero_(none)
            if there := [(view, grad) for view, grad in pairs if grad is not None]:
                torch._foreach_mul_([view for view, _ in there], [grad for _, grad in there])
            return eps.flat.sum()

        return self._total(self._flat.flats if self.moved else [], multiplied)

    def _total(self, flats: Sequence[Flat], of: Callable[[Flat, Block], Tensor]) -> Tensor:
        """The sum over all blocks, and shards, in the same order whatever the threads."""
        found: dict[int, Tensor] = {}

        def work(flat: Flat, block: Block) -> None:
            found[block.number] = of(flat, block).to(self.device, self.dtype)

        by_block(flats, work)
        parts = [found[number] for number in sorted(found)] or [self.sizes.new_zeros(())]
        total = torch.stack(parts).sum() if len(parts) > 1 else parts[0]
        return self.shards.sum_(total) if self.shards.several else total

    @torch.no_grad()
    def decay_and_add(
        self,
        memory: Sequence[Tensor],
        values: Sequence[Tensor | None],
        decay: float,
        scale: Tensor | float,
        *,
        square: bool = False,
    ) -> None:
        """memory <- decay memory + scale value (or value²), for each of `params`.

        If any value is not finite, the whole step is dropped, without asking the device.
        """
        flats, given = self._memory(last=True), dict(zip(self.params, values, strict=True))
        if flats and all(f.device.type == "cpu" and len(f.blocks) > 1 for f in flats):
            decay_and_add(memory, values, decay, float(scale), square, self.shards)
            return
        norms = self._total(flats, lambda f, b: torch.linalg.vector_norm(f.loaded(b, given).flat))
        finite = norms < torch.inf
        bad, decays = finite.logical_not(), torch.where(finite, torch.full_like(norms, decay), 1.0)
        scales = torch.where(finite, torch.zeros_like(norms) + scale, 0.0)
        kept = dict(zip(self.params, memory, strict=True))
        for p in (p for p in self.params if not p.active):
            local(kept[p]).mul_(decays.to(p.device))

        def learn(flat: Flat, block: Block) -> None:
            # a single block is still there
            new = flat.scratch(block) if len(flat.blocks) == 1 else flat.loaded(block, given)
            new.flat.masked_fill_(bad.to(flat.device), 0.0)
            (new.flat.square_() if square else new.flat).mul_(scales.to(flat.device))
            memory = [m for m in block.of(kept) if m is not None]
            torch._foreach_mul_(memory, decays.to(flat.device))
            torch._foreach_add_(memory, new.views)

        by_block(flats, learn)

    def _memory(self, *, last: bool = False) -> list[Flat]:
        """Flat memory; as of the last move, whose gradients there are, whatever was rebound since."""
        return self._flat.flats if self.moved or (last and self._flat.fits()) else self._flat.now()
