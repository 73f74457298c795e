"""Names: from what a user typed to the thing it names, or to an error that helps."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

GIVEN = "given:"
"""Prefix of names of data, models and tasks that came as Python objects."""

PREFIXES = ("folder", "torchvision", "timm", GIVEN[:-1])


def unknown(kind: str, name: str, valid: Iterable[str]) -> ValueError:
    """The error for a name that does not exist, with the nearest ones that do.

    >>> print(unknown("model", "resnet81", ["mlp", "resnet18"]))
    No model is called 'resnet81'. Did you mean resnet18? There are: mlp, resnet18.
    """
    valid = list(valid)
    guess = did_you_mean(name.lower(), valid)
    return ValueError(f"No {kind} is called {name!r}.{guess} There are: {', '.join(valid)}.")


def did_you_mean(name: str, valid: Sequence[str], *, most: int = 3) -> str:
    """` Did you mean resnet18?`; empty if no name is near."""
    near = difflib.get_close_matches(name, valid, n=most, cutoff=0.5)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def check_options(owner: str, function: Callable[..., Any], options: Mapping[str, object]) -> None:
    """Raise unless `function` takes each of these keyword options and has not fixed them itself."""
    fixed = function.keywords if isinstance(function, partial) else {}
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    valid = sorted(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in fixed)
    for name in options:
        if name not in valid:
            takes = f"It takes {', '.join(valid)}" if valid else "It takes none"
            guess = did_you_mean(name, valid, most=1)
            raise ValueError(f"{owner} has no option {name!r}.{guess} {takes}.")


def names_function(name: str) -> bool:
    """Whether this is `package.module:function`, and not a path or a name with another prefix.

    >>> [names_function(n) for n in ("mine:data", "folder:pictures", "timm:resnet18")]
    [True, False, False]
    """
    module, _, function = name.partition(":")
    parts = [*module.split("."), function]
    return module not in PREFIXES and all(part.isidentifier() for part in parts)


def shown_name(name: str) -> str:
    """A data set's or model's name as tables show it: of a path the last part.

    >>> [shown_name(n) for n in ("given:net", "folder:/data/pets", "/data/wine.csv", "mlp")]
    ['net', 'pets', 'wine.csv', 'mlp']
    """
    if name.startswith("folder:") or os.sep in name:
        return Path(name.removeprefix("folder:")).name
    return name.removeprefix(GIVEN).replace("<lambda>", "own model")


def user_function(name: str) -> Callable[..., Any]:
    """The function behind `package.module:function`; modules of the working folder count too.

    >>> user_function("math:sqrt")(9)
    3.0
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"A function is named module:function, got {name!r}.")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:  # a console script does not see the folder it was started in
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the user's module is there, something that it imports is not
        raise ValueError(
            f"{name!r} names the module {module_name!r}, which is neither installed nor in {here}."
        ) from error
    finally:
        if added:
            sys.path.remove(here)
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [k for k, v in vars(module).items() if inspect.isfunction(v)]
        raise unknown(f"function of the module {module_name}", function_name, functions)
    return function  # type: ignore[no-any-return]


def library(name: str, install: str = "") -> Any:
    """A module of an optional package, or how to get it."""
    package = name.partition(".")[0]
    try:
        importlib.import_module(package)
        return importlib.import_module(name)
    except ImportError as error:
        message = f"{package} is not installed. Install it: pip install {install or package}."
        raise ImportError(message) from error
    except RuntimeError as error:  # built for another torch: "operator … does not exist"
        raise ImportError(
            f"{package} does not import beside this torch ({error}). Install the build that matches it."
        ) from error
