"""Results: frozen records that save to `.npz`, load back and say where they come from."""

from __future__ import annotations

import json
import math
import os
import zipfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """What every analysis gives: its numbers, its settings, and the `origin` they belong to.

    `origin` is what `Problem.describe` says: hashes of data and weights, BatchNorm mode, precision.
    Tensors are float64 on the CPU. `Result.load` finds the right class by itself.
    """

    origin: dict[str, Any]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write everything to one `.npz` file, in one move: a reader never sees half of it."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        arrays = {name: v.numpy() for name, v in values.items() if isinstance(v, Tensor)}
        settings = {name: v for name, v in values.items() if name not in arrays}
        head = np.array(json.dumps({"kind": type(self).__name__, "settings": settings}))
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.part")
        with partial.open("wb") as file:
            np.savez(file, head=head, **arrays)  # type: ignore[arg-type]
        partial.replace(target)
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The result that `save` wrote."""
        if Path(path).is_file() and not zipfile.is_zipfile(path):
            raise ValueError(f"{path} was not written by steppe.analysis: it is no .npz file.")
        with np.load(path, allow_pickle=False) as stored:
            if "head" not in stored:
                raise ValueError(f"{path} was not written by steppe.analysis: it has no head.")
            arrays = {name: torch.from_numpy(stored[name]) for name in stored if name != "head"}
            head = json.loads(str(stored["head"]))
        kinds = {kind.__name__: kind for kind in (cls, *cls.__subclasses__())}
        if head.get("kind") not in kinds:
            raise ValueError(
                f"{path} holds {head.get('kind', 'no result of steppe')!r}, wanted "
                f"{cls.__name__}. Result.load reads every kind."
            )
        kind = kinds[head["kind"]]
        known = {f.name for f in fields(kind)}
        values = {**head["settings"], **arrays}
        return kind(**{name: _frozen(value) for name, value in values.items() if name in known})

    def plot(self, **options: Any) -> Figure:
        """A matplotlib figure of the result; `options` are those of `steppe.report.figures`.

        Several results in one figure: `steppe.report.figure_of({"SGD": a, "RWP": b})`.
        """
        from steppe.report.pictures import figure_of

        return figure_of(self, **options)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain lists and numbers for JSON; what is not finite becomes None."""
        values = {f.name: plain(getattr(self, f.name)) for f in fields(self)}
        return {"kind": type(self).__name__, **values}


def _frozen(value: Any) -> Any:
    """JSON knows lists only; settings are tuples."""
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
