"""Somebody else writes a parameter, or copies the model, while eps is in the weights."""

import copy
import io

import pytest
import schedulefree
import torch
from torch import nn
from torch.nn import functional as F

import steppe
from tests.nets import batch, conv, equal, images, loss_fn, mlp, weights_of
from tests.review.loops import attached, data, net, sgd

UNDONE = "the write is undone by putting the weights back, without a word"


def tokens(step=0, size=8):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 20, (size, 2), generator=generator), batch(step, size)[1]


# ---------------------------------------------------------------------- max_norm


def renormed(kind):
    torch.manual_seed(0)
    if kind is nn.Embedding:
        return nn.Sequential(nn.Embedding(20, 6, max_norm=1.0), nn.Flatten(), nn.Linear(12, 3))
    return nn.Sequential(nn.EmbeddingBag(20, 6, max_norm=1.0), nn.Linear(6, 3))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    "method", [steppe.rwp(0.5), steppe.m_arwp(0.5), steppe.sam(0.5)], ids=lambda m: m.name
)
def test_an_embedding_with_max_norm_is_left_out_and_keeps_its_renorm(kind, method):
    model, plain = renormed(kind), renormed(kind)
    perturber = steppe.attach(model, sgd(model, lr=0.0), method)
    lines = [line for line in repr(perturber).splitlines() if "max_norm" in line]
    assert len(lines) == 1
    assert "0.weight" in lines[0]
    plain(tokens(1)[0])
    seen = []

    def loss_of(x, y):
        output = model(x)
        seen.append(model[0].weight.detach().clone())
        return loss_fn(output, y)

    perturber.backward(loss_of, *[tokens(1)] * method.batches_needed)
    assert all(torch.equal(plain[0].weight, weight) for weight in seen)
    assert torch.equal(plain[0].weight, model[0].weight)


@pytest.mark.parametrize("how", ["renorm_", "functional"])
@pytest.mark.parametrize("loop", ["unchanged", "backward", "passes"])
def test_a_renorm_inside_of_forward_is_noticed(how, loop):
    class Renormed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Parameter(torch.randn(20, 6))
            self.head = nn.Linear(12, 3)

        def forward(self, x):
            if how == "functional":
                found = F.embedding(x, self.table, max_norm=1.0)
            else:
                with torch.no_grad():
                    self.table.renorm_(2, 0, 1.0)
                found = self.table[x]
            return self.head(found.flatten(1))

    model, optimizer, perturber = attached(steppe.rwp(0.05), model=Renormed())
    true = weights_of(model)
    x, y = tokens()
    with pytest.raises(RuntimeError, match="table"):
        if loop == "unchanged":
            loss_fn(model(x), y).backward()
        elif loop == "backward":
            perturber.backward(lambda: loss_fn(model(x), y))
        else:
            with next(perturber.passes()):
                loss_fn(model(x), y).backward()
        optimizer.step()
    assert equal(true, weights_of(model))


# ---------------------------------------------------------------------- initialisation by data


class Initialised(nn.Module):
    """ActNorm: the scale is set from the first batch."""

    def __init__(self, write):
        super().__init__()
        self.net, self.scale = net(), nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.write, self.ready = write, False

    def forward(self, x):
        if not self.ready:
            self.write(self.scale, 1 / x.detach().std(0))
            self.ready = True
        return self.net(x * self.scale)


@torch.no_grad()
def in_place(param, value):
    param.copy_(value)


def through_data(param, value):
    param.data.copy_(value)


def by_new_data(param, value):
    param.data = value


WRITES = pytest.mark.parametrize(
    "write", [in_place, through_data, by_new_data], ids=["copy_", "data.copy_", "data ="]
)


@WRITES
@pytest.mark.parametrize("explicit", [False, True], ids=["unchanged loop", "backward"])
def test_an_initialisation_in_a_perturbed_forward_is_noticed(write, explicit):
    model, optimizer, perturber = attached(steppe.rwp(0.05), model=Initialised(write))
    true = weights_of(model)
    x, y = data()
    with pytest.raises(RuntimeError, match="scale"):
        if explicit:
            perturber.backward(lambda: loss_fn(model(x), y))
        else:
            loss_fn(model(x), y).backward()
        optimizer.step()
    assert equal(true, weights_of(model))


@WRITES
def test_an_initialisation_in_a_clean_forward_stays(write):
    model, optimizer, perturber = attached(steppe.m_rwp(0.05), model=Initialised(write), lr=0.0)
    for part in range(2):
        (loss_fn(model(data(part)[0]), data(part)[1]) / 2).backward()
    optimizer.step()
    assert torch.equal(model.scale, 1 / data()[0].std(0))
    assert perturber.step == 1


@WRITES
def test_an_initialisation_before_training_stays(write):
    model, optimizer, _ = attached(steppe.rwp(0.05), model=Initialised(write), lr=0.0)
    with torch.no_grad():
        model(data()[0])
    loss_fn(model(data()[0]), data()[1]).backward()
    optimizer.step()
    assert torch.equal(model.scale, 1 / data()[0].std(0))


# ---------------------------------------------------------------------- after a discarded forward

NEXT = {
    "forward": lambda model, optimizer, perturber: model(data()[0]),
    "evaluation": lambda model, optimizer, perturber: model.eval()(data()[0]),
    "step": lambda model, optimizer, perturber: optimizer.step(),
    "restore": lambda model, optimizer, perturber: perturber.restore(),
}


