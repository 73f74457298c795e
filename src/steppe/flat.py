"""Flat memory: the backup of all parameters of one kind as one tensor, sorted by the length of filters.

All filters of one length are one matrix in it, so that a step needs a few operations for each length
instead of for each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from itertools import count
from typing import TypeAlias

import torch
from torch import Tensor, nn

from steppe.layout import Perturbed, Stretch, local, noise_blocks, stored, widest
from steppe.noise import PARALLEL_FROM, spread, standard_normal_
from steppe.shards import Shards

Given: TypeAlias = Mapping[Perturbed, Tensor | None]
"""Tensors like what this rank holds of parameters."""
PLAIN = frozenset({Tensor, nn.Parameter})


class Member:
    """What this rank holds of a parameter, and where in flat memory it goes."""

    def __init__(self, owner: Perturbed, start: int) -> None:
        values = self.values = owner.values
        self.owner, self.start = owner, start
        many, strides = values.dim() > 1, values.stride()
        self.rows = values.shape[0] if many else 1
        self.length = values.numel() // max(1, self.rows)
        self.first = owner.offset[0] if many else 0
        """The first of the parameter's filters that this rank holds any part of."""
        inner = sorted(range(1, values.dim()), key=lambda d: -strides[d])
        self.regular = (values.permute(0, *inner) if many else values).is_contiguous()
        """Whether flat memory has the order of the parameter's own; otherwise that of its indices."""
        self.inner = inner if many and self.regular else list(range(int(many), values.dim()))

    def view(self, flat: Tensor, start: int, rows: int) -> Tensor:
        """Some of its rows in flat memory, shaped like the parameter."""
        shape = (rows, *self.values.shape[1:]) if self.values.dim() > 1 else self.values.shape
        if self.regular:
            return flat.as_strided(shape, self.values.stride(), flat.storage_offset() + start)
        return flat[start : start + rows * self.length].view(shape)


class Part:
    """Rows of a member that lie in one block."""

    def __init__(self, member: Member, stretch: Stretch) -> None:
        first = max(stretch.first, member.first)
        last = min(stretch.last, member.first + member.rows)
        self.member, self.rows, self.first = member, last - first, first - member.first
        self.begin = member.start + self.first * member.length
        """Its place in flat memory."""
        full, mine, offset = member.owner.shape, member.values.shape, member.owner.offset
        self._noise = slice(stretch.start, stretch.stop)
        self._full = (stretch.last - stretch.first, *(full[d] for d in member.inner))
        self._mine = (
            slice(first - stretch.first, last - stretch.first),
            *(slice(offset[d], offset[d] + mine[d]) for d in member.inner),
        )

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor like the member's values."""
        if self.rows == self.member.rows:
            return tensor
        return tensor[self.first : self.first + self.rows]

    def pick(self, noise: Tensor) -> Tensor:
        """Its values from the noise of the full block."""
        return noise[self._noise].view(self._full)[self._mine].reshape(-1)


class Block:
    """What this rank holds of a block of noise: a stretch of flat memory that is written at once."""

    def __init__(
        self, number: int, noise: int, parts: list[Part], backup: Tensor, first_row: int
    ) -> None:
        self.number, self._noise, self.parts = number, noise, parts
        self._owners = [part.member.owner for part in parts]
        self._whole = all(part.rows == part.member.rows for part in parts)
        runs = self.runs = runs_of([(part.rows, part.member.length) for part in parts])
        self.counts, start = [rows for rows, _ in runs], parts[0].begin
        self.rows = slice(first_row, first_row + sum(self.counts))
        self.size = sum(math.prod(run) for run in runs)
        self.place = slice(start, start + self.size)
        self.true = matrices(backup[self.place], runs)
        self.targets = [part.of(part.member.values) for part in parts]
        self.odd = frozenset(n for n, part in enumerate(parts) if not part.member.regular)
        self.direct: Tensor | None = None
        """A single parameter's own rows, which are written in place: one stream of memory less."""
        if len(parts) == 1 and not self.odd and backup.dtype.itemsize >= 4:
            self.direct = self.targets[0].as_strided(runs[0], (runs[0][1], 1))

    def draw_(self, out: Tensor, seed: int) -> None:
        """Unit noise. A block is drawn whole and then cut: torch's values depend on the number."""
        if self.size == self._noise:
            standard_normal_(out, seed)
        else:
            noise = standard_normal_(out.new_empty(self._noise), seed)
            torch.cat([part.pick(noise) for part in self.parts], out=out)

    def of(self, tensors: Given) -> list[Tensor | None]:
        """This block's part of tensors that are like what this rank holds."""
        found = [tensors[owner] for owner in self._owners]
        plain = self._whole and PLAIN.issuperset(map(type, found))
        if plain and not any(t is not None and t.is_sparse for t in found):
            return found
        pairs = zip(self.parts, found, strict=True)
        return [None if t is None else part.of(local(t)) for part, t in pairs]

    def in_place(self, tensors: Given) -> Tensor | None:
        """The rows of a single parameter in its tensor, if that has the memory of the parameter."""
        part = self.parts[0]
        tensor = tensors[part.member.owner] if self.direct is not None else None
        if tensor is None or local(tensor).stride() != part.member.values.stride():
            return None
        return part.of(local(tensor)).as_strided(self.runs[0], (self.runs[0][1], 1))


