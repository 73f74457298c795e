"""The contract that every method keeps, as checks that anybody can run on a method of their own.

    Examples:
        >>> from steppe import rwp
        >>> check_contract(rwp(0.01))

Each check raises AssertionError with what went wrong. steppe's own tests run them on every method.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from steppe.methods import Method
from steppe.noise import Draw, Gradients
from steppe.perturbations import Perturbation, State
from steppe.testing.loop import Loop, Twice
from steppe.weights import Weights


def check_contract(method: Method) -> None:
    """Run every check on a method."""
    for check in CHECKS:
        check(method)


def true_weights_after_a_step(method: Method) -> None:
    """With learning rate 0, a step leaves every weight bit for bit as it was."""
    loop = Loop(method, lr=0.0)
    before = loop.weights()
    loop.run(3)
    assert_same(before, loop.weights(), "weights after three steps with learning rate 0")


def true_weights_after_an_error(method: Method) -> None:
    """An exception in forward, loss or backward, or Ctrl-C in a pass, leaves true weights."""
    for where in ("forward", "loss", "backward", "interrupt"):
        for number in range(len(method.passes)):
            loop = Loop(method)
            loop.run(2)
            before = loop.weights()
            loop.fail(where, after=number)
            assert_same(before, loop.weights(), f"weights after an error in {where} {number}")
            loop.run(1)


def true_weights_in_the_middle(method: Method) -> None:
    """state_dict() of any part and an evaluation in the middle of a pass see true weights."""
    loop = Loop(replace(method, m=None))
    loop.run(2)
    before, output = loop.weights(), loop.evaluate()
    for look in (loop.weights, loop.state_dict_weights):
        run = loop.enter_last_pass()
        perturbed = method.passes[-1].perturbation is not None
        moved = loop.perturber.perturbed
        assert moved == perturbed, "the last pass should have moved the weights"
        if look == loop.weights:
            assert torch.equal(output, loop.evaluate()), "evaluation in the middle of a pass"
        else:
            assert_same(before, look(), "state_dict in the middle of a pass")
        loop.abandon(run)
        assert_same(before, loop.weights(), "weights after an abandoned pass")


def zero_strength_is_plain_training(method: Method) -> None:
    """At strength 0 the run and the global random state equal those without steppe."""
    ours, plain = Loop(_stilled(method)), Loop(None, like=method)
    states = []
    for loop in (ours, plain):
        torch.manual_seed(7)
        loop.run(4)
        states.append(torch.get_rng_state())
    assert_same(plain.weights(), ours.weights(), "weights at strength 0 and without steppe")
    assert torch.equal(*states), "the global random state was touched"


def equal_seeds_give_equal_runs(method: Method) -> None:
    """Two runs with one seed are bit-identical."""
    first, second = Loop(method), Loop(method)
    for loop in (first, second):
        loop.run(4)
    assert_same(first.weights(), second.weights(), "two runs with the same seed")


def resumed_equals_uninterrupted(method: Method) -> None:
    """Save after some steps, load into a new process's objects, resume: bit for bit the same."""
    whole, first, second = Loop(method), Loop(method), Loop(method, seed=99)
    whole.run(6)
    first.run(3)
    second.load(pickle.loads(pickle.dumps(first.save())))
    second.run(3)
    assert_same(whole.weights(), second.weights(), "an uninterrupted run and a resumed one")
    assert second.perturber.step == 6, "the resumed run should keep counting"


def copies_are_inert_and_detach_leaves_no_trace(method: Method) -> None:
    """A deep copy or pickle of the model trains plainly; so does the model after detach()."""
    loop = Loop(method)
    loop.run(1)
    for other in (copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))):
        before = [p.detach().clone() for p in other.parameters()]
        other(loop.batches(1)[0][0]).sum().backward()
        assert same(before, [p.detach() for p in other.parameters()]), "a copy moved its weights"
    assert b"steppe" not in pickle.dumps(loop.model), "a pickle of the model names steppe"
    loop.perturber.detach()
    hooks = (m._forward_pre_hooks or m._forward_hooks for m in loop.model.modules())
    assert not any(hooks), "detach() left hooks on the model"
    assert not any(p._backward_hooks for p in loop.model.parameters()), "detach() left hooks"
    loop.plain = True
    loop.run(1)


