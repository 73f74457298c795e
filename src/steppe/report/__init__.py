"""Figures and pages made from results."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steppe.report import figures
    from steppe.report.canvas import save_figure
    from steppe.report.pictures import figure_of

__all__ = ["figure_of", "figures", "save_figure"]


def __getattr__(name: str) -> Any:
    """Public names, imported when first used: they need matplotlib, the commands' help does not."""
    if name == "figures":
        return importlib.import_module("steppe.report.figures")
    homes = {"figure_of": "pictures", "save_figure": "canvas"}
    if name not in homes:
        raise AttributeError(f"module 'steppe.report' has no attribute {name!r}")
    return getattr(importlib.import_module(f"steppe.report.{homes[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
