"""Fine-tuning: weights from a file into a model that may have another head."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steppe.lab.errors import LabError

logger = logging.getLogger("steppe")


def load_weights(model: nn.Module, file: Path, *, outputs: int | None) -> None:
    """Copy the state dict in `file` into the model, and say what did not fit.

    A weight whose first dimension alone differs, where the model's has `outputs` entries, is a
    head for another number of classes: the model keeps its new one. Any other difference in
    shape is an error.
    """
    given = read_state(file)
    own = model.state_dict()
    shared = [k for k in given if k in own]
    heads = []
    for key in shared:
        (first, *rest), (ours, *others) = given[key].shape or (0,), own[key].shape or (0,)
        if first != ours == outputs and rest == others:
            heads.append(key)
    wrong = [k for k in shared if given[k].shape != own[k].shape and k not in heads]
    if wrong:
        key = wrong[0]
        raise LabError(
            f"{file}: {key} has shape {tuple(given[key].shape)}, the model's has "
            f"{tuple(own[key].shape)} ({len(wrong)} such weights): the file is of another model."
        )
    fitting = {k: given[k] for k in shared if k not in heads}
    if not fitting:
        raise LabError(
            f"{file}: none of its {len(given)} weights has a name of this model's "
            f"(file: {next(iter(given), '-')}; model: {next(iter(own), '-')})."
        )
    model.load_state_dict(fitting, strict=False)
    _say("new head, since the class counts differ", heads)
    _say("not in the file, left as initialised", [k for k in own if k not in given])
    _say("in the file but not in the model", [k for k in given if k not in own])
    logger.info("started from %s: %d of %d weights loaded", file, len(fitting), len(own))


def read_state(file: Path) -> dict[str, Tensor]:
    """The state dict in a file: plain, or under `state_dict` or `model`, or saved from DDP."""
    try:
        content: Any = torch.load(file, weights_only=True, map_location="cpu")
    except OSError as error:
        raise LabError(f"cannot read the weights {file}: {error.strerror}.") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise LabError(f"{file} is not a state dict that torch can load safely: {first}") from None
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise LabError(f"{file} must hold a state dict (names and tensors).")
    if content and all(name.startswith("module.") for name in content):
        return {name.removeprefix("module."): value for name, value in content.items()}
    return content


def _say(what: str, names: list[str]) -> None:
    if names:
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        logger.warning("%s: %s", what, shown)
