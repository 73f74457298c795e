"""PEFT: what LoRA adapters add to the frozen layers of a model, for noise on their merged weights.

`steppe.attach(model, optimizer, steppe.flat_lora())` uses it by itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from steppe.frozen import LowRank

try:
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
except ImportError as error:
    raise ImportError(
        "steppe.integrations.peft needs PEFT. Install it with pip install 'steppe[peft]'."
    ) from error


def low_rank_parts(model: nn.Module, *, strict: bool = True) -> dict[nn.Module, LowRank]:
    """Of each frozen layer under LoRA, a function that gives (s B, A) of its active adapters.

    `strict`: refuse adapters that are not plain LoRA; otherwise their layers count as without any.
    """
    found: dict[nn.Module, LowRank] = {}
    others: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and not module.lora_variant:
            found[module.get_base_layer()] = partial(low_rank, module)
        elif isinstance(module, LoraLayer):
            kinds = {type(v).__name__ for v in module.lora_variant.values()}
            others.append(f"{name} uses {', '.join(sorted(kinds))}")
        elif isinstance(module, BaseTunerLayer):
            others.append(f"{name} is {type(module).__module__.split('.')[2]}")
    if strict and others:
        raise ValueError(
            f"flat_lora() perturbs W + s B A, the merged weight of plain LoRA, but {others[0]}. Use LoraConfig "
            "without a variant (such as use_dora), or steppe.rwp(), which perturbs what is trained."
        )
    return found


@torch.no_grad()
def low_rank(layer: LoraLayer) -> tuple[Tensor, Tensor] | None:
    """(s B, A) of the active adapters side by side; None where the layer computes with W alone."""
    names = [a for a in layer.active_adapters if a in layer.lora_A]
    if layer.disable_adapters or layer.merged or not names:
        return None
    Bs: list[Any] = [layer.scaling[a] * layer.lora_B[a].weight for a in names]
    As: list[Any] = [layer.lora_A[a].weight for a in names]
    return torch.cat(Bs, dim=1), torch.cat(As)
