"""The strength nobody chose, by kind of model (docs/decisions.md, *Default strengths*)."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

DEEP = 12
"""A net with more layers than this is deep."""


class Ratios(NamedTuple):
    """Default relative displacement (‖eps_j‖ / ‖w_j‖) for each kind of model."""

    shallow: float
    deep: float
    attention: float
    """It costs next to nothing where a model with attention does not overfit; where it does, m_rwp and
    m_arwp gain more from a ratio of 0.1 to 0.2."""

    def for_model(self, model: nn.Module) -> float:
        if uses_attention(model):
            return self.attention
        return self.deep if layers(model) > DEEP else self.shallow


RATIOS = Ratios(shallow=0.6, deep=0.15, attention=0.05)
MIXED_RATIOS = Ratios(shallow=0.9, deep=0.225, attention=0.05)


def uses_attention(model: nn.Module) -> bool:
    """Whether a model looks like a transformer, which bears a tenth of the noise of other nets.

    Attention is often written without a module of its own; LayerNorm and RMSNorm then give the
    model away. Other nets with such modules get the smaller default too: too little noise trains
    like no noise, too much does not train.

    >>> uses_attention(nn.TransformerEncoderLayer(8, 2)), uses_attention(nn.Linear(8, 2))
    (True, False)
    """
    marks = ("attention", "transformer", "layernorm", "rmsnorm")
    names = {type(module).__name__.lower() for module in model.modules()}
    return any(mark in name for name in names for mark in marks)


def layers(model: nn.Module) -> int:
    """How many convolutions and matrices a signal meets, those of shortcuts included.

    >>> layers(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)))
    2
    """
    return sum(weight.ndim > 1 for weight in model.parameters())