class Scratch:
    """Memory for a block, with its views by parameter and by length of filters."""

    def __init__(self, block: Block, dtype: torch.dtype) -> None:
        self._block, self.flat = block, block.targets[0].new_empty(block.size, dtype=dtype)

    @cached_property
    def views(self) -> list[Tensor]:
        parts, first = self._block.parts, self._block.parts[0].begin
        return [part.member.view(self.flat, part.begin - first, part.rows) for part in parts]

    @cached_property
    def matrices(self) -> list[Tensor]:
        return matrices(self.flat, self._block.runs)


class Flat:
    """The backup of all active parameters of one device and dtype, as one stretch of memory."""

    def __init__(
        self, params: Sequence[Perturbed], noise: Mapping[int, list[Stretch]], home: torch.device
    ) -> None:
        """`noise`: blocks by their number. `home`: where vectors over all filters live."""
        self.members: dict[Perturbed, Member] = {}
        size = 0
        for p in params:
            if p.active and p.values.numel():
                self.members[p] = Member(p, size)
                size += p.values.numel()
        members = list(self.members.values())
        self.dtype, self.device = params[0].dtype, params[0].device
        self.wide = torch.promote_types(self.dtype, torch.float32)
        """What is computed in."""
        self.backup = torch.empty(size, dtype=self.dtype, device=self.device)
        self.values = [m.values for m in members]
        self.views = self.views_of(self.backup)
        self.odd = frozenset(n for n, m in enumerate(members) if not m.regular)
        self.runs = runs_of([(m.rows, m.length) for m in members])
        firsts = [(m.owner.filters.start + m.first, m.rows) for m in members]
        numbers = [number for first, rows in firsts for number in range(first, first + rows)]
        self.filters = torch.tensor(numbers, dtype=torch.long, device=home)
        """The number of the filter that each row is (a part of)."""
        self.blocks: list[Block] = []
        for number, stretches in noise.items():
            mine = (Part(self.members[s.owner], s) for s in stretches if s.owner in self.members)
            if parts := [part for part in mine if part.rows > 0]:
                row = self.blocks[-1].rows.stop if self.blocks else 0
                self.blocks.append(Block(number, stretches[-1].stop, parts, self.backup, row))
        self._scratch: Scratch | None = None

    def views_of(self, flat: Tensor) -> list[Tensor]:
        return [m.view(flat, m.start, m.rows) for m in self.members.values()]

    def values_now(self) -> list[Tensor]:
        """Where the values are now, after somebody rebound a parameter."""
        pairs = ((p.values, m.values) for p, m in self.members.items())
        return [now if now.shape == old.shape else old for now, old in pairs]

    def scratch(self, block: Block) -> Scratch:
        """Memory for a block. Where there is only one block, its views are made once."""
        if len(self.blocks) > 1:
            return Scratch(block, self.wide)
        if self._scratch is None:
            with torch.inference_mode(False):
                self._scratch = Scratch(block, self.wide)
        return self._scratch

    def loaded(self, block: Block, tensors: Given) -> Scratch:
        """Memory for a block with its part of these tensors in it."""
        scratch = self.scratch(block)
        copy(scratch.views, block.of(tensors), block.odd)
        return scratch

    def row_norms(self, dtype: torch.dtype, given: Given | None = None) -> Tensor:
        """‖·‖ of each row of the backup, or of these tensors."""
        norms = torch.empty(len(self.filters), dtype=dtype, device=self.device)

        def fill(parts: Sequence[Tensor], norms: Tensor) -> None:
            for part, out in zip(parts, norms.split([len(part) for part in parts]), strict=True):
                torch.linalg.vector_norm(part, dim=1, dtype=dtype, out=out)

        def of_block(flat: Flat, block: Block) -> None:
            there = block.in_place(given or {})
            parts = flat.loaded(block, given or {}).matrices if there is None else [there]
            fill(parts, norms[block.rows])

        if given is None:
            fill(matrices(self.backup, self.runs), norms)
        else:
            by_block([self], of_block)
        return norms


