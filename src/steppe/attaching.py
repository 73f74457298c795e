"""`attach` and `perturbed`: look at everything the user gave, refuse what cannot work, then start."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, get_args

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from steppe import methods
from steppe.distributed import AscentOf, Asked, Noise, PassesOver, Shards, find_ranks, sharding
from steppe.frozen import FrozenLinear, find_frozen, first_few
from steppe.hooks import Hooks
from steppe.methods import Method
from steppe.noise import Draw, check_seed
from steppe.perturber import Perturber
from steppe.schedules import check_nonnegative, check_number
from steppe.standins import ASKS, ScalerAsks, attached
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
    _check_model_and_seed(model, seed)
    _check_kinds(model, optimizer, method, scaler)
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
    if any(attached(model)):
        raise RuntimeError(
            "This model (or a part of it) is attached already. Call detach() on its perturber first."
        )
    asks, several = vars(optimizer).get(ASKS), len(method.passes) > 1
    if isinstance(asks, ScalerAsks) and (asks.several or several):
        raise RuntimeError(
            "This optimizer is attached with another model already, and two methods would weigh its "
            "gradients. Give each model an optimizer of its own."
        )
    if method.needs_steps:
        raise ValueError(
            f"A schedule of {method.name}() does not know how long training is. Give it the number "
            "of optimizer steps: cosine_increase(0, 0.01, steps=epochs * len(loader))."
        )
    chosen, skipped, frozen = choose(model, optimizer, method, exclude, include_frozen)
    if method.perturbs and not chosen:
        why = first_few([f"{name} ({why})" for name, why in skipped.items()]) or "no parameters"
        raise ValueError(f"Nothing is left to perturb: {why}. Freeze or exclude less.")
    ranks = find_ranks(model, method, Asked(passes_over, noise, ascent))
    weights = Weights(chosen, optimizer, Shards(model), frozen)
    given = int(seed), microbatch_loss, on_incomplete, scaler, loop or Loop()
    training = Training(model, method, optimizer, weights, ranks, *given)
    training.statistics.narrow(model)
    return Perturber(training, Hooks(training), skipped)


@contextmanager
def perturbed(
    model: nn.Module, *, seed: int, ratio: float, exclude: Sequence[str] = ()
) -> Iterator[None]:
    """The model's weights plus Gaussian noise inside the block, the true weights after it.

    For weight-noise evaluation, evolution strategies and parameter-noise exploration. Each filter is
    displaced by about `ratio` times its norm, `std_j = ratio ‖w_j‖ / sqrt(d_j)`, as `rwp(ratio=…)`
    does; a negative `ratio` gives the same noise with the opposite sign, for antithetic pairs.

    - The noise is a function of `seed` and of the parameters' shapes and memory format, independent for
      each tensor, and the same on every rank and for any sharding. The global generator is not used.
    - Every floating-point parameter is perturbed, also a frozen one; `exclude` takes names to leave
      out, for example `("*.bias", "*norm*")`.
    - Every exit restores the weights bit-exactly, exceptions and Ctrl-C included. Nothing else is
      restored: call `model.eval()` first, or BatchNorm's statistics learn from perturbed forwards.
    - While weights are perturbed, by this or by a perturber, a second perturbation of them is refused.
      Under FSDP2 all ranks enter the block together.

    Examples:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
        >>> losses = []
        >>> for seed in range(3):
        ...     with perturbed(model, seed=seed, ratio=0.1):
        ...         losses.append(model(torch.ones(1, 2)).item())
        >>> len(set(losses)), model.weight.tolist()
        (3, [[3.0, 4.0]])
    """
    _check_model_and_seed(model, seed)
    check_number("ratio", ratio)
    if not math.isfinite(ratio):
        raise ValueError(f"ratio must be finite, got {ratio!r}.")
    for module in sharding(model):  # gathered tensors may be in the parameters' place
        module.reshard()
    names = parameter_names(model)
    patterns = _checked(exclude, names)
    floating = {p: known for p, known in names.items() if p.is_floating_point()}
    chosen = [(known[0], p) for p, known in floating.items() if not _excluded(known, patterns)]
    if not chosen:
        why = f"{exclude=} leaves out every" if floating else "the model has no"
        raise ValueError(f"Nothing is left to perturb: {why} floating-point parameter.")
    weights = Weights(chosen, None, Shards(model))
    draw = Draw(int(seed), 0, sign=math.copysign(1.0, ratio))
    try:
        weights.save()  # for a ratio of 0 too: a second block inside is refused all the same
        if ratio != 0:
            weights.add_noise(draw, abs(ratio) * weights.norms_per_entry())
        weights.watch()
        yield
    except BaseException:
        weights.restore(quiet=True)
        raise
    finally:
        weights.free()


def unwrap(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
) -> tuple[torch.optim.Optimizer, torch.amp.GradScaler | None]:
    """The optimizer that takes the steps, and its scaler, where something wraps the two.

    Accelerate's and Lightning's wrappers, and many that bring a base optimizer, are optimizers by
    name only: hooks belong on the one whose step updates the weights.
    """
    groups = getattr(optimizer, "param_groups", None)
    for inner in (getattr(optimizer, name, None) for name in ("optimizer", "base_optimizer")):
        if isinstance(inner, torch.optim.Optimizer) and inner.param_groups is groups:
            return unwrap(inner, getattr(optimizer, "scaler", None) if scaler is None else scaler)
    return optimizer, scaler


def choose(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: Method,
    exclude: Iterable[str],
    include_frozen: Iterable[str],
) -> tuple[list[tuple[str, nn.Parameter]], dict[str, str], dict[nn.Parameter, FrozenLinear]]:
    """Which parameters are perturbed, why others are not, and which are frozen layers'."""
    names = parameter_names(model)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    strangers = [p for p in groups if p not in names]
    if groups and len(strangers) == len(groups):
        shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
        raise ValueError(
            f"The optimizer's {len(strangers)} parameters (shapes {shapes}) are not the model's. "
            "Attach the model whose parameters the optimizer was made from."
        )
    patterns = _checked(exclude, names)
    included = _patterns("include_frozen", include_frozen)
    candidates = {p: k for p, k in names.items() if not _excluded(k, patterns)}
    frozen = find_frozen(model, method, candidates, included)
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    renormed = {embedding.weight for embedding in embeddings if embedding.max_norm is not None}
    perturbed, skipped = [], {}
    for param, known in names.items():
        reason = _reason_to_skip(param, known, groups.get(param), patterns)
        if reason is None and param in renormed:
            reason = "rows are written in its forward (max_norm)"
        elif reason is None and method.merged:
            reason = "trained; only merged weights are perturbed"
        if param in frozen or reason is None:
            perturbed.append((known[0], param))
        else:
            skipped[known[0]] = reason
    for number, param in enumerate(strangers):
        skipped[f"parameter {number} {tuple(param.shape)} of the optimizer"] = "not the model's"
    order = {param: number for number, param in enumerate(groups)}
    perturbed.sort(key=lambda entry: order.get(entry[1], len(order)))
    return perturbed, skipped, frozen


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


def _checked(exclude: Iterable[str], names: Mapping[nn.Parameter, list[str]]) -> list[str]:
    """The patterns to leave out, with a warning where one matches nothing."""
    patterns = _patterns("exclude", exclude)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for known in names.values() for name in known):
            warnings.warn(f"exclude={pattern!r} matches no parameter of the model.", stacklevel=4)
    return patterns


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
    check_nonnegative("strength of a parameter group", group.get("strength", 1.0))
    return None


def _check_model_and_seed(model: object, seed: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {_kind(model)}. The order is attach(model, optimizer, "
            "method)."
        )
    check_seed(seed)


def _check_kinds(model: nn.Module, optimizer: object, method: object, scaler: object) -> None:
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and any(True for _ in part.parameters()):
            raise TypeError(
                f"{name or 'The model'} is a ScriptModule, which takes none of the hooks that steppe needs. Attach "
                "the model that it was made from; torch.jit.script and trace work on an attached one."
            )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {_kind(optimizer)}. Make one first: "
            "torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise TypeError(
            f"{_kind(optimizer)} has none of torch's hooks: its __init__ must call super().__init__(params, "
            "defaults). Or attach the optimizer whose step() updates the weights."
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
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}.")


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
