"""The Lightning callback against the same training written by hand, bit for bit."""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

import steppe
from steppe.integrations.lightning import Perturb
from tests.nets import batch, equal, loss_fn, mlp, weights_of

ARWP = steppe.arwp(0.05, eta=5.0)
M_ARWP = steppe.m_arwp(0.05, eta=5.0, lam=0.3)


class Net(LightningModule):
    """As people write them: training_step calls self.net, never self."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = loss_fn(self.net(x), y)
        self.seen.append(weights_of(self))
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader(count=6):
    return DataLoader([batch(i) for i in range(count)], batch_size=None)


def trainer(*callbacks, epochs=1, **options):
    options = {"enable_checkpointing": False, "logger": False, **options}
    return Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def fit(method, module=None, *, count=6, attach=None, resume=None, **options):
    module = module or Net()
    perturb = Perturb(method, **(attach or {}))
    trainer(perturb, **options).fit(module, loader(count), ckpt_path=resume)
    return module, perturb


def by_hand(method, *, count=6, epochs=1, accumulate=1, clip=None, scaler=None, dtype=None):
    """The loop that Lightning runs, with steppe's explicit API."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    perturber = steppe.attach(model, optimizer, method, scaler=scaler)

    def loss_of(x, y):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None, cache_enabled=False):
            return loss_fn(model(x), y) / accumulate

    for _ in range(epochs):
        for number in range(count):
            if method.repeats_batch:
                perturber.backward(lambda: loss_of(*batch(number)))
            else:
                loss = loss_of(*batch(number))
                (scaler.scale(loss) if scaler else loss).backward()
            if (number + 1) % accumulate and number + 1 < count:
                continue
            if scaler:
                scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
    return model, perturber


def state_of(perturber):
    states = perturber.state_dict()["states"]
    return [t for state in states for tensors in state.values() for t in tensors]


def same_training(perturb, module, perturber, model):
    assert perturb.perturber.step == perturber.step > 0
    assert equal(weights_of(module), weights_of(model))
    assert equal(state_of(perturb.perturber), state_of(perturber))


# ---------------------------------------------------------------------- the same as by hand


@pytest.mark.parametrize(
    ("method", "accumulate"),
    [
        (ARWP, 1),
        (ARWP, 3),
        (steppe.msam(0.5), 2),
        (M_ARWP, 2),
        (steppe.lpf_sgd(0.05, samples=3), 3),
        (steppe.sam(0.1), 1),
        (steppe.rwp(rise=0.5), 2),
        (steppe.sam(rise=0.5), 1),
        (steppe.sam(0.1), 2),
        (steppe.asam(0.5), 1),
        (steppe.m_arwp(0.05, eta=5.0, same_batch=True), 1),
        (steppe.m_rwp(0.05, same_batch=True), 2),
    ],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_equals_a_loop_by_hand(method, accumulate, clip):
    module, perturb = fit(
        method, epochs=2, accumulate_grad_batches=accumulate, gradient_clip_val=clip
    )
    model, perturber = by_hand(method, epochs=2, accumulate=accumulate, clip=clip)
    same_training(perturb, module, perturber, model)


def test_training_steps_see_perturbed_weights_and_everybody_else_true_ones():
    module = Net()
    true = weights_of(module)
    looks = []

    class Look(Callback):
        def on_train_batch_start(self, trainer, module, *_):
            looks.append(weights_of(module))

        def on_after_backward(self, trainer, module):
            looks.append(weights_of(module))

        def on_before_optimizer_step(self, trainer, module, _):
            looks.append(weights_of(module))

    perturb = Perturb(steppe.rwp(0.05))
    trainer(perturb, Look(), max_steps=1).fit(module, loader())
    assert len(looks) == 3
    assert all(equal(look, true) for look in looks)
    assert not equal(module.seen[0], true)


@pytest.mark.parametrize("shape", ["self", "dict"])
def test_other_shapes_of_training_steps(shape):
    class Other(Net):
        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, batch_idx):
            logits = self(batch[0])
            loss = loss_fn(logits, batch[1])
            return {"loss": loss, "logits": logits.detach()} if shape == "dict" else loss

    for method in (ARWP, steppe.sam(0.1)):
        module, perturb = fit(method, Other())
        same_training(perturb, module, *reversed(by_hand(method)))


