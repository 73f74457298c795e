"""The Transformers callback against the same training written by hand."""

import json

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import steppe
from steppe.integrations.transformers import Perturb, PerturbTrainer
from tests.nets import equal, weights_of

ARWP = steppe.arwp(0.05, eta=5.0)
M_ARWP = steppe.m_arwp(0.05, eta=5.0, lam=0.3)


def language_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(torch.float64)


def vision_model():
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config).to(torch.float64)


def sentences(count=24):
    """Of 3 to 8 tokens, padded to 8: micro-batches have different numbers of tokens."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        tokens = torch.randint(0, 17, (8,), generator=generator)
        labels = tokens.clone()
        labels[int(torch.randint(3, 9, (), generator=generator)) :] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def pictures(count=24):
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "pixel_values": torch.randn(1, 8, 8, generator=generator, dtype=torch.float64),
            "labels": torch.randint(0, 3, (), generator=generator),
        }
        for _ in range(count)
    ]


class Collator:
    """Keeps the batches in the order in which training saw them."""

    def __init__(self):
        self.batches = []

    def __call__(self, rows):
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        self.batches.append(batch)
        return {name: value.clone() for name, value in batch.items()}


def make(method, folder, *, model=None, data=None, kind=Trainer, callbacks=(), attach=None, **args):
    model = model or language_model()
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    perturb = None if method is None else Perturb(method, **(attach or {}))
    trainer = kind(
        model=model,
        args=TrainingArguments(**{**defaults, **args}),
        train_dataset=sentences() if data is None else data,
        eval_dataset=sentences(8),
        data_collator=Collator(),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
        callbacks=[*([] if perturb is None else [perturb]), *callbacks],
    )
    return trainer, perturb


def by_hand(method, model, batches, *, accumulate=1, per_epoch=6, clip=None):
    """The loop that Trainer runs, with steppe's explicit API, on the batches that it saw."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    perturber = steppe.attach(model, optimizer, method)
    epochs = [batches[i : i + per_epoch] for i in range(0, len(batches), per_epoch)]
    for epoch in epochs:
        for start in range(0, len(epoch), accumulate):
            parts = epoch[start : start + accumulate]
            skip = 1 if "input_ids" in parts[0] else 0  # the first token is never predicted
            items = sum(p["labels"].reshape(4, -1)[:, skip:].ne(-100).sum() for p in parts)
            for part in parts:

                def loss_of():
                    return model(**part, num_items_in_batch=items).loss

                if method.repeats_batch:
                    perturber.backward(loss_of)
                else:
                    loss_of().backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return perturber


def state_of(perturber):
    states = perturber.state_dict()["states"]
    return [t for state in states for tensors in state.values() for t in tensors]


# ---------------------------------------------------------------------- the same as by hand


@pytest.mark.parametrize("kind", ["text", "images"])
@pytest.mark.parametrize(
    ("method", "accumulate", "clip"),
    [
        (ARWP, 1, 0.01),
        (ARWP, 3, None),
        (M_ARWP, 2, 0.01),
        (steppe.lpf_sgd(0.05, samples=3), 3, None),
        (steppe.rwp(rise=0.5), 2, 0.01),
    ],
    ids=["arwp", "arwp accumulating", "m_arwp", "lpf_sgd", "rise"],
)
def test_equals_a_loop_by_hand(kind, method, accumulate, clip, tmp_path):
    equals_a_loop_by_hand(kind, method, accumulate, clip, tmp_path)


def equals_a_loop_by_hand(kind, method, accumulate, clip, tmp_path, epochs=2):
    new, data = (language_model, sentences()) if kind == "text" else (vision_model, pictures())
    trainer, perturb = make(
        method,
        tmp_path,
        model=new(),
        data=data,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=clip or 0.0,
        num_train_epochs=epochs,
    )
    trainer.train()
    model = new()
    batches = trainer.data_collator.batches
    perturber = by_hand(method, model, batches, accumulate=accumulate, clip=clip)
    assert perturb.perturber.step == perturber.step == 6 * epochs // accumulate
    assert equal(weights_of(trainer.model), weights_of(model))
    assert equal(state_of(perturb.perturber), state_of(perturber))
    return perturber


