"""`attach`: look at everything the user gave, refuse what cannot work, then start."""

from __future__ import annotations

import numbers
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from steppe import methods
from steppe.distributed import AscentOf, Noise, PassesOver, find_ranks
from steppe.frozen import FrozenLinear, LowRank, find_frozen
from steppe.hooks import Hooks, attached
from steppe.layout import is_sharded
from steppe.methods import Method
from steppe.perturber import Perturber
from steppe.shards import Shards
from steppe.training import Loop, MicrobatchLoss, OnIncomplete, Training
from steppe.weights import Weights


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: Method,
    *,
    seed: int = 0,
    exclude: Sequence[str] = (),
    include_frozen: Sequence[str] = (),
    microbatch_loss: MicrobatchLoss = "mean",
    scaler: torch.amp.GradScaler | None = None,
    on_incomplete: OnIncomplete = "warn",
    passes_over: PassesOver | None = None,
    noise: Noise | None = None,
    ascent: AscentOf | None = None,
    loop: Loop | None = None,
) -> Perturber:
    """Train `model` with `method` from now on; the loop stays as it is.

    Args:
        model: the object that the loop calls (the compiled or wrapped one, if it is).
        optimizer: any `torch.optim` optimizer over the model's parameters (or what Accelerate and
            Lightning wrap around one). Options of a parameter group: `perturb=False` leaves it out,
            `strength=0.5` scales its perturbation.
        method: `steppe.arwp()`, `steppe.m_arwp(0.015)`, …
        seed: of the noise. The global random state is never touched.
        exclude: names of parameters to leave out, for example `("*.bias", "*norm*")`.
        include_frozen: names of frozen weights of linear layers to perturb too, for example
            `("*base_layer.weight",)`. They are never written: their layers compute with W + E out of place.
        microbatch_loss: "mean" if the loop divides each micro-batch's loss by their number, which
            is usual; "sum" if it does not.
        scaler: the `GradScaler`, if there is one (needed by m_arwp and by `perturber.backward`).
        on_incomplete: what to do about a step whose number of micro-batches the passes do not
            divide: "warn" weighs what ran to one (and raises where no step is ever complete), "raise"
            refuses.
        passes_over: how several passes run: "ranks" (at once, a group of ranks each; the default
            under DDP or on a mesh) or "microbatches" (in turn; the default in one process).
        noise: "rank" (each replica draws its own eps, the default) or "shared" (one eps for all).
        ascent: of SAM under DDP: "rank" (each rank climbs by its own gradient, without communication,
            the default) or "global" (by the averaged one).
        loop: for integrations: how a framework's loop differs from a plain one, and what errors
            should tell its users (`steppe.training.Loop`).

    Two perturbers with one seed draw the same noise for parameters of the same place and shape: give
    two models that should differ (the parts of a GAN, an ensemble) different seeds.

    Examples:
        >>> from steppe import rwp
        >>> model = nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> perturber = attach(model, optimizer, rwp(0.01))
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> perturber.step
        1
    """
    optimizer, scaler = unwrap(optimizer, scaler)
    _check_kinds(model, optimizer, method, seed, scaler)
    _check_options(microbatch_loss, on_incomplete, passes_over, noise, ascent)
    if any(attached(model)):
        raise RuntimeError(
            "This model (or a part of it) is attached already. Call detach() on its perturber first."
        )
    if method.needs_steps:
        raise ValueError(
            f"A schedule of {method.name}() does not know how long training is. Give it the number "
            "of optimizer steps: cosine_increase(0, 0.01, steps=epochs * len(loader))."
        )
    choice = choose(model, optimizer, exclude, include_frozen, merged=method.merged)
    _check_frozen(model, method, choice)
    if method.perturbs and not choice.perturbed:
        raise ValueError(f"Nothing is left to perturb: {choice.skipped or 'no parameters'}.")
    ranks = find_ranks(model, method, passes_over=passes_over, noise=noise, ascent=ascent)
    weights = Weights(choice.perturbed, optimizer, Shards(model), choice.frozen)
    training = Training(
        model,
        method,
        optimizer,
        weights,
        ranks,
        seed=int(seed),
        microbatch_loss=microbatch_loss,
        on_incomplete=on_incomplete,
        scaler=scaler,
        loop=loop or Loop(),
    )
    ranks.narrow_sync_batchnorm(model)
    return Perturber(training, Hooks(training), choice.skipped)


