"""Types of command-line options: what a field needs besides its Python type to read well in help."""

from __future__ import annotations

from typing import Annotated, TypeVar

import tyro
from tyro.conf import UseAppendAction

T = TypeVar("T")


def default_hint(default: str) -> str:
    """`(default: 0.1)`; nothing where an option is not set unless it is given."""
    return "" if default in ("None", "") else f"(default: {default})"


Maybe = Annotated[T | None, tyro.conf.arg(help_behavior_hint=default_hint)]
"""An option without a default value."""

Words = Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint=default_hint)]
"""Several words after one option or in place of one."""

Repeated = UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="")]]
"""An option that may be given several times."""

Quiet = Annotated[bool, tyro.conf.arg(aliases=["-q"])]
