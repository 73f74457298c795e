"""Flat memory: the backup of all parameters of one kind as one tensor, sorted by the length of filters.

All filters of one length are one matrix in it, so that a step needs a few operations for each length
instead of for each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import count, repeat
from operator import attrgetter, is_
from typing import TypeAlias

import torch
from torch import Tensor, nn

from steppe.distributed import local
from steppe.noise import (
    PARALLEL_FROM,
    Gradients,
    Member,
    Part,
    Perturbed,
    Stretch,
    matrices,
    noise_blocks,
    runs_of,
    spread,
    standard_normal_,
    widest,
)

Given: TypeAlias = Mapping[Perturbed, Tensor | None]
"""Tensors like what this rank holds of parameters."""
Marks: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
PLAIN = frozenset({Tensor, nn.Parameter})
CLOSE_LOOKS = 2
"""In so many moves, values are compared too: data-dependent initialisation, in the first forward, may
write through `.data`, which leaves no trace."""


class Block:
    """What this rank holds of a block of noise: a stretch of flat memory that is written at once."""

    def __init__(self, number: int, noise: int, parts: list[Part], first_run: int) -> None:
        self.number, self._noise, self.parts = number, noise, parts
        self.owners = [part.member.owner for part in parts]
        self._whole = all(part.rows == part.member.rows for part in parts)
        self.runs = runs_of([(part.rows, part.member.length) for part in parts])
        self.at = slice(first_run, first_run + len(self.runs))
        """Its runs among those of all blocks."""
        self.size = sum(math.prod(run) for run in self.runs)
        self.place = slice(parts[0].begin, parts[0].begin + self.size)
        self.targets = [part.of(part.member.values) for part in parts]
        self.direct = self.memory_of(self.targets)
        """A single parameter's own rows, which are written in place: one stream of memory less."""

    def draw_(self, out: Tensor, seed: int) -> None:
        """Unit noise. A block is drawn whole and then cut: torch's values depend on the number."""
        if self.size == self._noise:
            standard_normal_(out, seed)
        else:
            noise = standard_normal_(out.new_empty(self._noise), seed)
            torch.cat([part.pick(noise) for part in self.parts], out=out)

    def cut(self, tensors: Gradients) -> Gradients:
        """This block's part of tensors that are like what this rank holds of its parameters."""
        plain = self._whole and PLAIN.issuperset(map(type, tensors))
        if plain and not any(map(attrgetter("is_sparse"), tensors)):
            return tensors
        pairs = zip(self.parts, tensors, strict=True)
        return [None if t is None else part.of(local(t)) for part, t in pairs]

    def memory_of(self, tensors: Gradients) -> Memory | None:
        """The memory of its part of tensors, if that is a single one and lies like the parameter's."""
        (tensor, *others), member = tensors, self.parts[0].member
        if others or tensor is None or not member.regular or tensor.dtype.itemsize < 4:
            return None
        if tensor.stride() != member.values.stride():
            return None
        return Memory(self, tensor.as_strided((self.size,), (1,)))


class Memory:
    """Memory for a block, with its views by parameter and by length of filters."""

    def __init__(self, block: Block, flat: Tensor) -> None:
        self._block, self.flat = block, flat

    @cached_property
    def views(self) -> list[Tensor]:
        first, parts = self._block.place.start, self._block.parts
        return [p.member.view(self.flat, p.begin - first, p.rows) for p in parts]

    @cached_property
    def matrices(self) -> list[Tensor]:
        return matrices(self.flat, self._block.runs)