@pytest.mark.parametrize("name", NEXT)
def test_a_write_after_a_discarded_forward_is_noticed(name):
    model, optimizer, perturber = attached(steppe.rwp(0.05))
    true = weights_of(model)
    model(data()[0])
    with torch.no_grad():
        model[0].bias.zero_()
    with pytest.raises(RuntimeError, match=r"0\.bias"):
        NEXT[name](model, optimizer, perturber)
    assert equal(true, weights_of(model))
    model.train()
    loss_fn(model(data()[0]), data()[1]).backward()
    optimizer.step()
    assert perturber.step == 1, "training goes on"


@pytest.mark.parametrize("name", ["schedule", "evaluation", "restore"])
@pytest.mark.parametrize(
    "kind", [schedulefree.SGDScheduleFree, schedulefree.AdamWScheduleFree], ids=["SGD", "AdamW"]
)
def test_schedule_free_leaving_training_after_a_discarded_forward_is_noticed(kind, name):
    model = net()
    optimizer = kind(model.parameters(), lr=0.1)
    perturber = steppe.attach(model, optimizer, steppe.rwp(0.05))
    optimizer.train()
    for step in range(2):
        loss_fn(model(data(step)[0]), data(step)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    true = weights_of(model)
    model(data()[0])
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        optimizer.eval()
        if name == "schedule":
            optimizer.train()
            model(data()[0])
        else:
            NEXT[name](model, optimizer, perturber)
    assert equal(true, weights_of(model))


def test_writes_between_passes_are_the_users_own():
    """Clipping weights after a step, loading some, moving an average in: all of it stays."""
    model, optimizer, perturber = attached(steppe.m_rwp(0.05))
    for step in range(3):
        for part in range(2):
            loss_fn(model(data(2 * step + part)[0]), data(step)[1]).div(2).backward()
            with torch.no_grad():
                model[0].weight.clamp_(-0.1, 0.1)
            assert float(model[0].weight.detach().abs().max()) <= 0.1
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict(net().state_dict())
        assert equal(weights_of(model), weights_of(net()))
    assert perturber.step == 3


# ---------------------------------------------------------------------- copies


def discarded(method):
    """A model whose last perturbed forward was thrown away, and its true weights."""
    model = conv()
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, method)
    for part in range(len(method.passes) - 1):
        loss_fn(model(images(part)[0]), images(part)[1]).backward()
    true = weights_of(model)
    model(images(9)[0])
    return model, true, perturber


def by_pickle(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "torch.save": by_pickle,
    "AveragedModel": lambda model: torch.optim.swa_utils.AveragedModel(model).module,
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("method", [steppe.rwp(0.5), steppe.m_rwp(0.5)], ids=["rwp", "m_rwp"])
def test_a_copy_after_a_discarded_forward_has_true_weights(method, name):
    model, true, _ = discarded(method)
    assert equal(true, weights_of(COPIES[name](model)))


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_after_a_discarded_forward_has_statistics_that_follow(name):
    model, _, _ = discarded(steppe.m_rwp(0.5))
    copied = COPIES[name](model)
    assert copied[1].track_running_stats
    before = copied[1].running_mean.clone()
    copied.train()(images(5)[0])
    assert not torch.equal(before, copied[1].running_mean)


# ---------------------------------------------------------------------- statistics


class Instances(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv1d(3, 4, 3)
        self.norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.norm(self.first(x)).flatten(1))


def sequences(step=0):
    return batch(step, 8, (3, 6))


def statistics(model):
    return [b.clone() for b in model.buffers()]


def test_instance_norm_follows_clean_passes_alone():
    model, plain = Instances(), Instances()
    perturber = steppe.attach(model, sgd(model, lr=0.0), steppe.m_rwp(0.5))
    perturber.backward(lambda x, y: loss_fn(model(x), y), sequences(0), sequences(1))
    plain(sequences(0)[0])
    assert equal(statistics(model), statistics(plain))
    assert not equal(statistics(model), statistics(Instances()))
    model.eval()
    plain.eval()
    assert torch.equal(model(sequences(2)[0]), plain(sequences(2)[0]))


def test_instance_norm_does_not_follow_a_probe():
    model = Instances()
    perturber = steppe.attach(model, sgd(model), steppe.rwp(0.5))
    before = statistics(model)
    perturber.probe(lambda: loss_fn(model(sequences()[0]), sequences()[1]))
    assert equal(before, statistics(model))
    model(sequences()[0])
    assert not equal(before, statistics(model)), "they follow again"


class Counting(nn.Module):
    """Buffers of all kinds: of spectral norm, bound anew, written in place, and with two places."""

    def __init__(self):
        super().__init__()
        self.net = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("unused", None)
        self.again = nn.Module()
        self.again.register_buffer("calls", self.calls)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.calls += 1
        assert self.again.calls is self.calls
        return self.net(x - self.mean)


@pytest.mark.parametrize("method", [steppe.rwp(0.5), steppe.sam(0.1)], ids=lambda m: m.name)
def test_a_probe_leaves_no_trace_in_any_buffer(method):
    model = Counting()
    perturber = steppe.attach(model, sgd(model), method)
    x, y = batch()
    objects, values = list(model.buffers()), statistics(model)

    def failing():
        loss_fn(model(x), y)
        raise KeyError

    perturber.probe(lambda: loss_fn(model(x), y))
    with pytest.raises(KeyError):
        perturber.probe(failing)
    assert all(a is b for a, b in zip(model.buffers(), objects, strict=True))
    assert equal(values, objects)
    assert model.again.calls is model.calls
    perturber.backward(lambda: loss_fn(model(x), y))
    assert not equal(values, statistics(model)), "they follow again"


def test_a_probe_leaves_no_write_of_its_own():
    model = mlp()
    perturber = steppe.attach(model, sgd(model), steppe.rwp(0.5))
    true = weights_of(model)
    perturber.probe(lambda: loss_fn(model(batch()[0]), batch()[1]))
    assert equal(true, weights_of(model))
