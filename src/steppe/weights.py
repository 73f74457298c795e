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

from steppe.distributed import Shards, local
from steppe.flat import Block, Flat, FlatMemory, Given, Memory, by_block, decay_and_add
from steppe.frozen import FrozenLayers, FrozenLinear
from steppe.noise import Draw, Gradients, Perturbed, widest

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
        self.params: list[Perturbed] = []
        self.filters = 0
        for name, param in named:
            offset, layer = self.shards.offset(param), (frozen or {}).get(param)
            p = Perturbed(name, param, self.filters, offset, optimizer is None, layer)
            self.params.append(p)
            self.filters += p.filter_count
        self.device = self.params[0].device if self.params else torch.device("cpu")
        self.dtype = widest(p.dtype for p in self.params)
        self.sizes = self._repeated([float(p.length) for p in self.params])
        self._per_entry = self.sizes.rsqrt()
        self.gain: Tensor | None = None
        """A scalar on the device that multiplies the std of all noise."""
        self.moved: list[Perturbed] = []
        """The parameters that are away from their true values, in the order of `params`."""
        self._flat = FlatMemory(self.params, self.sizes)
        self.marks = self._flat.marks
        self.frozen = FrozenLayers(self.params, self._flat.noise)
        self._written = False
        self._factors: tuple[list[float], Tensor] = ([], self.sizes)
        self._known_norms = torch.full_like(self.sizes, torch.nan)
        if self.shards.several:
            self.filter_norms()

    @property
    def active(self) -> list[Perturbed]:
        return [p for p in self.params if p.active]

    @property
    def away(self) -> bool:
        return bool(self.moved) or self.frozen.noisy  # in place or out of place

    @torch.no_grad()
    def filter_norms(self, tensors: Gradients | None = None) -> Tensor:
        """‖·‖ of each filter of the true weights (or of tensors shaped like them; None counts as 0)."""
        if tensors is None and self.shards.several and self.shards.silent:
            return self._known_norms
        flats = self._memory(last=tensors is not None)
        norms = self.sizes.new_empty(self.filters)
        if sum(flat.rows for flat in flats) != self.filters:  # frozen ones have none
            norms.zero_()
        given = None if tensors is None else dict(zip(self.params, tensors, strict=True))
        for flat in flats:
            if tensors is None and not self.moved:  # the backup is free memory then
                flat.save()
            norms.index_copy_(0, flat.filters, flat.row_norms(given).to(self.device))
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

    def norm_per_entry(self) -> Tensor:
        """‖w‖ / sqrt(d): the std at which all weights together are displaced by their length."""
        return self.sizes.sum().rsqrt().mul(torch.linalg.vector_norm(self.filter_norms()))

    def per_filter(self, parts: Gradients) -> Tensor:
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
    def total_norm(self, tensors: Gradients, params: Sequence[Perturbed]) -> Tensor:
        """‖·‖ over all of the given tensors together, one (or None) for each of these parameters."""
        given = self._counted(params, tensors)

        def squared(flat: Flat, block: Block) -> Tensor:
            norm: Tensor = torch.linalg.vector_norm(flat.loaded(block, given).flat, dtype=flat.wide)
            return norm.square_()

        return self._total(self._memory(last=True), squared).sqrt_()

    def zeros(self) -> list[Tensor]:
        """Memory shaped (and sharded) like the parameters, in at least 32 bits."""
        flats = [] if self.shards.several else self._flat.now()
        made = {p: t for flat in flats for p, t in flat.keep().items()}
        kinds = [(p, torch.promote_types(p.dtype, torch.float32)) for p in self.params]
        return [made[p] if p in made else torch.zeros_like(p.param, dtype=d) for p, d in kinds]

    def strengths(self) -> Tensor:
        """Each filter's factor on the strength, from the parameter groups; 0 where there is no noise."""
        return self._with_factors(self._repeated([float(p.noisy) for p in self.params]))

    def _repeated(self, values: Sequence[float]) -> Tensor:
        """One value per parameter, repeated for each of its filters."""
        counts = torch.tensor([p.filter_count for p in self.params], dtype=torch.long)
        return torch.tensor(values, dtype=self.dtype).repeat_interleave(counts).to(self.device)

    def _with_factors(self, size: Tensor, *, uphill: bool = False) -> Tensor:
        """Something per filter (or for all) times the factors (`strength=`) that the optimizer's groups
        have now; `uphill`: with a minus where it maximizes, for there the loss climbs downhill."""
        factors: dict[nn.Parameter, float] = {}
        for group in self._optimizer.param_groups if self._optimizer else ():
            factor = float(group.get("strength", 1.0)) if group.get("perturb", True) else 0.0
            factor = -factor if uphill and group.get("maximize", False) else factor
            if factor != 1:
                factors.update(dict.fromkeys(group["params"], factor))
        if not factors:
            return size.expand(self.filters)
        own = [factors.get(p.param, 1.0) for p in self.params]
        if own != self._factors[0]:
            self._factors = (own, self._repeated(own))
        return size * self._factors[1]

    @torch.no_grad()
    def save(self) -> None:
        """Back up the true weights. From here until `restore()` they may be written."""
        if _away:
            mine = {id(p.param) for p in self.active}
            if any(id(p.param) in mine for other in _away for p in other.moved):
                raise RuntimeError(
                    "The weights are perturbed already. Leave the perturbed() block, or end the pass "
                    "that is under way (backward(), perturber.restore()) first."
                )
        for flat in self._memory():
            flat.save()
        self.moved, self._written = self._flat.active, False
        _away.add(self)

    def watch(self) -> None:
        """The move is made: whoever writes a moved parameter from now on is found out by `restore()`."""
        if self.moved:
            self._flat.watch()
            torch.clear_autocast_cache()  # it holds copies of the weights of before

    def written(self) -> bool:
        """Whether somebody wrote a moved parameter since `watch()`."""
        return bool(self.moved) and self._flat.written()

    @torch.no_grad()
    def restore(self, *, quiet: bool = False) -> None:
        """Put the true weights back, bit for bit. Raises, with them in place, if somebody wrote a
        parameter in the meantime; `quiet` never does (for `__del__`, at the interpreter's end)."""
        self.frozen.end()
        if not self.moved:
            return
        with suppress(Exception) if quiet else nullcontext():
            written = self._flat.find_written()
            for flat in self._flat.flats:
                torch._foreach_copy_(flat.values_now() if written else flat.values, flat.views)
            self.moved = []
            _away.discard(self)
            self.shards.reshard()
            torch.clear_autocast_cache()
            if written:
                raise RuntimeError(
                    f"{', '.join(written[:3])}{', …' if written[3:] else ''} changed in the middle of a perturbed "
                    "pass (or a perturbed() block), and not by steppe: nn.Embedding(max_norm=…), an optimizer's "
                    "step, an initialisation in the first forward, … The weights are back at their values of "
                    "before the pass, without that change. Leave the parameter out, exclude=("
                    f"{written[0]!r},), or change it outside of the pass: before the forward or after "
                    "perturber.restore()."
                )

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
        """Add Gaussian noise with this std per filter, times `factor(part)` element by element if given,
        for parts of the tensors `of`, one like each of `params`."""
        seed_of = draw.block_seeds(self._flat.blocks)
        others = dict(zip(self.params, of, strict=True)) if factor else {}

        def noise(flat: Flat, block: Block, out: Memory) -> Memory:
            factors = factor(flat.loaded(block, others, out).flat.clone()) if factor else None
            block.draw_(out.flat, seed_of(block.number))
            if factors is not None:
                out.flat.mul_(factors)
            return out

        std = self._with_factors(std if self.gain is None else std * self.gain)
        self._write(noise, std, draw.sign)
        self.frozen.begin(draw, seed_of, std, shaped=factor is not None)

    def add(self, directions: Gradients, scale: Tensor, *, uphill: bool = False) -> None:
        """Add `scale * direction` to each moved parameter; `scale` stays on the device. `uphill`: these
        are gradients, to be turned round where the optimizer maximizes."""
        given = dict(zip(self.moved, directions, strict=True))
        scale = self._with_factors(scale, uphill=uphill)
        self._write(lambda flat, block, out: flat.loaded(block, given, out), scale)

    def _write(
        self, eps: Callable[[Flat, Block, Memory], Memory], size: Tensor, sign: float = 1.0
    ) -> None:
        """weights <- weights + sign * size * eps, block by block; `size` has one for each filter."""
        again, self._written = self._written, True
        sizes = {flat: flat.by_run(size) for flat in self._flat.flats}

        def write(flat: Flat, block: Block) -> None:
            out, its = flat.scratch(block), sizes[flat][block.at]
            unit = eps(flat, block, out).matrices
            if block.direct is not None:
                block.direct.matrices[0].addcmul_(unit[0], its[0], value=sign)
                return
            # a second write goes on from the first
            base = flat.moved(block, flat.new(block)) if again else flat.true[block]
            for parts in zip(base.matrices, unit, its, out.matrices, strict=True):
                torch.addcmul(*parts[:3], value=sign, out=parts[3])
            torch._foreach_copy_(block.targets, out.views)

        by_block(self._flat.flats, write)
        self.shards.reshard()

    @torch.no_grad()
    def dot_eps(self, grads: Gradients) -> Tensor:
        """<eps, g> for one gradient (or None) of each moved parameter, while eps is in the weights."""
        given = self._counted(self.moved, grads)

        def multiplied(flat: Flat, block: Block) -> Tensor:
            out = flat.scratch(block)
            torch.sub(flat.moved(block, out).flat, flat.true[block].flat, out=out.flat)
            return out.flat.mul_(flat.loaded(block, given, flat.new(block)).flat).sum()

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
        values: Gradients,
        decay: float,
        scale: Tensor | float,
        *,
        square: bool = False,
    ) -> None:
        """memory <- decay memory + scale value (or value²), for each of `params`. If any value is not
        finite, the whole step is dropped, without asking the device."""
        flats, given = self._memory(last=True), dict(zip(self.params, values, strict=True))
        if flats and all(f.device.type == "cpu" and len(f.blocks) > 1 for f in flats):
            decay_and_add(memory, values, decay, float(scale), square, self.shards.sum_)
            return
        kept = dict(zip(self.params, memory, strict=True))
        single: dict[Flat, Memory] = {}

        def norm(flat: Flat, block: Block) -> Tensor:
            new = flat.loaded(block, given)
            if len(flat.blocks) == 1:
                single[flat] = new
            size: Tensor = torch.linalg.vector_norm(new.flat)
            return size

        norms = self._total(flats, norm)
        finite = norms < torch.inf
        bad, decays = finite.logical_not(), torch.where(finite, torch.full_like(norms, decay), 1.0)
        scales = torch.where(finite, torch.zeros_like(norms) + scale, 0.0)
        for p in (p for p in self.params if not p.active):
            local(kept[p]).mul_(decays.to(p.device))

        def learn(flat: Flat, block: Block) -> None:
            new = (single.get(flat) or flat.loaded(block, given)).flat
            new = new.masked_fill(bad.to(flat.device), 0.0)
            (new.square_() if square else new).mul_(scales.to(flat.device))
            own = flat.new(block)
            there = flat.loaded(block, kept, own)
            there.flat.mul_(decays.to(flat.device)).add_(new)
            if there is own:
                parts = block.cut([kept[owner] for owner in block.owners])
                torch._foreach_copy_(parts, own.views)  # type: ignore[arg-type]

        by_block(flats, learn)

    def _memory(self, *, last: bool = False) -> list[Flat]:
        """Flat memory; as of the last move, whose gradients there are, whatever was rebound since."""
        return self._flat.flats if self.moved or (last and self._flat.fits()) else self._flat.now()

    def _counted(self, params: Sequence[Perturbed], tensors: Gradients) -> Given:
        """Tensors by parameter, without those that another rank counts in a sum."""
        given = dict(zip(params, tensors, strict=True))
        if self.shards.several:
            given |= {p: None for p in params if not self.shards.counts(p.param)}
        return given