def unwrap(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
) -> tuple[torch.optim.Optimizer, torch.amp.GradScaler | None]:
    """The optimizer that takes the steps, and its scaler, where something wraps the two.

    Accelerate's and Lightning's wrappers, and many that bring a base optimizer, are optimizers by
    name only: hooks belong on the one whose step updates the weights.
    """
    while (inner := _inner(optimizer)) is not None:
        scaler = getattr(optimizer, "scaler", None) if scaler is None else scaler
        optimizer = inner
    return optimizer, scaler


def _inner(optimizer: Any) -> torch.optim.Optimizer | None:
    for name in ("optimizer", "base_optimizer"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, torch.optim.Optimizer) and (
            inner.param_groups is getattr(optimizer, "param_groups", None)
        ):
            return inner
    return None


@dataclass(frozen=True)
class Choice:
    """Which parameters are perturbed, and why the others are not."""

    perturbed: list[tuple[str, nn.Parameter]]
    skipped: dict[str, str]
    frozen: dict[nn.Parameter, FrozenLinear]


def choose(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    exclude: Iterable[str] = (),
    include_frozen: Iterable[str] = (),
    *,
    merged: bool = False,
) -> Choice:
    """Sort the parameters of model and optimizer, or say what does not fit."""
    names = parameter_names(model)
    patterns = _patterns("exclude", exclude)
    included = _patterns("include_frozen", include_frozen)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    strangers = [p for p in groups if p not in names]
    if groups and len(strangers) == len(groups):
        shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
        raise ValueError(
            f"The optimizer's {len(strangers)} parameters (shapes {shapes}) are not the model's. "
            "Attach the model whose parameters the optimizer was made from."
        )
    warn_unmatched(patterns, names)
    frozen = find_frozen(
        model,
        {p: k for p, k in names.items() if not _excluded(k, patterns)},
        ["*base_layer.weight"] if merged and not included else included,
        lora_layers(model, merged),
    )
    renormed = _renormed(model)
    perturbed, skipped = [], {}
    for param, known in names.items():
        group = groups.get(param)
        reason = _reason_to_skip(param, known, group, patterns)
        if reason is None and param in renormed:
            reason = "rows are written in its forward (max_norm)"
        if merged and reason is None and param not in frozen:
            reason = "trained; only merged weights are perturbed"
        if param in frozen or (reason is None and group is not None):
            perturbed.append((known[0], param))
        else:
            skipped[known[0]] = reason or ""
    for number, param in enumerate(strangers):
        skipped[f"parameter {number} {tuple(param.shape)} of the optimizer"] = "not the model's"
    order = {param: number for number, param in enumerate(groups)}
    perturbed.sort(key=lambda entry: order.get(entry[1], len(order)))
    return Choice(perturbed, skipped, frozen)


def _patterns(option: str, given: Any) -> list[str]:
    one = isinstance(given, str) or not isinstance(given, Iterable)
    found: list[Any] = [given] if one else list(given)
    for name in (name for name in found if not isinstance(name, str)):
        example = f'{option}=("*.weight",)'
        raise TypeError(f"{option} takes names of parameters, as in {example}; got {_kind(name)}.")
    return found


def _excluded(names: Iterable[str], patterns: Iterable[str]) -> str | None:
    """The first pattern that leaves a parameter with these names out."""
    return next((p for p in patterns if any(fnmatchcase(name, p) for name in names)), None)


def lora_layers(model: nn.Module, merged: bool) -> Mapping[nn.Module, LowRank]:
    """What PEFT adds to the layers of a model, if it is PEFT's."""
    if "peft" in sys.modules:
        from steppe.integrations.peft import low_rank_parts

        return low_rank_parts(model, strict=merged)
    if merged:
        raise ValueError(
            "flat_lora() perturbs the LoRA layers of a PEFT model, and this is none. Make it one with "
            "peft.get_peft_model(model, LoraConfig(...)); frozen linear layers of other models take "
            "steppe.rwp() with attach(..., include_frozen=(...))."
        )
    return {}