def every_leaf_gets_the_weighted_sum(method: Method) -> None:
    """Parameters that another optimizer trains get the method's gradient too, not a bare sum."""
    ours, plain = Loop(_stilled(method), trains="first"), Loop(None, like=method, trains="first")
    for loop in (ours, plain):
        loop.gradients()
    found, wanted = ([p.grad for p in loop.model.parameters()] for loop in (ours, plain))
    for a, b in zip(found, wanted, strict=True):
        assert a is not None, "a parameter outside of the optimizer has no gradient"
        assert b is not None
        torch.testing.assert_close(a, b, msg="the gradient of a parameter outside of the optimizer")


def foreign_writes_are_noticed(method: Method) -> None:
    """Whoever writes a weight while eps is in it gets an error, and true weights are put back."""
    if method.passes[-1].perturbation is None:
        return
    loop = Loop(replace(method, m=None))
    loop.run(2)
    before = loop.weights()
    run = loop.enter_last_pass()
    with torch.no_grad():
        next(loop.model.parameters()).mul_(2.0)
    try:
        loop.abandon(run)
    except RuntimeError:
        assert_same(before, loop.weights(), "weights after a write in the middle of a pass")
        loop.perturber.new_step()
    else:
        raise AssertionError("a write in the middle of a pass went unnoticed")
    loop.run(1)


def a_step_within_a_step_counts_once(method: Method) -> None:
    """An optimizer whose step calls that of its base class takes one step, not two."""
    loop = Loop(method, optimizer=Twice)
    loop.run(3)
    assert loop.perturber.step == 3, f"three steps were counted as {loop.perturber.step}"


def groups_count_as_they_are_now(method: Method) -> None:
    """After `optimizer.load_state_dict`, options of the new parameter groups are obeyed."""
    loop = Loop(replace(method, m=None))
    loop.run(2)
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())
    for group in loop.optimizer.param_groups:
        group["strength"] = 0.0
    before = loop.weights()
    run = loop.enter_last_pass()
    assert_same(before, loop.weights(), "weights in a pass with strength=0 in all groups")
    loop.abandon(run)


CHECKS: tuple[Callable[[Method], None], ...] = (
    true_weights_after_a_step,
    true_weights_after_an_error,
    true_weights_in_the_middle,
    zero_strength_is_plain_training,
    equal_seeds_give_equal_runs,
    resumed_equals_uninterrupted,
    copies_are_inert_and_detach_leaves_no_trace,
    every_leaf_gets_the_weighted_sum,
    foreign_writes_are_noticed,
    a_step_within_a_step_counts_once,
    groups_count_as_they_are_now,
)


@dataclass(frozen=True)
class Still(Perturbation):
    """Another perturbation at strength 0: it learns, but never moves a weight."""

    inner: Perturbation

    @property
    def needs_gradient(self) -> bool:  # type: ignore[override]
        return self.inner.needs_gradient

    @property
    def learns_from(self) -> Any:  # type: ignore[override]
        return self.inner.learns_from

    def strength(self, step: int) -> float:
        return 0.0

    def move(self, weights: Weights, state: State, draw: Draw, gradient: Gradients) -> None:
        raise AssertionError("weights were moved at strength 0")

    def init(self, weights: Weights) -> State:
        return self.inner.init(weights)

    def learn(self, weights: Weights, state: State, grads: Gradients, scale: Any) -> None:
        self.inner.learn(weights, state, grads, scale)

    def collect(self, weights: Weights, grads: Gradients, scale: float) -> Gradients:
        return self.inner.collect(weights, grads, scale)

    def learn_noted(self, weights: Weights, state: State, notes: Gradients, scale: Any) -> None:
        self.inner.learn_noted(weights, state, notes, scale)


def _stilled(method: Method) -> Method:
    passes = [
        replace(each, perturbation=each.perturbation and Still(each.perturbation))
        for each in method.passes
    ]
    return replace(method, passes=tuple(passes))


def same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def assert_same(first: Sequence[Tensor], second: Sequence[Tensor], what: str) -> None:
    if not same(first, second):
        worst = max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))
        raise AssertionError(f"not bit for bit the same: {what} (largest difference {worst:.3g})")
