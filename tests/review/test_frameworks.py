"""Frameworks' loops: losses with a backward of their own, messages, logs, methods by name."""

import warnings

import pytest
import torch
from transformers import Trainer

import steppe
from steppe.integrations import lightning, transformers
from steppe.integrations.transformers import PassesMixin, PerturbTrainer
from tests.integrations.test_lightning import fit
from tests.integrations.test_transformers import language_model, make, pictures, vision_model
from tests.nets import equal, loss_fn, weights_of
from tests.review.loops import Watched, assert_close, attached, data, grads_of

# ---------------------------------------------------------------------- a backward in a backward


def contrast(outputs):
    """Each sample against the others of its batch, so that parts of a batch cannot stand alone."""
    similar = outputs @ outputs.T
    return loss_fn(similar, torch.arange(len(outputs)).roll(1))


def cached(embed, x, parts=3):
    """The same by gradient caching: embed without gradients, take the loss's gradient with respect
    to the embeddings, and in the loss's backward embed again, part by part, with gradients."""
    with torch.no_grad():
        outputs = torch.cat([embed(part) for part in x.chunk(parts)])
    outputs.requires_grad_()
    with torch.enable_grad():
        value = contrast(outputs)
        value.backward()
    pulls = outputs.grad.chunk(parts)
    loss = value.detach().requires_grad_()

    def again(scale):
        with torch.enable_grad():
            for part, pull in zip(x.chunk(parts), pulls, strict=True):
                (embed(part) * pull).sum().mul(scale).backward()

    loss.register_hook(again)
    return loss


@pytest.mark.parametrize(
    "method",
    [steppe.rwp(0.5), steppe.m_rwp(0.5, lam=0.3), steppe.sam(0.5)],
    ids=lambda method: method.name,
)
@pytest.mark.parametrize("explicit", ["backward", "passes"])
def test_gradient_caching_inside_of_an_open_pass(method, explicit):
    model, optimizer, perturber = attached(method)
    true = weights_of(model)
    watched = Watched(model, lambda outputs, y: contrast(outputs))

    def loss_of(x, y):
        watched.seen.append((weights_of(model), x, y))
        return cached(model, x)

    batches = [data(k) for k in range(method.batches_needed)]
    if explicit == "backward":
        perturber.backward(loss_of, *batches)
    else:
        for number, run in enumerate(perturber.passes()):
            with run:
                loss_of(*batches[number % len(batches)]).backward()
    assert not equal(watched.seen[-1][0], true)
    assert equal(weights_of(model), true)
    assert_close(grads_of(model), watched.gradients([p.weight for p in method.passes]))
    optimizer.step()
    assert perturber.step == 1


def test_gradient_caching_is_the_ordinary_gradient():
    model, _, perturber = attached(steppe.rwp(0.5))
    perturber.detach()
    watched = Watched(model, lambda outputs, y: contrast(outputs))
    watched.seen.append((weights_of(model), *data()))
    cached(model, data()[0]).backward()
    assert_close(grads_of(model), watched.gradients([1.0]))


class Contrastive:
    caching = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        def embed(pixels):
            return model(pixel_values=pixels).logits

        if self.caching:
            return cached(embed, inputs["pixel_values"], parts=2)
        return contrast(embed(inputs["pixel_values"]))


class Caching(Contrastive, PerturbTrainer):
    caching = True


class CachingMixin(PassesMixin, Contrastive, Trainer):
    caching = True


class Plain(Contrastive, Trainer):
    pass


@pytest.mark.parametrize("kind", [Caching, CachingMixin])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradient_caching_under_trainer(kind, accumulate, tmp_path):
    ends = []
    for this in (Plain, kind):
        trainer, perturb = make(
            steppe.rwp(0.05),
            tmp_path,
            kind=this,
            model=vision_model(),
            data=pictures(),
            gradient_accumulation_steps=accumulate,
        )
        trainer.train()
        assert perturb.perturber.step == 12 // accumulate
        ends.append(weights_of(trainer.model))
    assert_close(*ends, rtol=1e-6, atol=1e-9)


# ---------------------------------------------------------------------- messages


def test_trainer_is_told_its_own_option_for_micro_batches(tmp_path):
    trainer, _ = make(steppe.m_rwp(0.05), tmp_path, gradient_accumulation_steps=1)
    with warnings.catch_warnings(), pytest.raises(RuntimeError) as caught:
        warnings.simplefilter("ignore")
        trainer.train()
    message = str(caught.value)
    assert "gradient_accumulation_steps=2" in message or "PerturbTrainer" in message
    assert "perturber.backward" not in message
    assert "closure" not in message


def test_lightning_is_told_its_own_option_for_micro_batches():
    with warnings.catch_warnings(), pytest.raises(RuntimeError) as caught:
        warnings.simplefilter("ignore")
        fit(steppe.m_rwp(0.05))
    message = str(caught.value)
    assert "accumulate_grad_batches=2" in message
    assert "perturber.backward" not in message
    assert "closure" not in message


# ---------------------------------------------------------------------- logs


def test_trainer_with_sam_logs_the_loss_at_true_weights(tmp_path):
    logged = []
    for method, kind in ((None, Trainer), (steppe.sam(2.0), PerturbTrainer)):
        trainer, _ = make(
            method,
            tmp_path,
            kind=kind,
            max_steps=2,
            logging_strategy="steps",
            logging_steps=1,
        )
        trainer.train()
        logged.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert logged[0][0] == pytest.approx(logged[1][0], rel=1e-6)
    assert len(logged[1]) == 2


def test_backward_takes_the_output_of_a_model_that_computes_its_loss():
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    perturber = steppe.attach(model, optimizer, steppe.sam(2.0))
    tokens = torch.arange(16).reshape(2, 8) % 17
    with torch.no_grad():
        true = model(input_ids=tokens, labels=tokens)
    found = perturber.backward(lambda: model(input_ids=tokens, labels=tokens))
    assert torch.equal(found["logits"], true.logits)
    assert found["loss"].item() > true.loss.item(), "the loss that sam minimises is the perturbed"


# ---------------------------------------------------------------------- methods by name


@pytest.mark.parametrize("framework", [lightning, transformers], ids=["lightning", "transformers"])
def test_a_method_by_its_name_as_on_a_command_line(framework):
    """As `steppe compare` takes them; there a strength may stand for a schedule that ends at it."""
    (planned,) = framework.Perturb("arwp:ratio=0.1").method.passes
    assert isinstance(planned.perturbation, steppe.AdaptiveGaussian)
    assert getattr(planned.perturbation.ratio, "end", planned.perturbation.ratio) == 0.1
    method = framework.Perturb("m-rwp:sigma=0.02,lam=0.3").method
    assert method == steppe.m_rwp(0.02, lam=0.3)
    with pytest.raises(ValueError, match="nonsense"):
        framework.Perturb("nonsense")
    with pytest.raises((TypeError, ValueError), match="flavour"):
        framework.Perturb("rwp:flavour=3")


def test_a_method_by_its_name_trains_the_same_under_lightning():
    named, _ = fit("m-rwp:sigma=0.05,lam=0.3", accumulate_grad_batches=2)
    plain, perturb = fit(steppe.m_rwp(0.05, lam=0.3), accumulate_grad_batches=2)
    assert equal(weights_of(named), weights_of(plain))
    assert perturb.perturber.step == 3