class Flat:
    """The backup of all active parameters of one device and dtype, as one stretch of memory."""

    def __init__(
        self, params: Sequence[Perturbed], noise: Mapping[int, list[Stretch]], like: Tensor
    ) -> None:
        """`noise`: blocks by their number. `like`: a vector over all filters."""
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
        regular = all(m.regular for m in members)
        self._lines = [m.values.as_strided((m.values.numel(),), (1,)) for m in members if regular]
        """The values in the order of flat memory, where that is their own."""
        firsts = [(m.owner.filters.start + m.first, m.rows) for m in members]
        numbers = [number for first, rows in firsts for number in range(first, first + rows)]
        self.filters = torch.tensor(numbers, dtype=torch.long, device=like.device)
        """The number of the filter that each row is (a part of)."""
        self.rows = len(numbers)
        self.blocks: list[Block] = []
        for number, stretches in noise.items():
            mine = (Part(self.members[s.owner], s) for s in stretches if s.owner in self.members)
            if parts := [part for part in mine if part.rows > 0]:
                run = self.blocks[-1].at.stop if self.blocks else 0
                self.blocks.append(Block(number, stretches[-1].stop, parts, run))
        self.counts = [rows for block in self.blocks for rows, _ in block.runs]
        self._matrices = matrices(self.backup, runs_of([(m.rows, m.length) for m in members]))
        self._norms = torch.empty(self.rows, dtype=like.dtype, device=self.device)
        self._norms_by_length = self._norms.split([len(matrix) for matrix in self._matrices])
        self._norms_by_run = self._norms.split(self.counts)
        self.true = {block: Memory(block, self.backup[block.place]) for block in self.blocks}
        """The backup of each block."""
        self._kept: list[dict[Block, tuple[list[Tensor], Memory]]] = []
        self._scratch = self.new(self.blocks[0]) if len(self.blocks) == 1 else None

    def views_of(self, flat: Tensor) -> list[Tensor]:
        return [m.view(flat, m.start, m.rows) for m in self.members.values()]

    def values_now(self) -> list[Tensor]:
        """Where the values are now, after somebody rebound a parameter."""
        pairs = ((p.values, m.values) for p, m in self.members.items())
        return [now if now.shape == old.shape else old for now, old in pairs]

    def save(self) -> None:
        if self._lines and len(self.blocks) == 1:
            torch.cat(self._lines, out=self.backup)
        else:
            torch._foreach_copy_(self.views, self.values)

    def keep(self) -> dict[Perturbed, Tensor]:
        """Zeros like the parameters, in flat memory too: a step reads and writes them as one tensor."""
        flat = torch.zeros(len(self.backup), dtype=self.wide, device=self.device)
        tensors = dict(zip(self.members, self.views_of(flat), strict=True))
        self._kept.append(
            {b: ([tensors[p] for p in b.owners], Memory(b, flat[b.place])) for b in self.blocks}
        )
        return tensors

    def scratch(self, block: Block) -> Memory:
        """Memory for a block. Where there is only one block, its views are made once."""
        return self._scratch or self.new(block)

    def new(self, block: Block) -> Memory:
        return Memory(block, torch.empty(block.size, dtype=self.wide, device=self.device))

    def loaded(self, block: Block, given: Given, out: Memory | None = None) -> Memory:
        """A block's part of these tensors: where it is if they lie flat, otherwise copied to `out`."""
        whole = [given[owner] for owner in block.owners]
        for kept in self._kept:
            tensors, memory = kept[block]
            if all(map(is_, tensors, whole)):
                return memory
        parts = block.cut(whole)
        if (memory_there := block.memory_of(parts)) is not None:
            return memory_there
        out = out or self.scratch(block)
        copy(out.views, parts)
        return out

    def moved(self, block: Block, out: Memory) -> Memory:
        """The values of a block's parameters as they are now."""
        if block.direct is not None:
            return block.direct
        torch._foreach_copy_(out.views, block.targets)
        return out

    def by_run(self, vector: Tensor) -> Sequence[Tensor]:
        """What a vector over all filters has for the rows of each block's runs, as columns."""
        column = vector.index_select(0, self.filters).to(self.device, self.wide).unsqueeze(1)
        return column.split_with_sizes(self.counts)

    def row_norms(self, given: Given | None = None) -> Tensor:
        """‖·‖ of each row of the backup, or of these tensors; good until the next call."""
        if given is None:
            norms_(self._matrices, self._norms_by_length)
        else:
            by_run = self._norms_by_run
            by_block([self], lambda _, b: norms_(self.loaded(b, given).matrices, by_run[b.at]))
        return self._norms