def test_a_compiled_module():
    class Silent(Net):
        """torch cannot compile Lightning's self.log."""

        def training_step(self, batch, batch_idx):
            return loss_fn(self.net(batch[0]), batch[1])

    module = Silent()
    perturb = Perturb(ARWP)
    trainer(perturb).fit(torch.compile(module, backend="eager"), loader())
    model, perturber = by_hand(ARWP)
    assert perturb.perturber.step == perturber.step
    for found, wanted in zip(weights_of(module), weights_of(model), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_strength_zero_is_lightning_without_steppe():
    plain = Net()
    trainer(accumulate_grad_batches=2).fit(plain, loader())
    module, _ = fit(steppe.m_rwp(0.0), accumulate_grad_batches=2)
    assert equal(weights_of(module), weights_of(plain))


def test_the_odd_tail_of_an_epoch():
    """Lightning divides by accumulate_grad_batches also where fewer came; steppe weighs what ran
    to one, so that a lone clean micro-batch counts as it does without steppe."""
    with pytest.warns(UserWarning, match="passes present add up to one"):
        module, perturb = fit(M_ARWP, count=5, accumulate_grad_batches=2)
    with pytest.warns(UserWarning, match="passes present add up to one"):
        model, perturber = by_hand(M_ARWP, count=5, accumulate=2)
    same_training(perturb, module, perturber, model)
    assert perturb.perturber.stats()["incomplete_steps"] == 1


def test_a_step_without_its_micro_batches_raises():
    with pytest.raises(RuntimeError, match=r"Trainer\(accumulate_grad_batches=2\)"):
        fit(M_ARWP)


def test_a_training_step_may_return_none():
    class Sometimes(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    for method in (ARWP, steppe.sam(0.1)):
        module, perturb = fit(method, Sometimes(), count=4)
        assert perturb.perturber.step == 3
        assert not equal(weights_of(module), weights_of(Net()))


def test_what_a_repeated_training_step_logs_counts_once():
    logged = {}
    for method in (steppe.sam(0.0), steppe.sam(0.5)):
        module, perturb = Net(), Perturb(method)
        run = trainer(perturb, max_steps=1)
        run.fit(module, loader(1))
        logged[method] = float(run.callback_metrics["loss"])
        assert len(module.seen) == 2
        assert "log" not in vars(module)
    true = loss_fn(mlp()(batch(0)[0]), batch(0)[1]).item()
    assert list(logged.values()) == [true, true], "the loss of the first pass, at true weights"


def test_schedules_get_the_length_of_training():
    method = steppe.rwp(steppe.cosine_increase(0, 0.05))
    module, perturb = fit(method, count=6, epochs=4, accumulate_grad_batches=2)
    (planned,) = perturb.perturber.method.passes
    assert planned.perturbation.sigma.steps == 12
    assert perturb.perturber.step == 12
    with pytest.raises(ValueError, match=r"max_epochs=..., max_steps=...\) leaves it open"):
        fit(method, epochs=-1, limit_train_batches=1)


def test_attach_options_arrive():
    _, perturb = fit(ARWP, attach={"exclude": ("net.0.*",), "seed": 7})
    assert "left out   net.0.weight: excluded by 'net.0.*'" in str(perturb.perturber)
    assert perturb.perturber.state_dict()["seed"] == 7


@pytest.mark.slow
def test_the_package_pytorch_lightning_too():
    """The same code under another name, with classes of its own."""
    other = pytest.importorskip("pytorch_lightning")

    class Module(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def training_step(self, batch, batch_idx):
            return loss_fn(self.net(batch[0]), batch[1])

        configure_optimizers = Net.configure_optimizers

    for method in (ARWP, steppe.sam(0.1)):
        module, perturb = Module(), Perturb(method)
        other.Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=[perturb],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, loader())
        same_training(perturb, module, *reversed(by_hand(method)))


@pytest.mark.parametrize(
    ("method", "accumulate"),
    [(steppe.rwp, 2), (steppe.m_arwp, 2), (steppe.sam, 1)],
    ids=["rwp", "m_arwp", "sam"],
)
def test_a_rise_is_the_same_after_50_steps(method, accumulate):
    """When the ramp is open."""
    method, epochs = method(rise=0.5), 9 * accumulate
    module, perturb = fit(method, epochs=epochs, accumulate_grad_batches=accumulate)
    model, perturber = by_hand(method, epochs=epochs, accumulate=accumulate)
    assert perturber.step > 50
    assert perturber.stats()["ratio"] > 0.002
    same_training(perturb, module, perturber, model)


# ---------------------------------------------------------------------- mixed precision


def test_a_rise_under_a_grad_scaler_is_the_same_after_50_steps():
    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=20)

    method = steppe.arwp(rise=0.5)
    plugin = MixedPrecision("16-mixed", "cpu", scaler())
    module, perturb = fit(method, plugins=[plugin], epochs=18, accumulate_grad_batches=2)
    by_us = {"scaler": scaler(), "dtype": torch.float16}
    model, perturber = by_hand(method, epochs=18, accumulate=2, **by_us)
    assert perturber.step > 50
    assert perturber.stats()["ratio"] > 0.002
    same_training(perturb, module, perturber, model)


@pytest.mark.parametrize(
    ("method", "accumulate"),
    [(ARWP, 1), (M_ARWP, 2), (steppe.sam(0.1), 1)],
    ids=["arwp", "m_arwp", "sam"],
)
def test_fp16_with_a_grad_scaler(method, accumulate):
    """`precision="16-mixed"` itself becomes bf16 on the CPU, so the plugin is given."""

    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=2.0**10)

    module, perturb = fit(
        method,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler())],
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
    )
    model, perturber = by_hand(
        method, accumulate=accumulate, clip=1.0, scaler=scaler(), dtype=torch.float16
    )
    same_training(perturb, module, perturber, model)


