"""A small training run of any method, to be checked from outside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from steppe.attaching import attach
from steppe.methods import Method
from steppe.passes import Run, deal
from steppe.perturber import Perturber

Batch = tuple[Tensor, Tensor]


class Loop:
    """A small training run of a method (None: without one, of batches `like` a method's)."""

    def __init__(
        self,
        method: Method | None,
        *,
        like: Method | None = None,
        lr: float = 0.1,
        seed: int = 0,
        optimizer: type[torch.optim.SGD] = torch.optim.SGD,
        trains: str = "all",
    ) -> None:
        shape = method or like
        assert shape is not None
        self.method = shape
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        trained = self.model if trains == "all" else self.model[0]
        self.optimizer = optimizer(trained.parameters(), lr=lr, momentum=0.9)
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
            self.gradients()
            self.optimizer.step()
            self.done += 1

    def gradients(self) -> None:
        """The gradients of a step, and no others, in `.grad`."""
        self.model.zero_grad()
        if self.plain:
            self._plain_gradients()
        else:
            self.perturber.backward(self.loss_of, *self.batches(self.done))

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
                loss.register_hook(_fail)
            return loss

        self.model.zero_grad()
        try:
            self.perturber.backward(loss_of, *self.batches(self.done))
        except (ValueError, RuntimeError, KeyboardInterrupt):
            self.model.zero_grad()
            return
        raise AssertionError(f"the planned error in {where} did not come up")

    def enter_last_pass(self) -> Run:
        """Enter the last pass of a step and run its forward, but not its backward."""
        self.model.zero_grad()
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
        self.model.zero_grad()
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
        parts = (self.model[0], self.model[2])
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


class Twice(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def _fail(grad: Tensor) -> None:
    raise ValueError("planned")
