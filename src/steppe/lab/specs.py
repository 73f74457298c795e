"""Methods as text: `arwp:ratio=.6,eta=1` on the command line, in configs and in tables."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import steppe
from steppe.lab.coercion import coerce, field_types, literal
from steppe.lab.config import Config, Value
from steppe.lab.errors import LabError, unknown

PAPER = ("sgd", "sam", "rwp", "arwp", "m-rwp", "m-arwp")
"""The six methods of the paper's tables."""
METHODS = (*PAPER, "asam", "lpf-sgd", "antithetic-rwp", "msam")
"""The functions of `steppe` that make methods, with hyphens."""
LARGE = "rwp:rise=0.2"
"""The setting for compression: shown beside the default wherever robustness is, and never tuned."""

STRENGTHS = ("sigma", "ratio", "rho", "rise")
SCHEDULES: dict[str, Callable[[float], steppe.Schedule]] = {
    "cosine": lambda end: steppe.cosine_increase(0, end),
    "linear": lambda end: steppe.linear(0, end),
    "constant": lambda end: steppe.constant(end),
}
RAMPED = "ramped"
"""A rise as a number: `steppe.schedules` lets it in as the net learns."""
INCREASING = ("rwp", "arwp")
"""Methods whose strength rises over training in the paper, and so by default here."""


@dataclass(frozen=True)
class Spec:
    """A method by name with its options, and the config fields that it changes.

    >>> spec = parse("arwp:ratio=.6,eta=1,batch=64")
    >>> spec.name, dict(spec.options), dict(spec.fields)
    ('arwp', {'ratio': 0.6, 'eta': 1}, {'batch': 64})
    >>> str(spec)
    'arwp:ratio=0.6,eta=1,batch=64'
    """

    name: str
    options: Mapping[str, Value] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        pairs = [f"{key}={_write(value)}" for key, value in {**self.options, **self.fields}.items()]
        return f"{self.name}:{','.join(pairs)}" if pairs else self.name

    def apply(self, config: Config) -> Config:
        """The run `config` with this method and the fields it changes."""
        own = dataclasses.replace(self, fields={})
        return config.replace(method=str(own), **self.fields)

    def with_options(self, **options: Value) -> Spec:
        """The same method with other options; a new strength replaces the old, whatever its kind."""
        dropped = STRENGTHS if set(STRENGTHS) & set(options) else ()
        kept = {name: value for name, value in self.options.items() if name not in dropped}
        return dataclasses.replace(self, options={**kept, **options})

    @property
    def strength(self) -> tuple[str, float] | None:
        """`("ratio", 0.6)`: the strength as given; None where the method's default holds."""
        for name in STRENGTHS:
            given = self.options.get(name)
            if isinstance(given, int | float):
                return name, float(given)
        return None

    @property
    def for_compression(self) -> bool:
        """Whether it has the strength that is fixed by its purpose."""
        return self.strength == ("rise", 0.2)

    @cached_property
    def full_strength(self) -> tuple[str, float] | None:
        """The strength as given, or the method's default; None for the baseline."""
        for each in self._make(self.options).passes:
            for name in STRENGTHS:
                value = getattr(each.perturbation, name, None)
                if isinstance(value, int | float):
                    return name, float(value)
        return None

    @property
    def steered(self) -> bool:
        return self.full_strength is not None and self.full_strength[0] == "rise"

    @property
    def shape(self) -> str:
        """How the strength goes over training: cosine, linear or constant; a rise ramps itself."""
        usual = "cosine" if self.name in INCREASING else "constant"
        chosen = str(self.options.get("schedule", RAMPED if self.steered else usual))
        if chosen not in SCHEDULES and chosen != RAMPED:
            raise unknown("strength schedule", chosen, SCHEDULES)
        return chosen

    def build(self, steps: int) -> steppe.Method:
        """The method for a training of so many optimizer steps."""
        method = self._make(self.options)  # checks the values
        fixed = self.shape == RAMPED or (self.shape == "constant" and not self.steered)
        if self.full_strength is None or fixed:
            return method
        kind, value = self.full_strength
        return self._make({**self.options, kind: SCHEDULES[self.shape](value)}).with_steps(steps)

    def _make(self, options: Mapping[str, Any]) -> steppe.Method:
        arguments = {name: value for name, value in options.items() if name != "schedule"}
        try:
            return _function(self.name)(**arguments)
        except (TypeError, ValueError) as error:
            raise LabError(f"{self}: {error}") from error


def parse(text: str) -> Spec:
    """A spec from `name` or `name:option=value,…`; options that are config fields change those."""
    name, _, rest = text.strip().partition(":")
    name = name.strip().lower().replace("_", "-")
    if name in ("adam", "adamw"):
        raise LabError(
            f"{name} is an optimizer: --optimizer {name} (in Python, optimizer={name!r} in the "
            "config) trains every method with it, and the baseline is then called by its name."
        )
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    options: dict[str, Value] = {}
    fields: dict[str, Any] = {}
    types = field_types(Config)
    for pair in rest.split(",") if rest else ():
        key, sign, value = (part.strip() for part in pair.partition("="))
        key = key.replace("-", "_")
        if not (sign and value):
            raise LabError(f"write an option as name=value, as in {name}:lam=.5; got {pair!r}.")
        if key in option_names(name):
            options[key] = literal(value)  # type: ignore[assignment]
        elif key in types and key != "method":
            fields[key] = coerce(key, value, types[key])
        elif not option_names(name):
            raise LabError(f"{name} has no options, got {key!r}.")
        else:
            raise unknown(f"option of {name}", key, option_names(name))
    spec = Spec(name, options, fields)
    if name != "sgd":  # which has nothing to check, and `--help` must not wait for torch
        spec.build(steps=1)  # the method itself checks its values
    return spec


