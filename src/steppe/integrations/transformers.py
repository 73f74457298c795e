"""Hugging Face Transformers: `Trainer(callbacks=[Perturb(steppe.arwp())])`.

The callback serves every method whose passes an unchanged loop can run. Those that need a batch
twice (SAM), losses that run the model again inside their backward (gradient caching), and models
that Trainer wraps (several processes, `torch_compile`), take `PerturbTrainer` in place of `Trainer`,
since a callback sees neither batches nor the wrapper. Subclasses of Trainer, TRL's among them, take the
same callback, and `PassesMixin` before their name where Trainer takes `PerturbTrainer`.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steppe.attaching import attach
from steppe.integrations.loops import begin, checked, fill_in_length
from steppe.methods import Method
from steppe.perturber import Perturber
from steppe.training import Loop

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ImportError(
        "steppe.integrations.transformers needs Transformers and Accelerate. Install them with "
        "pip install 'steppe[transformers]'."
    ) from error


RESTORED = "the method of a checkpoint"
"""What a checkpoint says in a method's place: Trainer must not make a callback from it."""

TRAINER = (
    "steppe.integrations.transformers.PerturbTrainer in place of transformers.Trainer, with the same "
    "arguments; of another Trainer make class Mine(PassesMixin, SFTTrainer)"
)


def loop_of(arguments: str) -> Loop:
    """What errors tell the user of a Trainer with this class of arguments."""
    return Loop(
        accumulate=f"Set {arguments}(gradient_accumulation_steps={{n}}), or a multiple of it",
        hold=TRAINER,
        repeat=TRAINER,
        outputs=pulled_on,
    )


def pulled_on(output: Any) -> Any:
    """What the loss pulls on. Without logits but with the labels' log-probabilities (TRL's trainers),
    the pull on the logits is exactly 2 (1 - p) of that on log p: the gradient of zeros that are added
    to log p with this factor.
    """
    if not isinstance(output, Mapping) or output.get("logits") is not None:
        return output
    log_probs = output.get("log_probs")
    if not isinstance(log_probs, Tensor) or not log_probs.requires_grad:
        return output
    zeros = torch.zeros_like(log_probs, requires_grad=True)
    output["log_probs"] = log_probs - 2 * torch.expm1(log_probs.detach()) * zeros  # type: ignore[index]
    return zeros


class Perturb(TrainerCallback, ExportableState):
    """Train with a method of steppe's in a Transformers Trainer.

    Args:
        method: `steppe.arwp()`, `steppe.m_arwp(ratio=0.3)`, … or by name, as configuration files
            write it: "arwp:ratio=0.1". A schedule without a length (`cosine_increase(0, 0.01)`) gets
            the Trainer's `max_steps`.
        options: of `steppe.attach`: seed, exclude, include_frozen, on_incomplete, passes_over, noise, ascent.

    `perturber` is the perturber at work; its state is saved in `trainer_state.json`.
    """

    def __init__(self, method: Method | str, **options: Any) -> None:
        if method == RESTORED:
            raise ValueError(
                "restore_callback_states_from_checkpoint=True makes callbacks anew from JSON, which "
                "cannot hold a method. Leave it False: Perturb() finds its state by itself."
            )
        self.method, self.options = checked(method, options), options
        self.perturber: Perturber | None = None
        self.trainer: PassesMixin | None = None
        """Set by `PerturbTrainer`, which knows the model as it is called."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.perturber is not None:  # an earlier train() that ended in an exception
            self.perturber.detach()
        if self.trainer is None:
            self._check_plain_trainer(args)
        model = kwargs["model"] if self.trainer is None else self.trainer.model_wrapped
        arguments = type(args).__name__
        self._check_reference(args, kwargs["model"])
        ask = f"{arguments}(num_train_epochs=..., max_steps=...)"
        method = fill_in_length(self.method, lambda: state.max_steps, ask)
        loop = loop_of(arguments)
        self.perturber = attach(model, kwargs["optimizer"], method, loop=loop, **self.options)
        name = type(self).__name__
        saved = state.stateful_callbacks.get(name) if state.global_step else None
        state_dict = unpack(saved["attributes"]["packed"]) if saved else None
        accumulated = args.gradient_accumulation_steps
        setting = f"{arguments}(gradient_accumulation_steps"
        begin(self.perturber, state.global_step, state_dict, accumulated, setting)
        state.stateful_callbacks.setdefault(name, {})  # a checkpoint from before lacks it

    def _check_plain_trainer(self, args: Any) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if self.method.repeats_batch:
            problem = f"{self.method.name}() needs each batch twice, which a callback cannot give."
        elif several:
            problem = "With several processes steppe must see the model as Trainer wraps it."
        elif args.torch_compile:
            problem = "With torch_compile steppe must see the compiled model."
        else:
            return
        raise RuntimeError(f"{problem} Use {TRAINER}.")

    @staticmethod
    def _check_reference(args: Any, model: nn.Module) -> None:
        """TRL's DPO runs a PEFT model without its adapters between a forward and its backward."""
        if getattr(args, "precompute_ref_log_probs", True) or not hasattr(model, "peft_config"):
            return
        raise ValueError(
            "The reference of this training is the model itself without its adapters, run while noise is "
            f"in its weights. Set {type(args).__name__}(precompute_ref_log_probs=True): the reference is "
            "then run once, before training, at the true weights."
        )

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self.perturber is not None:
            self.perturber.detach()

    def state(self) -> dict[str, Any]:
        """What Trainer writes into `trainer_state.json`."""
        if self.perturber is None:
            return {}
        packed = pack(self.perturber.state_dict())
        return {"args": {"method": RESTORED}, "attributes": {"packed": packed}}


class PassesMixin:
    """For a Trainer class of your own: `class Mine(PassesMixin, Seq2SeqTrainer)`."""

    model_wrapped: nn.Module
    callback_handler: Any

    def train(self, *args: Any, **kwargs: Any) -> Any:
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, Perturb):
                callback.trainer = self
        return super().train(*args, **kwargs)  # type: ignore[misc]

    _true_loss: Tensor | None = None
    """Of the last pass at the true weights: what is logged compares with a run without steppe."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """All passes over one micro-batch where a method needs the batch more than once, otherwise
        the one whose turn it is, held open over all that the step does."""
        step = super().training_step  # type: ignore[misc]
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, Perturb):
                assert callback.perturber is not None
                return self._passes(callback.perturber, partial(step, *args, **kwargs))
        return step(*args, **kwargs)  # type: ignore[no-any-return]

    def _passes(self, perturber: Perturber, step: Callable[[], Tensor]) -> Tensor:
        once = not perturber.method.repeats_batch
        total: Tensor | None = None
        for run in (perturber.next_pass(),) if once else perturber.passes():
            with run:
                loss = step()
            if not run.perturbed:
                self._true_loss = loss
            part = loss if once else run.weight * loss
            total = part if total is None else total + part
        assert total is not None
        return total if self._true_loss is None else self._true_loss


class PerturbTrainer(PassesMixin, Trainer):
    """`transformers.Trainer` for `Perturb` callbacks: also SAM, losses with gradient caching, several
    processes and torch_compile."""


def pack(state: dict[str, Any]) -> str:
    """A state dict as text, bit for bit: Trainer keeps the state of callbacks as JSON."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def unpack(text: str) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    return state
