"""The course of one run: resume from the last checkpoint, train, evaluate, write the result."""

from __future__ import annotations

import math
import shutil
import statistics
import time
from typing import Any

import torch

from steppe.batchnorm import recompute_norm_stats, tracked_norms
from steppe.lab import checkpoints, environment
from steppe.lab.config import Config
from steppe.lab.cost import SAMPLES, step_flops
from steppe.lab.data import Split, sequential_order
from steppe.lab.errors import Interrupted
from steppe.lab.problems import Problem
from steppe.lab.progress import Event, Listener
from steppe.lab.ranks import world
from steppe.lab.results import Result
from steppe.lab.runs import Record, Run
from steppe.lab.specs import parse
from steppe.lab.stopping import StopSignal
from steppe.lab.tasks import EVAL_BATCH, evaluate
from steppe.lab.trainer import NotANumberError, Trainer

TELL_EVERY = 0.1


class Clock:
    """Time spent in training steps: on the wall, and of this process's processors."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.wall = self.cpu = 0.0
        self.start()

    def start(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.wall += time.perf_counter() - self._began[0]
        self.cpu += time.process_time() - self._began[1]


class Course:
    """A run under way: its trainer, the folder it writes to (on rank 0) and who listens."""

    def __init__(
        self, config: Config, problem: Problem, run: Run | None, listener: Listener
    ) -> None:
        self.config, self.run, self.listener = config, run, listener
        self.data, self.task = problem.data, problem.task
        self.world = world()
        self.trainer = Trainer(config, problem, torch.device(config.device))
        self.name = f"{config.method} seed {config.seed}"
        self.clock = Clock(self.trainer.device)
        self.perturbation: list[Record] = []
        self.shown: tuple[tuple[str, float], ...] = ()
        self._told = 0.0
        self._saved = time.monotonic()

    def to_the_end(self) -> Result:
        """Train all steps that are left and give the result."""
        where = environment.describe(self.trainer.device)
        if self.run is not None:
            self.run.write_json("environment.json", where)  # the first file after config.json
        few = [torch.arange(min(SAMPLES, len(self.data.train)))]
        batch = next(iter(self.data.train.batches(few, augment_seed=None)))
        model, method = self.trainer.model, self.trainer.method
        flops = step_flops(model, method, self.task.loss, batch, batch_size=self.config.batch)
        self._resume()
        self._tell(force=True)
        message = ""
        try:
            metrics = self._train()
        except NotANumberError as error:
            message, metrics = self._diverged(error.args[0]), {}
        result = Result(
            config=self.config,
            status="diverged" if message else "finished",
            metric=self.task.metric,
            higher_is_better=self.task.higher_is_better,
            unit=self.task.unit,
            metrics=metrics,
            steps=self.trainer.steps,
            seconds=self.clock.wall,
            cpu_seconds=self.clock.cpu,
            flops=flops,
            parameters=sum(p.numel() for p in model.parameters()),
            strength=parse(self.config.method).full_strength,
            perturbation=self._mean_perturbation(),
            data_note=self.data.note,
            message=message,
            environment=where,
            folder=self.run.folder if self.run else None,
        )
        self.trainer.perturber.detach()
        self.world.from_first(lambda: self._write_end(result))
        self._tell(force=True, done=result.status)
        return result

    def _train(self) -> dict[str, dict[str, float]]:
        trainer = self.trainer
        with StopSignal() as stop:
            if trainer.at_epoch_end and trainer.loss_count:  # killed between checkpoint and record
                self._log()
            while trainer.step < trainer.steps:
                self._epoch(stop)
                self._log()
            if not trainer.is_finite():
                raise NotANumberError(trainer.step - 1)
            return self._final_metrics()

    def _epoch(self, stop: StopSignal) -> None:
        """The rest of the current epoch, or of the training if that ends before."""
        trainer = self.trainer
        self.clock.start()
        for batches in trainer.batches():
            trainer.advance(batches)
            late = time.monotonic() - self._saved >= 60 * self.config.checkpoint_minutes
            asked, due = self.world.any(stop.asked, self.world.leads and late)
            if asked or due:
                self.clock.stop()
                self._save()
                self.clock.start()
            if asked and trainer.step < trainer.steps:
                raise Interrupted(
                    trainer.step, trainer.steps, self.run.folder if self.run else None
                )
            self._tell()
            if trainer.step >= trainer.steps:
                break
        trainer.read_losses()
        self.clock.stop()

    def _log(self) -> None:
        """Write the line of metrics.jsonl for the epoch that just ended."""
        trainer, every = self.trainer, self.config.eval_every
        epoch = math.ceil(trainer.step / trainer.per_epoch)
        lr = trainer.lr(trainer.step - 1)
        record: Record = {"epoch": epoch, "step": trainer.step, "lr": lr}
        record["loss"] = trainer.mean_loss()
        self.perturbation.append(trainer.perturbation())
        record |= {f"perturb_{name}": value for name, value in self.perturbation[-1].items()}
        if every and (epoch % every == 0 or trainer.step >= trainer.steps):
            for name, split in self._splits().items():
                if name != "train" or self.config.track_train:
                    metrics = self._evaluate(split)
                    record |= {f"{name}_{key}": value for key, value in metrics.items()}
            self.shown = ((self.task.metric, record[f"test_{self.task.metric}"]),)
        record["seconds"] = round(self.clock.wall, 3)
        self._tell(force=True)
        with self.world.together():
            if self.run is not None:
                self.run.append_metrics(record)

    def _final_metrics(self) -> dict[str, dict[str, float]]:
        """Metrics of the final model; with recomputed BatchNorm statistics too if asked for."""
        splits = self._splits()
        found = {name: self._evaluate(split) for name, split in splits.items()}
        model = self.trainer.model
        if self.config.recompute_norm and tracked_norms(model):
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            order = sequential_order(len(self.data.train), EVAL_BATCH)
            batches = self.data.train.batches(order, augment_seed=0)
            device = self.trainer.device
            recompute_norm_stats(model, (x.to(device) for x, _ in batches))
            found |= {f"{name}_recomputed": self._evaluate(split) for name, split in splits.items()}
            model.load_state_dict(kept)
        return found

    def _splits(self) -> dict[str, Split]:
        names = ("train", "test", "validation")
        return {name: split for name in names if (split := getattr(self.data, name)) is not None}

    def _evaluate(self, split: Split) -> dict[str, float]:
        limit = self.config.eval_train if split is self.data.train else None
        workers = self.config.workers
        return evaluate(self.trainer.model, split, self.task, limit=limit, workers=workers)

    def _resume(self) -> None:
        run = self.run
        state = self.world.from_first(
            lambda: None if run is None else checkpoints.load_newest(run.checkpoints)
        )
        if state is not None:
            self.trainer.load_state_dict(state["trainer"])
            self.clock.wall, self.clock.cpu = state["seconds"]
            self.perturbation = state["perturbation"]
        if run is not None:
            run.rewind_metrics(self.trainer.step)

    def _save(self) -> None:
        """A checkpoint, unless the weights are no longer numbers: the last good one stays."""
        self._saved = time.monotonic()
        if self.run is None and not self.world.several:
            return
        state: dict[str, Any] = {
            "trainer": self.trainer.state_dict(),
            "seconds": [self.clock.wall, self.clock.cpu],
            "perturbation": self.perturbation,
        }
        run, step, keep = self.run, self.trainer.step, self.config.keep
        if self.trainer.is_finite():
            self.world.from_first(
                lambda: run and checkpoints.save(run.checkpoints, step, state, keep=keep)
            )

    def _diverged(self, step: int) -> str:
        noise = next((p.perturbation for p in self.trainer.method.passes if p.perturbation), None)
        lower = "Lower it." if noise is None else "Lower one of them."
        if step == 0:  # nothing has been learnt: it is neither of them
            lower = "It is so at the first batch: look for values that are not finite in the data."
        strength = "" if noise is None else f" and strength {noise.strength(step):.3g}"
        kept = checkpoints.checkpoints(self.run.checkpoints) if self.run else []
        last = f" The last good checkpoint is kept: {kept[-1]}." if kept else ""
        return (
            f"the loss is not a number at step {step} of {self.trainer.steps}, with learning rate "
            f"{self.trainer.lr(step):.3g}{strength}. {lower}{last}"
        )

    def _write_end(self, result: Result) -> None:
        """Weights first, then the result that says the run is finished, then no more checkpoints."""
        if self.run is None:
            return
        if result.status == "finished":
            weights = {name: v.cpu() for name, v in self.trainer.model.state_dict().items()}
            checkpoints.write_atomic(self.run.model_file, checkpoints.packed(weights))
        self.run.write_json("result.json", result.to_dict())
        if result.status == "finished":
            shutil.rmtree(self.run.checkpoints, ignore_errors=True)

    def _tell(self, *, force: bool = False, done: str = "") -> None:
        now = time.monotonic()
        if force or now - self._told >= TELL_EVERY:
            self._told = now
            trainer = self.trainer
            loss = trainer.last_loss if math.isfinite(trainer.last_loss) else None
            self.listener(Event(self.name, trainer.step, trainer.steps, loss, self.shown, done))

    def _mean_perturbation(self) -> dict[str, float]:
        """The mean of each number over the epochs that have it."""
        names = dict.fromkeys(name for record in self.perturbation for name in record)
        return {n: statistics.fmean(r[n] for r in self.perturbation if n in r) for n in names}
