"""Loops that a framework owns: which methods they can run, and what they know of the length."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable
from typing import Any

from steppe import methods
from steppe.methods import Method
from steppe.perturber import Perturber

OPTIONS = ("seed", "exclude", "include_frozen", "on_incomplete", "passes_over", "noise", "ascent")
"""Options of `attach` that are the user's; the framework knows the others."""


NAMES = (
    *("sgd", "rwp", "arwp", "m_rwp", "m_arwp", "sam", "asam"),
    *("msam", "lpf_sgd", "antithetic_rwp", "flat_lora", "m_flat_lora"),
)


def named(method: Method | str) -> Method:
    """A method, also by name with its options, as configuration files and command lines write it.

    Examples:
        >>> named("m-arwp:ratio=0.1,lam=0.3").name
        'm_arwp'
    """
    if not isinstance(method, str):
        return method
    name, _, options = method.partition(":")
    name = name.strip().lower().replace("-", "_")
    if name not in NAMES:
        raise ValueError(f"There is no method {name!r}. Known are {', '.join(NAMES)}.")
    values: dict[str, Any] = {}
    for pair in filter(None, options.split(",")):
        key, _, value = (part.strip() for part in pair.partition("="))
        try:
            values[key] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            raise ValueError(
                f"Write the options of a method as name=value, as in arwp:ratio=0.1; got {pair!r}."
            ) from None
    if name == "m_flat_lora":  # Python writes it mixed(flat_lora())
        mixing = {key: values.pop(key) for key in ("lam", "same_batch") if key in values}
        return methods.mixed(methods.flat_lora(**values), **mixing)
    made: Method = getattr(methods, name)(**values)
    return made


def checked(method: Method | str, options: dict[str, Any]) -> Method:
    """The callback's method, unless it or an option could not work once training runs."""
    given: object = named(method)
    if not isinstance(given, Method):
        name = getattr(given, "__name__", "arwp")
        hint = f" Did you mean steppe.{name}()?" if callable(given) else ""
        raise TypeError(
            f"Perturb() takes a steppe.Method such as steppe.arwp(), got {given!r}.{hint}"
        )
    method = given
    if method.m is not None or (method.in_sequence and method.feed == "each"):
        option = f"m={method.m}" if method.m is not None else "same_batch=False"
        raise ValueError(
            f"{method.name}({option}) deals batches in a way that a framework's loop cannot. Leave "
            "the option out, or write the loop yourself with perturber.backward(loss_of, ...)."
        )
    for name in options:
        if name in ("scaler", "microbatch_loss"):
            raise TypeError(f"Perturb() takes {name} from the framework; leave it out.")
        if name not in OPTIONS:
            raise TypeError(f"Perturb() takes the options {', '.join(OPTIONS)}; got {name}.")
    return method


def fill_in_length(method: Method, length: Callable[[], float], ask: str) -> Method:
    """The method with the length of training where a schedule left it open. `ask`: how to give it."""
    if not method.needs_steps:
        return method
    steps = length()
    if not (math.isfinite(steps) and steps >= 1):
        raise ValueError(
            f"A schedule of {method.name}() needs the length of training, but {ask} leaves it open "
            f"(got {steps}). Set it, or give the schedule its steps: cosine_increase(0, 0.01, 1000)."
        )
    return method.with_steps(int(steps))


def begin(
    perturber: Perturber, step: int, saved: dict[str, Any] | None, accumulated: int, setting: str
) -> None:
    """Before the first step: refuse an accumulation that never gives a step all its passes, and load
    the state of a checkpoint, or warn that it has none."""
    method = perturber.method
    passes = len(method.passes)
    if perturber.ranks.index is None and not method.repeats_batch and accumulated % passes:
        raise RuntimeError(
            f"{method.name}() runs {passes} passes over consecutive micro-batches of one optimizer "
            f"step, but there are {accumulated}. Set {setting}={passes}) (or a multiple of {passes})."
        )
    if step and saved:
        perturber.load_state_dict(saved)
    elif step:
        warnings.warn(
            f"Training resumes at step {step} from a checkpoint without a state of Perturb(): "
            "schedules and history start anew.",
            stacklevel=3,
        )