def _check_frozen(model: nn.Module, method: Method, choice: Choice) -> None:
    """Refuse what would need a gradient of frozen weights, or shards of them."""
    if choice.frozen and any(is_sharded(p) for p in model.parameters()):
        raise ValueError(
            "Noise on frozen layers is not supported in a model under fully_shard(). Use "
            "DistributedDataParallel."
        )
    for noise in (p.perturbation for p in method.passes if choice.frozen):
        if noise is not None and (noise.needs_gradient or noise.learns_from != "nothing"):
            raise ValueError(
                f"{method.name}() learns from the gradients of what it perturbs, and frozen weights have "
                "none. Use rwp, m_rwp, lpf_sgd or antithetic_rwp, or flat_lora for a PEFT model."
            )


def warn_unmatched(patterns: Iterable[str], names: dict[nn.Parameter, list[str]]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for known in names.values() for name in known):
            warnings.warn(f"exclude={pattern!r} matches no parameter of the model.", stacklevel=4)


def check_seed(seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(f"seed must be an int, got {seed!r}.")


def _renormed(model: nn.Module) -> set[Tensor]:
    """Embeddings that shorten their rows in place during forward."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {m.weight for m in model.modules() if isinstance(m, kinds) and m.max_norm is not None}


def _reason_to_skip(
    param: nn.Parameter, names: list[str], group: dict[str, Any] | None, patterns: list[str]
) -> str | None:
    if group is None:
        return "frozen" if not param.requires_grad else "not in the optimizer"
    if not group.get("perturb", True):
        return "perturb=False in its group"
    if pattern := _excluded(names, patterns):
        return f"excluded by {pattern!r}"
    if param.numel() == 0:
        return "empty"
    if not param.is_floating_point():
        raise TypeError(
            f"{names[0]} has dtype {param.dtype}, which noise cannot be added to. Leave it out with "
            f"exclude=({names[0]!r},)."
        )
    strength = group.get("strength", 1.0)
    if not isinstance(strength, numbers.Real) or not 0 <= float(strength) < float("inf"):
        raise ValueError(f"strength of a parameter group must be at least 0, got {strength!r}.")
    return None


def parameter_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """All names of each parameter (tied ones have several), without what wrappers add."""
    wrappers = [
        f"{name}.module.".removeprefix(".")
        for name, module in model.named_modules()
        if isinstance(module, DistributedDataParallel) or getattr(module, "only_wraps", False)
    ]
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        for wrapper in reversed(wrappers):  # inner ones first
            if name.startswith(wrapper):
                name = wrapper.removesuffix("module.") + name.removeprefix(wrapper)
        for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
            name = name.replace(wrapper, "")
        names.setdefault(param, []).append(name)
    return names


def _check_kinds(
    model: object, optimizer: object, method: object, seed: object, scaler: object
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {_kind(model)}. The order is attach(model, optimizer, "
            "method)."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {_kind(optimizer)}. Make one first: "
            "torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS calls its closure many times a step, which weight perturbation cannot serve. Use "
            "an optimizer that takes one gradient a step (SGD, Adam, AdamW, …)."
        )
    if not isinstance(method, Method):
        name = getattr(method, "__name__", str(method).replace("-", "_"))
        hint = f" Did you mean steppe.{name}()?" if hasattr(methods, name) else ""
        raise TypeError(
            f"method must be a steppe.Method such as steppe.arwp(), got {method!r}.{hint}"
        )
    check_seed(seed)
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}.")


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _check_options(
    microbatch_loss: object,
    on_incomplete: object,
    passes_over: object,
    noise: object,
    ascent: object,
) -> None:
    for name, value, known in (
        ("microbatch_loss", microbatch_loss, get_args(MicrobatchLoss)),
        ("on_incomplete", on_incomplete, get_args(OnIncomplete)),
        ("passes_over", passes_over, (*get_args(PassesOver), None)),
        ("noise", noise, (*get_args(Noise), None)),
        ("ascent", ascent, (*get_args(AscentOf), None)),
    ):
        if value not in known:
            choices = ", ".join(repr(k) for k in known if k is not None)
            raise ValueError(f"{name} must be one of {choices}, got {value!r}.")