class FlatMemory:
    """Flat memory for all parameters, laid out anew when one was rebound, frozen or unfrozen."""

    def __init__(self, params: Sequence[Perturbed], like: Tensor) -> None:
        """`like`: a vector over all filters."""
        self._params, self._like = params, like
        groups: dict[tuple[torch.device, torch.dtype], list[Perturbed]] = {}
        # frozen ones last: the noise of others should not lie between theirs
        for p in sorted(params, key=lambda p: (not p.active, p.length)):
            groups.setdefault((p.device, p.dtype), []).append(p)
        self._groups = list(groups.values())
        number = count()
        self.noise = [{next(number): b for b in noise_blocks(g)} for g in self._groups]
        """The blocks of noise of each device and dtype, by their number."""
        self.blocks = next(number)
        self._all = [p.param for p in params]
        self._plain = PLAIN.issuperset(map(type, self._all))
        self._marks: Marks | None = None
        self._norms: Tensor | None = None
        self._close_looks = 0 if any(p.is_meta for p in self._all) else CLOSE_LOOKS
        self.clear()

    def clear(self) -> None:
        self._key: tuple[Sequence[object], ...] = ()
        self.active: list[Perturbed] = []
        """The parameters that it is laid out for."""
        self.flats: list[Flat] = []

    def _who(self) -> list[object]:
        return [p.active for p in self._params if p.always] or [p.requires_grad for p in self._all]

    def marks(self) -> Marks:
        """Versions and places of all parameters, which differ if somebody has written one since."""
        held = self.held()
        return tuple(map(attrgetter("_version"), held)), tuple(map(Tensor.data_ptr, held))

    def watch(self) -> None:
        """Whoever writes an active parameter from now on is found out by `find_written`."""
        self._marks = self.marks()
        if self._close_looks:
            self._close_looks -= 1
            self._norms = self._norms_now()

    def written(self) -> bool:
        return self._marks not in (None, self.marks())

    def find_written(self) -> list[str]:
        """The active parameters that somebody wrote since `watch()`, which ends here."""
        before, self._marks = self._marks, None
        norms, self._norms = self._norms, None
        written = []
        if before is not None and (marks := self.marks()) != before:
            rows = zip(self._params, *before, *marks, strict=True)
            written = [p.name for p, *then, v, at in rows if then != [v, at] and p in self.active]
        if not written and norms is not None:
            now = self._norms_now()
            same = ((norms == now) | (norms.isnan() & now.isnan())).tolist()
            written = [p.name for p, equal in zip(self.active, same, strict=True) if not equal]
        return written

    def _norms_now(self) -> Tensor:
        values = [p.values for p in self.active]
        norms = torch._foreach_norm(values, 2, dtype=self._like.dtype)
        return torch.stack([norm.cpu() for norm in norms])

    def held(self) -> Sequence[Tensor]:
        """What this rank holds of the parameters, where its versions and places can be seen."""
        if self._plain:
            return self._all
        with torch.no_grad():
            return [local(param) for param in self._all]

    def fits(self) -> bool:
        """Whether it is laid out for the parameters that are active now."""
        return bool(self._key) and self._key[0] == self._who()

    def now(self) -> list[Flat]:
        """The flat memory of the parameters as they are."""
        held = self.held()
        marks = ([t.data_ptr() for t in held], [t.stride() for t in held], [t.dtype for t in held])
        key = (self._who(), *marks)
        if key != self._key:
            for p in self._params:
                p.check_unconverted()
            self.clear()  # that memory is free before there is more
            with torch.inference_mode(False), torch.no_grad():
                plans = zip(self._groups, self.noise, strict=True)
                flats = [Flat(group, noise, self._like) for group, noise in plans]
            self._key, self.flats = key, [flat for flat in flats if flat.members]
            self.active = [p for p in self._params if p.active]
        return self.flats


def norms_(parts: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    for part, norms in zip(parts, out, strict=True):
        torch.linalg.vector_norm(part, dim=1, dtype=norms.dtype, out=norms)


def copy(targets: list[Tensor], sources: Gradients) -> None:
    """Copy all tensors by one operation; zero those without a source."""
    if any(map(is_, sources, repeat(None))):
        pairs = list(zip(targets, sources, strict=True))
        torch._foreach_zero_([target for target, source in pairs if source is None])
        targets = [target for target, source in pairs if source is not None]
        sources = [source for source in sources if source is not None]
    if sources:
        torch._foreach_copy_(targets, sources)  # type: ignore[arg-type]


def by_block(flats: Sequence[Flat], work: Callable[[Flat, Block], None]) -> None:
    """Work on each block, with several threads where that is faster."""
    for flat in flats:
        serial = flat.device.type != "cpu" or flat.backup.numel() < PARALLEL_FROM
        spread(partial(work, flat), flat.blocks, 1 if serial else torch.get_num_threads())


def decay_and_add(
    memory: Sequence[Tensor],
    new: Gradients,
    decay: float,
    scale: float,
    square: bool,
    sum_: Callable[[Tensor], Tensor],
) -> None:
    """memory <- decay memory + scale new (or new²) on the CPU, where a norm can be asked for without
    waiting: whole tensors then, and nothing at all where one is not finite."""
    pairs = [(local(m), local(v)) for m, v in zip(memory, new, strict=True) if v is not None]
    wide = widest(m.dtype for m in memory)
    norms = torch._foreach_norm([v for _, v in pairs], 2, dtype=wide) if pairs else []
    norm = torch.stack([*norms, torch.zeros((), dtype=wide)]).sum()
    if not sum_(norm) < torch.inf:
        return
    torch._foreach_mul_([local(m) for m in memory], decay)
    if pairs:
        kept, values = [m for m, _ in pairs], [v.to(m.dtype) for m, v in pairs]
        if square:
            torch._foreach_addcmul_(kept, values, values, scale)
        else:
            torch._foreach_add_(kept, values, alpha=scale)
