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
from torch import Tensor, nn

from steppe.attach import attach
from steppe.methods import Method, Pass
from steppe.noise import Draw
from steppe.passes import Run, deal
from steppe.perturbations import Gradients, Perturbation, State
from steppe.perturber import Perturber
from steppe.weights import Weights

Batch = tuple[Tensor, Tensor]


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
    still = replace(method, passes=tuple(_still(p) for p in method.passes))
    ours, plain = Loop(still), Loop(None, like=method)
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
    """Save after some steps, load into a new process's objects, go on: bit for bit the same."""
    whole, first, second = Loop(method), Loop(method), Loop(method, seed=99)
    whole.run(6)
    first.run(3)
    second.load(pickle.loads(pickle.dumps(first.save())))
    second.run(3)
    assert_same(whole.weights(), second.weights(), "an uninterrupted run and a resumed one")
    assert second.perturber.step == 6, "the resumed run should go on counting"


def copies_are_inert_and_detach_leaves_no_trace(method: Method) -> None:
    """A deep copy or pickle of the model trains plainly; so does the model after detach()."""
    loop = Loop(method)
    loop.run(1)
    for other in (copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))):
        before = [p.detach().clone() for p in other.parameters()]
        other(loop.batches(1)[0][0]).sum().backward()
        assert same(before, [p.detach() for p in other.parameters()]), "a copy moved its weights"
    loop.perturber.detach()
    hooks = (m._forward_pre_hooks or m._forward_hooks for m in loop.model.modules())
    assert not any(hooks), "detach() left hooks on the model"
    assert not any(p._backward_hooks for p in loop.model.parameters()), "detach() left hooks"
    loop.plain = True
    loop.run(1)


CHECKS: tuple[Callable[[Method], None], ...] = (
    true_weights_after_a_step,
    true_weights_after_an_error,
    true_weights_in_the_middle,
    zero_strength_is_plain_training,
    equal_seeds_give_equal_runs,
    resumed_equals_uninterrupted,
    copies_are_inert_and_detach_leaves_no_trace,
)


class Loop:
    """A small training run of a method (None: plain training, of batches `like` a method's)."""

    def __init__(
        self, method: Method | None, *, like: Method | None = None, lr: float = 0.1, seed: int = 0
    ) -> None:
        shape = method or like
        assert shape is not None
        self.method = shape
        torch.manual_seed(0)
        self.model = _Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.plain = method is None
        if method is not None:
            self.perturber: Perturber = attach(self.model, self.optimizer, method, seed=seed)
        self.done = 0

    def batches(self, step: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(step)
        return [
            (
                torch.randn(16, 6, generator=generator),
                torch.randint(0, 3, (16,), generator=generator),
            )
            for _ in range(self.method.batches_needed)
        ]

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(x), y)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            if self.plain:
                self._plain_gradients()
            else:
                self.perturber.backward(self.loss_of, *self.batches(self.done))
            self.optimizer.step()
            self.done += 1

    def _plain_gradients(self) -> None:
        """The gradient of the weighted sum of the batches' losses, written without steppe."""
        params = list(self.model.parameters())
        for _, batch, factor in deal(self.method, tuple(self.batches(self.done))):
            if factor == 0:
                continue
            loss = self.loss_of(*batch)
            grads = torch.autograd.grad(loss if factor == 1 else loss * factor, params)
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad if param.grad is None else param.grad + grad

    def fail(self, where: str, after: int) -> None:
        """One step in which something goes wrong in pass number `after`."""
        calls = 0

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            fatal = calls == after + 1
            if fatal and where == "forward":
                x = x[:, :1]
            loss = self.loss_of(x, y)
            if fatal and where == "loss":
                raise ValueError("planned")
            if fatal and where == "interrupt":
                raise KeyboardInterrupt
            if fatal and where == "backward":
                loss = _fails_in_backward(loss)
            return loss

        self.optimizer.zero_grad()
        try:
            self.perturber.backward(loss_of, *self.batches(self.done))
        except (ValueError, RuntimeError, KeyboardInterrupt):
            self.optimizer.zero_grad()
            return
        raise AssertionError(f"the planned error in {where} did not come up")

    def enter_last_pass(self) -> Run:
        """Enter the last pass of a step and run its forward, but not its backward."""
        self.optimizer.zero_grad()
        batches = self.batches(self.done)
        passes = self.method.passes
        for number, run in enumerate(self.perturber.passes()):
            run.__enter__()
            loss = self.loss_of(*batches[number % len(batches)])
            if number < len(passes) - 1:
                loss.backward()
                run.__exit__(None, None, None)
        return run

    def abandon(self, run: Run) -> None:
        run.__exit__(RuntimeError, None, None)
        self.optimizer.zero_grad()
        self.perturber.new_step()

    @torch.no_grad()
    def evaluate(self) -> Tensor:
        self.model.eval()
        output: Tensor = self.model(torch.ones(2, 6))
        self.model.train()
        return output

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def state_dict_weights(self) -> list[Tensor]:
        """Through the state dict of each part by itself."""
        parts = (self.model.first, self.model.second)
        return [t.clone() for part in parts for t in part.state_dict().values()]

    def save(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "perturber": self.perturber.state_dict(),
            "done": self.done,
        }

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.perturber.load_state_dict(saved["perturber"])
        self.done = saved["done"]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(torch.tanh(self.first(x)))
        return output


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ValueError("planned")


def _fails_in_backward(loss: Tensor) -> Tensor:
    failing: Tensor = _FailsInBackward.apply(loss)  # type: ignore[no-untyped-call]
    return failing


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

    def collect(self, grad: Tensor, noted: Tensor | None) -> Tensor:
        return self.inner.collect(grad, noted)

    def learn_noted(self, weights: Weights, state: State, notes: Gradients, scale: Any) -> None:
        self.inner.learn_noted(weights, state, notes, scale)


def _still(planned: Pass) -> Pass:
    noise = planned.perturbation
    return planned if noise is None else replace(planned, perturbation=Still(noise))


def same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def assert_same(first: Sequence[Tensor], second: Sequence[Tensor], what: str) -> None:
    if not same(first, second):
        worst = max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))
        raise AssertionError(f"not bit for bit the same: {what} (largest difference {worst:.3g})")