@pytest.mark.parametrize("kind", ["text", "images"])
def test_a_rise_is_the_same_after_50_steps(kind, tmp_path):
    """When the ramp is open."""
    perturber = equals_a_loop_by_hand(kind, steppe.rwp(rise=0.5), 2, None, tmp_path, 18)
    assert perturber.step > 50
    assert perturber.stats()["ratio"] > 0.002


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "method",
    [steppe.sam(0.1), steppe.m_arwp(0.05, eta=5.0, same_batch=True)],
    ids=["sam", "m_arwp same batch"],
)
def test_the_trainer_for_methods_that_need_a_batch_twice(method, accumulate, tmp_path):
    trainer, perturb = make(
        method, tmp_path, kind=PerturbTrainer, gradient_accumulation_steps=accumulate
    )
    trainer.train()
    model = language_model()
    perturber = by_hand(method, model, trainer.data_collator.batches, accumulate=accumulate)
    assert perturb.perturber.step == perturber.step
    assert equal(weights_of(trainer.model), weights_of(model))


def test_a_callback_cannot_serve_sam_and_says_what_can(tmp_path):
    trainer, _ = make(steppe.sam(0.1), tmp_path)
    with pytest.raises(RuntimeError, match=r"sam\(\) needs each batch twice.*PerturbTrainer"):
        trainer.train()
    trainer, _ = make(ARWP, tmp_path, torch_compile=True)
    with pytest.raises(RuntimeError, match="compiled model.*PerturbTrainer"):
        trainer.train()