def test_an_overflow_skips_the_step():
    class Overflowing(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx in (2, 3) else loss

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    module, perturb = fit(
        M_ARWP,
        Overflowing(),
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        accumulate_grad_batches=2,
    )
    assert perturb.perturber.step == 2
    assert scaler.get_scale() == 2.0**9

    class Without(Net):
        """The same training on the batches that did not overflow."""

        def train_dataloader(self):
            return DataLoader([batch(i) for i in (0, 1, 4, 5)], batch_size=None)

    twin, other = Without(), Perturb(M_ARWP)
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**9))]
    trainer(other, plugins=plugins, accumulate_grad_batches=2).fit(twin)
    found = weights_of(module) + state_of(perturb.perturber)
    wanted = weights_of(twin) + state_of(other.perturber)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_bf16(precision):
    """What `precision="16-mixed"` means on a CPU is Lightning's choice: bf16."""
    module, perturb = fit(M_ARWP, precision=precision, accumulate_grad_batches=2)
    model, perturber = by_hand(M_ARWP, accumulate=2, dtype=torch.bfloat16)
    same_training(perturb, module, perturber, model)


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("method", "accumulate"),
    [(ARWP, 1), (M_ARWP, 2), (steppe.sam(0.1), 1), (steppe.msam(0.5), 1)],
    ids=["arwp", "m_arwp", "sam", "msam"],
)
def test_resume_is_bit_exact(method, accumulate, tmp_path):
    whole, ended = fit(method, epochs=4, accumulate_grad_batches=accumulate)
    half = trainer(Perturb(method), epochs=2, accumulate_grad_batches=accumulate)
    half.fit(Net(), loader())
    half.save_checkpoint(tmp_path / "half.ckpt")
    module, perturb = fit(
        method, epochs=4, accumulate_grad_batches=accumulate, resume=tmp_path / "half.ckpt"
    )
    same_training(perturb, module, ended.perturber, whole)


def test_a_second_fit_goes_on_where_the_first_stopped():
    class Plain(Net):
        """Lightning makes a new optimizer for each fit, so without momentum."""

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    whole, ended = fit(ARWP, Plain(), epochs=4)
    module, perturb = Plain(), Perturb(ARWP)
    run = trainer(perturb, epochs=2)
    run.fit(module, loader())
    run.fit_loop.max_epochs = 4
    run.fit(module, loader())
    same_training(perturb, module, ended.perturber, whole)


def test_a_new_trainer_starts_anew():
    perturb = Perturb(ARWP)
    for _ in range(2):
        trainer(perturb).fit(Net(), loader(3))
        assert perturb.perturber.step == 3


def test_resuming_what_was_trained_without_steppe_warns(tmp_path):
    plain = trainer()
    plain.fit(Net(), loader())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.warns(UserWarning, match=r"at step 6 .* without a state of Perturb"):
        fit(ARWP, epochs=2, resume=tmp_path / "plain.ckpt")


def test_resuming_with_another_method_raises(tmp_path):
    half = trainer(Perturb(ARWP))
    half.fit(Net(), loader())
    half.save_checkpoint(tmp_path / "half.ckpt")
    with pytest.raises(ValueError, match=r"state is of arwp\(\), but rwp\(\) is attached"):
        fit(steppe.rwp(0.05), epochs=2, resume=tmp_path / "half.ckpt")


# ---------------------------------------------------------------------- the promise


