"""A training in memory: model, optimizer, perturber and the step they have reached."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import steppe
from steppe.lab.config import Config
from steppe.lab.data import epoch_order, mix
from steppe.lab.errors import LabError, explained
from steppe.lab.problems import Problem
from steppe.lab.ranks import Part, world
from steppe.lab.specs import parse

logger = logging.getLogger("steppe")

Batch = tuple[Tensor, Tensor]
CHECK_EVERY = 50
"""On a GPU, losses are read after so many steps at most: reading one waits for the device."""


class NotANumberError(Exception):
    """The loss of the step that is its argument is not finite."""


class Trainer:
    """Takes optimizer steps; everything it will do is fixed by the config and the step.

    Order, augmentation, learning rate, strength and noise are functions of seed and step, so the
    state is small: weights, optimizer, perturber, torch's random state (dropout), running loss.

    In a process group the model is wrapped in DDP. The ranks share each batch, or, where the passes
    of a method lie over the ranks, those of one pass share its stream.
    """

    def __init__(self, config: Config, problem: Problem, device: torch.device) -> None:
        self.config = config
        self.data, self.task = problem.data, problem.task
        self.device = device
        self.model = problem.model.to(device)
        if config.channels_last:
            check_channels(self.model, device)
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        n, drop = len(self.data.train), config.drop_last
        with explained(""):
            self.per_epoch = len(epoch_order(n, config.batch, seed=0, epoch=0, drop_last=drop))
        self.steps = config.steps or max(1, round(config.epochs * self.per_epoch))
        self.method = parse(config.method).build(self.steps)
        self.optimizer = make_optimizer(self.model, config)
        self.world = world()
        self.wrapped: nn.Module = self.model
        if self.world.several:
            check_ranks(self.method, self.world.size)
            self.wrapped = DistributedDataParallel(self.model)
        self.perturber = attach(self.wrapped, self.optimizer, self.method, config)
        ranks = self.perturber.ranks
        self.streams = range(self.method.batches_needed)
        self.part = Part(self.world.rank, self.world.size)
        if ranks.index is not None:  # each pass on its own ranks, which read its stream alone
            self.streams = range(ranks.index, ranks.index + 1)
            self.part = Part(ranks.rank % ranks.columns, ranks.columns)
        check_parts(len(self.data.train), config, self.part)
        if self.world.several:  # dropout should not repeat itself on the ranks
            torch.manual_seed(mix("dropout", config.seed, self.world.rank))
        self.step = 0
        self.loss_sum, self.loss_count, self.last_loss = 0.0, 0, math.nan
        self._pending: list[Tensor] = []

    @property
    def at_epoch_end(self) -> bool:
        """Whether the step just taken was the last of its epoch, or of all."""
        return self.step % self.per_epoch == 0 or self.step >= self.steps

    def lr(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, then cosine to zero or constant."""
        config = self.config
        if step < config.warmup:
            return config.lr * (step + 1) / config.warmup
        if config.schedule == "constant":
            return config.lr
        progress = (step - config.warmup) / max(1, self.steps - config.warmup)
        return config.lr * (1 + math.cos(math.pi * progress)) / 2

    def batches(self) -> Iterator[tuple[Batch, ...]]:
        """What is left of the current epoch: per step, a batch from each stream the method needs.

        Stream 0 is the same for every method; a second stream feeds a second, perturbed pass. A rank
        gets its part of them, with random augmentation of its own.
        """
        config, train = self.config, self.data.train
        part = (self.part.number,) if self.part.of > 1 else ()
        start = self.step % self.per_epoch
        streams = []
        for stream in self.streams:
            place = {"seed": config.seed, "epoch": self.step // self.per_epoch, "stream": stream}
            order = epoch_order(len(train), config.batch, **place, drop_last=config.drop_last)
            parts = [self.part.take(batch) for batch in order]
            seed = mix("training", *place.values(), *part)
            streams.append(
                train.batches(parts, augment_seed=seed, start=start, workers=config.workers)
            )
        return zip(*streams, strict=True)

    def advance(self, batches: tuple[Batch, ...]) -> None:
        """One optimizer step."""
        lr = self.lr(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.wrapped.train()
        moved = [tuple(part.to(self.device, non_blocking=True) for part in b) for b in batches]
        if self.config.channels_last:
            wide = torch.channels_last
            moved = [(x.contiguous(memory_format=wide) if x.dim() == 4 else x, y) for x, y in moved]
        self.optimizer.zero_grad()
        loss = self.perturber.backward(self._loss, *moved)
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.step += 1
        self._pending.append(loss.detach())
        if self.device.type == "cpu" or len(self._pending) >= CHECK_EVERY:
            self.read_losses()

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of a batch; of a part, so weighted that the ranks' mean is the batch's."""
        try:
            outputs = self.wrapped(x)
        except ValueError as error:
            if len(x) > 1 or "more than 1 value per channel" not in str(error):
                raise
            raise LabError(
                f"a batch has one sample, which BatchNorm cannot train on ({len(self.data.train)} samples in "
                f"batches of {self.config.batch}). Change batch, or leave the rest out: drop_last=true."
            ) from error
        loss = self.task.loss(outputs, y)
        if self.part.of == 1:
            return loss
        before = self.step % self.per_epoch * self.config.batch
        whole = min(self.config.batch, len(self.data.train) - before)
        return loss * self.part.share(len(y), whole)

    def read_losses(self) -> None:
        """Add the losses since the last reading to the running mean; raise if one is not finite."""
        if not self._pending:
            return
        values = self.world.mean(torch.stack(self._pending).double().cpu())
        first = self.step - len(values)
        self._pending = []
        bad = (~values.isfinite()).nonzero()
        if len(bad):
            raise NotANumberError(first + int(bad[0]))
        self.loss_sum += float(values.sum())
        self.loss_count += len(values)
        self.last_loss = float(values[-1])

    def mean_loss(self) -> float:
        """The mean training loss since the last call, as the passes saw it."""
        self.read_losses()
        mean = self.loss_sum / self.loss_count if self.loss_count else math.nan
        self.loss_sum, self.loss_count = 0.0, 0
        return mean

    def perturbation(self) -> dict[str, float]:
        """The perturbation as it is now: strength, radius ‖eps‖, ‖eps‖/‖w‖, adaptive factor, ‖w‖."""
        stats = self.perturber.stats()
        kept = ("strength", "displacement", "factor")
        found: dict[str, float] = {name: stats[name] for name in kept if name in stats}
        with torch.no_grad():
            norms = [p.norm() for p in self.model.parameters() if p.requires_grad]
            found["weight_norm"] = float(torch.stack(norms).norm())
        found["radius"] = found["displacement"] * found["weight_norm"]
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def is_finite(self) -> bool:
        """Whether all weights are numbers."""
        with torch.no_grad():
            total = sum((p.double().abs().sum() for p in self.model.parameters()), torch.zeros(()))
        return bool(total.isfinite())

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed training needs to end bit-identical to an uninterrupted one.

        All ranks must ask for it together; what they have in common is rank 0's.
        """
        self.read_losses()
        cuda = self.device.type == "cuda"
        random_cuda = torch.cuda.get_rng_state(self.device) if cuda else None
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "perturber": self.perturber.state_dict(),
            "random": self.world.gather((torch.get_rng_state(), random_cuda)),
            "loss_sum": self.loss_sum,
            "loss_count": self.loss_count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.perturber.load_state_dict(state["perturber"])
        self.loss_sum, self.loss_count = state["loss_sum"], state["loss_count"]
        random = state["random"]
        if len(random) != (size := self.world.size):
            text = "this run was saved on %d ranks and resumes on %d: it will not be bit-identical"
            logger.warning(text, len(random), size)
            return
        cpu, cuda = random[self.world.rank]
        torch.set_rng_state(cpu)
        if cuda is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(cuda, self.device)


def check_channels(model: nn.Module, device: torch.device) -> None:
    """Raise where torch would corrupt memory (2.13, CPU): channels_last with few channels."""
    narrow = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.out_channels < 8]
    if narrow and device.type == "cpu":
        raise LabError(
            f"channels_last with a convolution of {narrow[0].out_channels} channels (fewer than 8) "
            "crashes torch on the CPU. Set channels_last=false or widen the model."
        )


def lies_over_ranks(method: steppe.Method) -> bool:
    """Whether a method's passes run at once on different ranks: each must have a batch of its own."""
    return method.batches_needed > 1 and not method.in_sequence


def check_ranks(method: steppe.Method, size: int) -> None:
    """Raise for a number of ranks that the passes cannot be laid over."""
    count = len(method.passes)
    if lies_over_ranks(method) and size % count:
        works = ", ".join(str(count * k) for k in range(1, 4))
        raise LabError(
            f"{method.name} runs its {count} passes on different ranks, which {size} cannot be divided "
            f"into. Start {works}, … processes with torchrun --nproc-per-node."
        )


def check_parts(samples: int, config: Config, part: Part) -> None:
    """Raise where a batch of the epoch, most likely the last, has no sample for some rank."""
    rest = 0 if config.drop_last else samples % config.batch
    smallest = rest or config.batch
    if smallest < part.of:
        which = "the last batch of an epoch" if rest else "a batch"
        raise LabError(
            f"{which} has {smallest} of {samples} samples, fewer than the {part.of} ranks that share "
            "it. Change batch or train_size, or start fewer processes."
        )


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """The optimizer over all parameters that train."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise LabError("the model has no parameters that train.")
    shared: Any = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, **shared)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, **shared)


def attach(
    model: nn.Module, optimizer: torch.optim.Optimizer, method: steppe.Method, config: Config
) -> steppe.Perturber:
    """steppe on this model; errors of the user's settings as such."""
    several = isinstance(model, DistributedDataParallel) and len(method.passes) > 1
    in_turn = several and not lies_over_ranks(method)
    try:
        return steppe.attach(
            model,
            optimizer,
            method,
            seed=config.seed,
            passes_over="microbatches" if in_turn else None,
        )
    except ValueError as error:
        raise LabError(f"method {config.method}: {error}") from error
    except RuntimeError as error:
        if not several:
            raise
        raise LabError(f"method {config.method} under torchrun: {error}") from error