class FlatMemory:
    """Flat memory for all parameters, laid out anew when one was rebound, frozen or unfrozen."""

    def __init__(self, params: Sequence[Perturbed], home: torch.device) -> None:
        self._params, self._home = params, home
        groups: dict[tuple[torch.device, torch.dtype], list[Perturbed]] = {}
        # frozen ones last: the noise of others should not lie between theirs
        for p in sorted(params, key=lambda p: (not p.active, p.length)):
            groups.setdefault((p.device, p.dtype), []).append(p)
        self.groups = list(groups.values())
        """The parameters of each device and dtype, by the length of their filters."""
        number = count()
        self.noise = [{next(number): b for b in noise_blocks(g)} for g in self.groups]
        """The blocks of noise of each group, by their number."""
        self.blocks = next(number)
        self.clear()

    def clear(self) -> None:
        self._key: list[tuple[object, ...]] = []
        self.flats: list[Flat] = []

    def fits(self) -> bool:
        """Whether it is laid out for the parameters that are active now."""
        return [key[-1] for key in self._key] == [p.active for p in self._params]

    def now(self) -> list[Flat]:
        """The flat memory of the parameters as they are."""
        pairs = zip(stored(self._params), self._params, strict=True)
        key = [(t.data_ptr(), t.stride(), t.dtype, p.active) for t, p in pairs]
        if key != self._key:
            for p in self._params:
                p.check_unconverted()
            self.clear()  # that memory is free before there is more
            with torch.inference_mode(False), torch.no_grad():
                plans = zip(self.groups, self.noise, strict=True)
                flats = [Flat(group, noise, self._home) for group, noise in plans]
            self._key, self.flats = list(key), [flat for flat in flats if flat.members]
        return self.flats


def runs_of(rows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(number, length) of rows, neighbours of one length taken together."""
    runs: list[tuple[int, int]] = []
    for number, length in rows:
        before = runs.pop()[0] if runs and runs[-1][1] == length else 0
        runs.append((before + number, length))
    return runs


def matrices(flat: Tensor, runs: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Flat memory as one matrix for each run of rows of one length."""
    if len(runs) == 1:
        return [flat.view(runs[0])]
    pieces = flat.split([math.prod(run) for run in runs])
    return [piece.view(run) for piece, run in zip(pieces, runs, strict=True)]


def copy(
    targets: list[Tensor], sources: Sequence[Tensor | None], odd: Collection[int] = ()
) -> None:
    """Copy all tensors by one operation; zero those without a source.

    The `odd` ones, of other strides, have an operation of their own: on a GPU one of them would send
    the whole list down the slow path.
    """
    if not odd and all(source is not None for source in sources):
        torch._foreach_copy_(targets, sources)  # type: ignore[arg-type]
        return
    without: list[Tensor] = []
    kinds: tuple[list[Tensor], ...] = ([], [], [], [])
    for n, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if source is None:
            without.append(target)
        else:
            kinds[n in odd].append(target)
            kinds[2 + (n in odd)].append(source)
    if without:
        torch._foreach_zero_(without)
    for to, those in ((kinds[0], kinds[2]), (kinds[1], kinds[3])):
        if to:
            torch._foreach_copy_(to, those)


def by_block(flats: Sequence[Flat], work: Callable[[Flat, Block], None]) -> None:
    """Work on each block, with several threads where that is faster."""
    for flat in flats:
        serial = flat.device.type != "cpu" or flat.backup.numel() < PARALLEL_FROM
        spread(partial(work, flat), flat.blocks, 1 if serial else torch.get_num_threads())


def decay_and_add(
    memory: Sequence[Tensor],
    values: Sequence[Tensor | None],
    decay: float,
    scale: float,
    square: bool,
    shards: Shards,
) -> None:
    """memory <- decay memory + scale value (or value²) on the CPU, where a norm can be asked for without
    waiting: whole tensors then, and nothing at all where a value is not finite."""
    pairs = [(local(m), local(v)) for m, v in zip(memory, values, strict=True) if v is not None]
    wide = widest(m.dtype for m in memory)
    norms = torch._foreach_norm([v for _, v in pairs], 2, dtype=wide) if pairs else []
    norm = torch.stack([*norms, torch.zeros((), dtype=wide)]).sum()
    if not (shards.sum_(norm) if shards.several else norm) < torch.inf:
        return
    torch._foreach_mul_([local(m) for m in memory], decay)
    if pairs:
        kept, new = [m for m, _ in pairs], [v.to(m.dtype) for m, v in pairs]
        if square:
            torch._foreach_addcmul_(kept, new, new, scale)
        else:
            torch._foreach_add_(kept, new, alpha=scale)