@pytest.mark.parametrize(
    ("method", "accumulate"),
    [(ARWP, 1), (M_ARWP, 2), (steppe.sam(0.1), 1)],
    ids=["arwp", "m_arwp", "sam"],
)
def test_validation_and_checkpoints_in_the_middle_see_true_weights(method, accumulate, tmp_path):
    """Also between the micro-batches of a step."""

    class Watched(Net):
        def __init__(self):
            super().__init__()
            self.validated = []

        def validation_step(self, batch, batch_idx):
            self.validated.append(weights_of(self))

    class Save(Callback):
        def __init__(self):
            self.saved = []

        def on_train_batch_end(self, trainer, *_):
            path = tmp_path / f"{len(self.saved)}.ckpt"
            trainer.save_checkpoint(path)
            state = torch.load(path, weights_only=True)["state_dict"]
            self.saved.append(list(state.values()))

    module, save = Watched(), Save()
    run = trainer(
        save,
        Perturb(method),
        accumulate_grad_batches=accumulate,
        val_check_interval=1,
        num_sanity_val_steps=0,
    )
    run.fit(module, loader(), loader(1))
    for found in (module.validated, save.saved):
        assert len(found) == 6
        for number in range(accumulate, 7, accumulate):
            model, _ = by_hand(method, accumulate=accumulate, count=number)
            assert equal(found[number - 1], weights_of(model))
        if accumulate == 2:
            assert equal(found[0], weights_of(Net()))
            assert equal(found[2], found[1])


@pytest.mark.parametrize("method", [ARWP, steppe.sam(0.1)], ids=["arwp", "sam"])
@pytest.mark.parametrize("where", ["forward", "second forward", "backward"])
def test_an_exception_leaves_true_weights_and_no_trace(method, where):
    class Failing(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if where == "forward" or (where == "second forward" and len(self.seen) == 2):
                raise KeyError("mine")
            return loss

        def backward(self, loss):
            super().backward(loss)
            if where == "backward":
                raise KeyError("mine")

    module = Failing()
    true = weights_of(module)
    run = trainer(perturb := Perturb(method), max_steps=1)
    if where == "second forward" and method is ARWP:
        run.fit(module, loader())  # which has none
        return
    with pytest.raises(KeyError, match="mine"):
        run.fit(module, loader())
    assert equal(weights_of(module), true)
    assert "training_step" not in vars(run.strategy)
    assert "backward" not in vars(run.strategy)
    steppe.attach(module, torch.optim.SGD(module.parameters(), lr=0.1), method).detach()
    assert perturb.perturber.step == 0


def test_after_training_nothing_is_left():
    module, perturb = fit(ARWP)
    with pytest.raises(RuntimeError, match="was detached"):
        perturb.perturber.passes().__next__()
    x, y = batch()
    true = weights_of(module)
    loss_fn(module.net(x), y)
    assert equal(weights_of(module), true)


# ---------------------------------------------------------------------- refusals


class Manual(Net):
    """Manual optimization, done as the error says."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def on_train_start(self):
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.perturber = steppe.attach(self.net, optimizer, ARWP)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.perturber.backward(lambda x, y: loss_fn(self.net(x), y), batch)
        optimizer.step()
        optimizer.zero_grad()


def test_manual_optimization_raises_with_what_to_do_and_that_works():
    with pytest.raises(RuntimeError, match=r"automatic_optimization = False.*use_pl_optimizer"):
        trainer(Perturb(ARWP)).fit(Manual(), loader())
    module = Manual()
    trainer().fit(module, loader())
    model, perturber = by_hand(ARWP)
    assert equal(weights_of(module), weights_of(model))
    assert module.perturber.step == perturber.step


def test_manual_optimization_through_lightnings_optimizer_does_not_lose_gradients_silently():
    class Trap(Manual):
        def training_step(self, batch, batch_idx):
            self.manual_backward(loss_fn(self.net(batch[0]), batch[1]))
            self.optimizers().step()

    with pytest.raises(RuntimeError, match="ran no backward"):
        trainer().fit(Trap(), loader())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Perturb(steppe.arwp), TypeError, r"Did you mean steppe.arwp\(\)"),
        (lambda: Perturb(steppe.sam(0.1, m=4)), ValueError, r"sam\(m=4\) deals batches"),
        (lambda: Perturb(steppe.sam(0.1, same_batch=False)), ValueError, "same_batch=False"),
        (lambda: Perturb(ARWP, scaler=None), TypeError, "takes scaler from the framework"),
        (lambda: Perturb(ARWP, sead=1), TypeError, "takes the options seed, .*; got sead"),
    ],
)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()
