"""The user's own code by name: `module:function`."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steppe.lab.errors import LabError, unknown


def resolve(name: str, kind: str) -> Callable[..., Any]:
    """The function that `module:function` names; modules in the current folder are found too."""
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise LabError(f"{kind} {name!r}: there is no module {error.name!r} to import.") from None
    except Exception as error:
        raise LabError(
            f"{kind} {name!r}: importing it failed with {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        names = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        raise unknown(f"function of module {module_name}", attribute, names)
    if not callable(found):
        raise LabError(f"{kind} {name!r} is a {type(found).__name__}, not a function.")
    return found  # type: ignore[no-any-return]


def source_fingerprint(*objects: object) -> str:
    """A digest of the source files these objects were written in.

    A run that used other code is another run. Code without a source (typed at a prompt) gets a
    digest that never comes again, so that such runs are not taken for each other.
    """
    digest = hashlib.sha256()
    for item in objects:
        digest.update(_source(item).encode())
    return digest.hexdigest()[:12]


def _source(item: object) -> str:
    target: Any = (
        item if inspect.isfunction(item) or inspect.isclass(item) or inspect.ismethod(item) else type(item)
    )
    try:
        file = inspect.getsourcefile(target)
        if file and Path(file).exists():
            return Path(file).read_text(encoding="utf-8")
        return inspect.getsource(target)
    except (OSError, TypeError):
        return uuid.uuid4().hex