@pytest.mark.slow
def test_torch_compile(tmp_path):
    trainer, perturb = make(
        ARWP, tmp_path, kind=PerturbTrainer, torch_compile=True, torch_compile_backend="eager"
    )
    trainer.train()
    assert isinstance(trainer.model_wrapped, torch._dynamo.OptimizedModule)
    model = language_model()
    perturber = by_hand(ARWP, model, trainer.data_collator.batches)
    assert perturb.perturber.step == perturber.step
    for found, wanted in zip(weights_of(trainer.model), weights_of(model), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


class Gradients(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        self.seen.append([p.grad.clone() for p in model.parameters()])


@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_the_exact_weights_of_micro_batches_with_different_numbers_of_tokens(lam, tmp_path):
    """Trainer divides each micro-batch's sum S_i over its tokens by N, the tokens of the whole step.
    What the optimizer sees is 2 (1-lam) sum of clean S_i / N + 2 lam sum of perturbed S_i / N."""
    look = Gradients()
    trainer, _ = make(
        steppe.m_rwp(0.0, lam=lam),
        tmp_path,
        callbacks=[look],
        gradient_accumulation_steps=4,
        max_steps=1,
    )
    trainer.train()
    model = language_model()
    parts = trainer.data_collator.batches[:4]
    counts = [int(part["labels"][:, 1:].ne(-100).sum()) for part in parts]
    assert len(set(counts)) > 1
    total = 0.0
    for number, part in enumerate(parts):
        logits = model(input_ids=part["input_ids"]).logits[:, :-1].flatten(0, 1)
        labels = part["labels"][:, 1:].flatten()
        # in float32, as the model computes it
        summed = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
        total = total + 2 * (lam if number % 2 else 1 - lam) * summed / sum(counts)
    expected = torch.autograd.grad(total, list(model.parameters()))
    for found, wanted in zip(look.seen[0], expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_the_odd_tail_of_an_epoch(tmp_path):
    """Six micro-batches by four: the last step has two, and by five: it has one."""
    trainer, perturb = make(M_ARWP, tmp_path, gradient_accumulation_steps=4)
    trainer.train()
    model = language_model()
    perturber = by_hand(M_ARWP, model, trainer.data_collator.batches, accumulate=4)
    assert equal(weights_of(trainer.model), weights_of(model))
    assert perturber.step == perturb.perturber.step == 4
    trainer, perturb = make(M_ARWP, tmp_path, data=sentences(20), gradient_accumulation_steps=2)
    with pytest.warns(UserWarning, match="passes present add up to one"):
        trainer.train()
    model = language_model()
    with pytest.warns(UserWarning, match="passes present add up to one"):
        by_hand(M_ARWP, model, trainer.data_collator.batches, accumulate=2, per_epoch=5)
    assert equal(weights_of(trainer.model), weights_of(model))
    assert perturb.perturber.stats()["incomplete_steps"] == 2


def test_strength_zero_is_trainer_without_steppe(tmp_path):
    plain, _ = make(None, tmp_path, gradient_accumulation_steps=2)
    plain.train()
    trainer, _ = make(steppe.m_rwp(0.0), tmp_path, gradient_accumulation_steps=2)
    trainer.train()
    assert equal(weights_of(trainer.model), weights_of(plain.model))


def test_schedules_get_the_length_of_training(tmp_path):
    method = steppe.rwp(steppe.cosine_increase(0, 0.05))
    trainer, perturb = make(method, tmp_path, gradient_accumulation_steps=2)
    trainer.train()
    (planned,) = perturb.perturber.method.passes
    assert planned.perturbation.sigma.steps == perturb.perturber.step == 6


def test_bf16(tmp_path):
    model = language_model().to(torch.float32)
    trainer, perturb = make(M_ARWP, tmp_path, model=model, bf16=True, gradient_accumulation_steps=2)
    trainer.train()
    twin = language_model().to(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        by_hand(M_ARWP, twin, trainer.data_collator.batches, accumulate=2)
    for found, wanted in zip(weights_of(trainer.model), weights_of(twin), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.01)


# ---------------------------------------------------------------------- checkpoints, the promise


@pytest.mark.parametrize(
    ("method", "kind"),
    [(M_ARWP, Trainer), (steppe.msam(0.5), Trainer), (steppe.sam(0.1), PerturbTrainer)],
    ids=["m_arwp", "msam", "sam"],
)
def test_resume_is_bit_exact(method, kind, tmp_path):
    options = {"kind": kind, "gradient_accumulation_steps": 2}
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole, ended = make(method, tmp_path / "whole", **options, **saving)
    whole.train()
    resumed, perturb = make(method, tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert perturb.perturber.step == ended.perturber.step == 6
    assert equal(weights_of(resumed.model), weights_of(whole.model))
    assert equal(state_of(perturb.perturber), state_of(ended.perturber))


def test_resuming_what_was_trained_without_steppe_warns_and_saves(tmp_path):
    plain, _ = make(None, tmp_path, save_strategy="epoch", num_train_epochs=1)
    plain.train()
    trainer, perturb = make(ARWP, tmp_path / "two", save_strategy="epoch")
    with pytest.warns(UserWarning, match=r"at step 6 .* without a state of Perturb"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    text = (tmp_path / "two" / "checkpoint-12" / "trainer_state.json").read_text()
    assert json.loads(text)["stateful_callbacks"]["Perturb"]["attributes"]["packed"]


def test_restoring_callbacks_from_json_is_refused_with_what_to_do(tmp_path):
    trainer, _ = make(ARWP, tmp_path, save_strategy="epoch", num_train_epochs=1)
    trainer.train()
    trainer, _ = make(ARWP, tmp_path, restore_callback_states_from_checkpoint=True)
    with pytest.raises(ValueError, match="Leave it False"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


@pytest.mark.parametrize("method", [ARWP, M_ARWP], ids=["arwp", "m_arwp"])
def test_evaluation_and_saving_in_the_middle_see_true_weights(method, tmp_path):
    class Look(TrainerCallback):
        def __init__(self):
            self.after_step, self.evaluated, self.between = [], [], []

        def on_step_begin(self, args, state, control, model, **_):
            self.before = weights_of(model)

        def on_substep_end(self, args, state, control, model, **_):
            self.between.append(equal(weights_of(model), self.before))

        def on_step_end(self, args, state, control, model, **_):
            self.after_step.append(weights_of(model))

        def on_evaluate(self, args, state, control, metrics, **_):
            self.evaluated.append(metrics["eval_loss"])

    look = Look()
    trainer, _ = make(
        method,
        tmp_path,
        callbacks=[look],
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer.train()
    assert look.between == [True] * 6
    assert len(look.evaluated) == 6
    for number, true in enumerate(look.after_step, start=1):
        saved = LlamaForCausalLM.from_pretrained(
            tmp_path / f"checkpoint-{number}", dtype=torch.float64
        )
        assert equal(weights_of(saved), true)
        plain, _ = make(None, tmp_path / "plain", model=saved)
        assert plain.evaluate()["eval_loss"] == look.evaluated[number - 1]


def test_training_again_after_an_exception(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 1:
                raise KeyError("mine")

    trainer, perturb = make(ARWP, tmp_path, callbacks=[stop := Stop()])
    with pytest.raises(KeyError, match="mine"):
        trainer.train()
    trainer.remove_callback(stop)
    trainer.train()
    assert perturb.perturber.step == 12


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Perturb(steppe.arwp), TypeError, r"Did you mean steppe.arwp\(\)"),
        (lambda: Perturb(steppe.sam(0.1, m=4)), ValueError, r"sam\(m=4\) deals batches"),
        (lambda: Perturb(ARWP, microbatch_loss="sum"), TypeError, "takes microbatch_loss from"),
    ],
)
def test_bad_input(build, error, message):
    with pytest.raises(error, match=message):
        build()
