"""Calibration: how far a model's confidence is from how often it is right."""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 15


def calibration_error(confidence: Tensor, correct: Tensor, bins: int = BINS) -> float:
    """Expected calibration error over equal-width bins of confidence (Guo et al., 2017).

    >>> calibration_error(torch.tensor([0.8, 0.8]), torch.tensor([1.0, 0.0]))  # says .8, is .5
    0.3
    """
    index = (confidence.double() * bins).ceil().long().clamp(1, bins) - 1
    gap = torch.zeros(bins, dtype=torch.float64)
    gap.index_add_(0, index, confidence.double() - correct.double())
    return round(float(gap.abs().sum()) / len(confidence), 6)
