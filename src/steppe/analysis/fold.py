"""BatchNorm folded into the convolutions before it: fewer passes over the activations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_conv_bn_weights

from steppe.analysis.replica import Replica

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass
class _Pair:
    """A convolution, the BatchNorm with frozen statistics after it, and what replaces both."""

    conv: Convolution
    norm: _BatchNorm
    folded: Convolution

    def refresh(self) -> None:
        conv, norm = self.conv, self.norm
        assert norm.running_mean is not None
        assert norm.running_var is not None
        statistics = norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
        weight, bias = fuse_conv_bn_weights(conv.weight, conv.bias, *statistics)
        self.folded.weight, self.folded.bias = weight, bias


class Folded:
    """A replica for many losses with frozen statistics: every `place` refolds the convolutions.

    Pairs are found by running one micro-batch and watching which BatchNorm reads which
    convolution's output. What hooks cannot see (an output that is read elsewhere too) shows in
    the outputs: they are compared at the centre and at a displaced point, and where they
    differ by more than rounding nothing is folded.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.pairs: list[_Pair] = []
        if replica.problem.bn == "eval" and replica.norms:
            self._fold()

    def place(self, weights: list[Tensor]) -> None:
        self.replica.place(weights)
        for pair in self.pairs:
            pair.refresh()

    def evaluate(self) -> tuple[float, float | None]:
        return self.replica.evaluate()

    @torch.no_grad()
    def _fold(self) -> None:
        replica = self.replica
        x = next(replica.batches())[0]
        found = _pairs(replica.model, x)
        places = [replica.centre, [1.1 * w for w in replica.centre]]
        plain = []
        for weights in places:
            replica.place(weights)
            plain.append(replica.model(x))
        undo = _swap(replica.model, found)
        self.pairs = found
        for weights, before in zip(places, plain, strict=True):
            self.place(weights)
            if not _same(replica.model(x), before):
                self.pairs = []
                for parent, name, module in undo:
                    setattr(parent, name, module)
                break
        self.place(replica.centre)


def _pairs(model: nn.Module, x: Tensor) -> list[_Pair]:
    """Each BatchNorm that reads the output of a convolution, both used once in a forward."""
    calls: Counter[nn.Module] = Counter()
    outputs: list[tuple[Tensor, nn.Module]] = []
    read: list[tuple[nn.Module, nn.Module]] = []

    def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        calls[module] += 1
        if isinstance(module, _BatchNorm):
            read.extend((conv, module) for out, conv in outputs if out is args[0])

    def after(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(module, Convolution):
            outputs.append((output, module))

    watched = [m for m in model.modules() if isinstance(m, _BatchNorm | Convolution)]
    handles = [m.register_forward_pre_hook(before) for m in watched]
    handles += [m.register_forward_hook(after) for m in watched]
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return [
        _Pair(conv, norm, fuse_conv_bn_eval(conv, norm))
        for conv, norm in read
        if isinstance(conv, Convolution)
        and isinstance(norm, _BatchNorm)
        and calls[conv] == calls[norm] == 1
        and norm.running_mean is not None
    ]


def _swap(model: nn.Module, pairs: list[_Pair]) -> list[tuple[nn.Module, str, nn.Module]]:
    """Put folded convolutions and identities in place; what to set to undo it."""
    new: dict[nn.Module, nn.Module] = {}
    for pair in pairs:
        new[pair.conv], new[pair.norm] = pair.folded, nn.Identity()
    undo = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in new:
                setattr(parent, name, new[child])
                undo.append((parent, name, child))
    return undo


def _same(a: object, b: object) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
        return False
    scale = b.abs().max().item()
    # Rounding grows with the depth of the net; a missed use of an output is off by tenths.
    return bool((a - b).abs().max().item() <= 1e4 * torch.finfo(b.dtype).eps * scale)