def usual_methods(*, robustness: bool) -> tuple[str, ...]:
    """What is compared where nobody says."""
    return (*PAPER, LARGE) if robustness else PAPER


def as_spec(method: str | Spec | steppe.Method) -> Spec:
    """The spec of a method given as text or as an object, `steppe.arwp(ratio=0.6)`.

    An object with a strength of its own keeps it as `attach` would: a number is constant, a
    schedule of steppe's without a length gets that of the training. Without a strength it is the
    method by name.

    >>> str(as_spec(steppe.m_rwp(ratio=0.9, lam=0.3))), str(as_spec(steppe.arwp()))
    ('m-rwp:ratio=0.9,lam=0.3', 'arwp')
    """
    if isinstance(method, Spec):
        return method
    if isinstance(method, str):
        return parse(method)
    if not isinstance(method, steppe.Method):
        raise LabError(
            'a method is a text such as "arwp:ratio=.6" or an object such as steppe.arwp(), got '
            f"{getattr(method, '__name__', type(method).__name__)}."
        )
    name = method.name.replace("_", "-")
    if name in METHODS:
        spec, same = _described(name, method)
        if same == method:
            return spec
    raise LabError(
        f"{method.name} cannot be trained by the lab, which makes the methods that steppe's functions "
        "make, with numbers, linear, cosine_increase or constant as strengths. Train a method of "
        "your own in your own loop: steppe.attach."
    )


def _described(name: str, method: steppe.Method) -> tuple[Spec, steppe.Method]:
    """The spec that says what can be read off a method, and the method that its values make."""
    noisy = next((each for each in method.passes if each.perturbation), method.passes[0])
    values: dict[str, Any] = {
        "lam": noisy.weight,
        "same_batch": method.feed == "one",
        "m": method.m,
        "samples": len(method.passes),
        "elementwise": type(noisy.perturbation).__name__ == "ElementwiseGaussian",
    }
    function, exact = _function(name), {}
    for key, parameter in inspect.signature(function).parameters.items():
        value = values.get(key, getattr(noisy.perturbation, key, None))
        if value != parameter.default:
            exact[key] = value
    same = function(**exact)
    options: dict[str, Value] = {}
    for key in sorted(exact, key=lambda key: key not in STRENGTHS):
        rest = {name: value for name, value in exact.items() if name != key}
        with suppress(ValueError):
            if function(**rest) == same:  # the value is what None stands for
                exact = rest
                continue
        options[key] = exact[key]
        if key in STRENGTHS:
            options[key], shape = _strength_and_shape(exact[key])
            if key == "rise" and not callable(exact[key]):
                shape = RAMPED
            if shape != Spec(name, options).shape:
                options["schedule"] = shape
    return Spec(name, options), same


def _strength_and_shape(strength: Any) -> tuple[Value, str]:
    """`(0.01, "cosine")` of cosine_increase(0, 0.01)."""
    if not callable(strength):
        return strength, "constant"
    value: Any = getattr(strength, "end", getattr(strength, "value", None))
    for shape, schedule in SCHEDULES.items():
        if value is not None and schedule(value) == strength:
            return value, shape
    raise LabError(
        f"{strength}: in the lab a strength is a number, or linear(0, end) or "
        "cosine_increase(0, end) over the whole training, without steps."
    )


def adapted(base: Spec, given: Spec) -> Spec:
    """A recipe's spec with the options of the given one, a given strength replacing the recipe's."""
    combined = base.with_options(**given.options)
    return dataclasses.replace(combined, fields={**base.fields, **given.fields})


def option_names(name: str) -> list[str]:
    """The options a method takes on the command line."""
    names = list(inspect.signature(_function(name)).parameters)
    return [*names, "schedule"] if any(word in names for word in STRENGTHS) else names


def label(spec: Spec, optimizer: str = "sgd") -> str:
    """How tables call the method, its strength apart; the baseline goes by its optimizer's name.

    >>> label(parse("m-arwp:ratio=.9,lam=.3"))
    'm-ARWP (lam 0.3)'
    """
    baseline = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[optimizer]
    base = baseline if spec.name == "sgd" else spec.name.upper().replace("M-", "m-")
    extra = {**spec.options, **spec.fields}
    shown = [f"{key} {_write(value)}" for key, value in extra.items() if key not in STRENGTHS]
    return f"{base} ({', '.join(shown)})" if shown else base


def _function(name: str) -> Callable[..., steppe.Method]:
    function: Callable[..., steppe.Method] = getattr(steppe, name.replace("-", "_"))
    return function


def _write(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
