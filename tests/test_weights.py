"""Moving weights and putting them back, whatever their memory looks like."""

import gc

import pytest
import torch
from torch import nn

import steppe
from steppe import noise
from steppe.noise import Draw
from steppe.perturbations import added
from steppe.weights import Weights
from tests.nets import batch, equal, loss_fn, mlp, weights_of

KINDS = {
    "vector": lambda: torch.randn(70),
    "scalar": lambda: torch.tensor(1.5),
    "matrix": lambda: torch.randn(30, 7),
    "half": lambda: torch.randn(40, 9).bfloat16(),
    "half vector": lambda: torch.randn(11).half(),
    "double": lambda: torch.randn(6, 5).double(),
    "channels last": lambda: torch.randn(8, 3, 4, 2).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(50, 3).t(),
    "strided": lambda: torch.randn(6, 5, 8)[:, :, ::2],
    "rows apart": lambda: torch.randn(9, 12)[:, :7],
    "strided vector": lambda: torch.randn(20)[::2],
    "empty": lambda: torch.randn(0, 4),
}


def parameters(*kinds):
    torch.manual_seed(0)
    return [(kind, nn.Parameter(KINDS[kind]())) for kind in kinds or KINDS]


def weights_for(named, **options):
    groups = [{"params": [param for _, param in named], **options}]
    return Weights(named, torch.optim.SGD(groups, lr=0.1))


@pytest.fixture(params=[noise.CPU_BLOCK, 64, 10], ids=["one block", "blocks", "small blocks"])
def named(request, monkeypatch):
    """Parameters of all kinds, in blocks that hold them all, some of them, or a few filters."""
    monkeypatch.setattr(noise, "CPU_BLOCK", request.param)
    return parameters()


def values(named):
    return [param.detach().clone() for _, param in named]


def moved_by(weights, named, draw, size=1.0):
    true = values(named)
    weights.save()
    weights.add_noise(draw, torch.full_like(weights.sizes, size))
    eps = [p.detach().double() - t.double() for (_, p), t in zip(named, true, strict=True)]
    weights.restore()
    assert equal(true, values(named))
    return eps


def test_all_kinds_of_memory_are_moved_and_come_back_bit_for_bit(named):
    strides = [param.stride() for _, param in named]
    weights = weights_for(named)
    eps = moved_by(weights, named, Draw(0, 0))
    # 16 bits have no room for the smallest values
    assert all((e != 0).float().mean() > 0.95 for e in eps if e.numel())
    assert strides == [param.stride() for _, param in named]
    assert equal(eps, moved_by(weights, named, Draw(0, 0)))
    assert not any(map(torch.equal, eps[:-1], moved_by(weights, named, Draw(0, 1))[:-1]))


def test_norms_are_those_of_each_filter(named):
    expected = [
        torch.linalg.vector_norm(p.detach().double().flatten(1), dim=1)
        if p.dim() > 1
        else p.detach().double().norm().reshape(1)
        for _, p in named
    ]
    weights = weights_for(named)
    torch.testing.assert_close(weights.filter_norms(), torch.cat(expected), rtol=1e-6, atol=0)
    tensors = [p.detach().clone() * 2 for _, p in named]
    found = weights.filter_norms(tensors)
    torch.testing.assert_close(found, 2 * torch.cat(expected), rtol=1e-6, atol=0)
    tensors[2] = None
    rows = weights.params[2].filters
    assert not weights.filter_norms(tensors)[rows].any()
    weights.save()
    weights.add_noise(Draw(0, 0), torch.ones_like(weights.sizes))
    torch.testing.assert_close(weights.filter_norms(), torch.cat(expected), rtol=1e-6, atol=0)
    again = weights.filter_norms([None if t is None else t / 2 for t in tensors])
    torch.testing.assert_close(again, weights.filter_norms(tensors) / 2, rtol=1e-2, atol=0)
    true = values([(n, p.clone()) for n, p in named])
    weights.restore()
    assert not equal(true, values(named))


def test_freezing_a_parameter_leaves_the_noise_of_the_others(named):
    weights = weights_for(named)
    before = moved_by(weights, named, Draw(3, 1))
    named[2][1].requires_grad_(False)
    named[6][1].requires_grad_(False)
    after = moved_by(weights, named, Draw(3, 1))
    for number, (a, b) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(b, torch.zeros_like(b) if number in (2, 6) else a)
    named[2][1].requires_grad_(True)
    assert torch.equal(moved_by(weights, named, Draw(3, 1))[2], before[2])


def test_norms_of_gradients_follow_who_is_frozen(named):
    weights = weights_for(named)
    grads = [torch.ones_like(p) for _, p in named]
    everything = weights.filter_norms(grads)
    named[2][1].requires_grad_(False)
    rows = weights.params[2].filters
    assert not weights.filter_norms(grads)[rows].any()
    named[2][1].requires_grad_(True)
    assert torch.equal(weights.filter_norms(grads), everything)


def test_half_precision_is_rounded_once(named):
    weights, draw = weights_for(named), Draw(1, 1)
    seed_of = draw.block_seeds(weights._flat.blocks)
    unit = {}
    for flat in weights._flat.now():
        eps = torch.empty_like(flat.backup, dtype=flat.wide)
        for block in flat.blocks:
            block.draw_(eps[block.place], seed_of(block.number))
        unit |= dict(zip(flat.members, flat.views_of(eps), strict=True))
    halves = {p: p.values.float() for p in weights.params if p.dtype.itemsize == 2}
    weights.save()
    weights.add_noise(draw, torch.full_like(weights.sizes, 0.25))
    for p, true in halves.items():
        assert torch.equal(p.values, (true + 0.25 * unit[p]).to(p.dtype))
    assert halves
    weights.restore()


def test_a_second_write_goes_on_from_the_first(named):
    weights, true = weights_for(named), values(named)
    ones = torch.ones_like(weights.sizes)
    eps = [moved_by(weights, named, Draw(0, step)) for step in (0, 1)]
    weights.save()
    weights.add_noise(Draw(0, 0), ones)
    weights.add_noise(Draw(0, 1), ones)
    for (_, p), t, a, b in zip(named, true, *eps, strict=True):
        bits = torch.finfo(p.dtype).eps
        both = (t.double() + a + b).to(p.dtype)
        torch.testing.assert_close(p.detach(), both, rtol=8 * bits, atol=16 * bits)
    weights.restore()
    assert equal(true, values(named))


def test_directions_are_added_and_strengths_scale_them(named):
    weights, true = weights_for(named, strength=0.5), values(named)
    directions = [torch.randn_like(p) for _, p in named]
    directions[1] = None
    weights.save()
    weights.add(directions, torch.tensor(0.25))
    for (_, p), t, d in zip(named, true, directions, strict=True):
        expected = t if d is None else (t.double() + 0.125 * d.double()).to(p.dtype)
        bits = torch.finfo(p.dtype).eps
        torch.testing.assert_close(p.detach(), expected, rtol=2 * bits, atol=bits)
    weights.restore()
    assert equal(true, values(named))


def test_the_gain_multiplies_all_noise(named):
    weights = weights_for(named)
    before = moved_by(weights, named, Draw(0, 0), size=0.5)
    weights.gain = torch.tensor(0.5)
    assert equal(before, moved_by(weights, named, Draw(0, 0), size=1.0))


def test_dot_eps_is_the_plain_sum(named):
    weights, true = weights_for(named), values(named)
    assert weights.dot_eps([]) == 0
    grads = [torch.randn_like(p) for _, p in named]
    grads[0] = None
    weights.save()
    weights.add_noise(Draw(0, 0), torch.full_like(weights.sizes, 0.1))
    expected = sum(
        ((p.detach().double() - t.double()) * g.double()).sum()
        for (_, p), t, g in zip(named, true, grads, strict=True)
        if g is not None
    )
    size = sum(
        ((p.detach().double() - t.double()) * g.double()).abs().sum()
        for (_, p), t, g in zip(named, true, grads, strict=True)
        if g is not None
    )
    found = weights.dot_eps(grads)
    assert abs(found - expected) < 1e-6 * size
    weights.restore()
    assert equal(true, values(named))


@pytest.mark.parametrize("square", [False, True])
def test_memory_decays_and_adds_or_drops_the_whole_step(named, square):
    weights = weights_for(named)
    memory, expected = weights.zeros(), [m.double() for m in weights.zeros()]
    for step in range(3):
        grads = [torch.randn_like(p) for _, p in named]
        grads[step] = None
        weights.decay_and_add(memory, grads, 0.9, torch.tensor(0.5), square=square)
        for m, g in zip(expected, grads, strict=True):
            m.mul_(0.9)
            if g is not None:
                m.add_(0.5 * (g.double() ** 2 if square else g.double()))
    for found, m in zip(memory, expected, strict=True):
        torch.testing.assert_close(found.double(), m, rtol=1e-5, atol=1e-6)
    kept = [m.clone() for m in memory]
    grads[3][0, 0] = torch.inf
    grads[5][0, 0] = torch.nan
    weights.decay_and_add(memory, grads, 0.9, 0.5, square=square)
    assert equal(kept, memory)


@pytest.mark.parametrize("method", [steppe.arwp(0.1), steppe.arwp(0.1, elementwise=True)])
def test_notes_of_a_whole_pass_are_those_of_each_parameter(named, method):
    noise, weights = method.passes[0].perturbation, weights_for(named)
    passes = [[torch.randn_like(p) for _, p in named] for _ in range(3)]
    passes[0][0] = passes[1][0] = passes[1][4] = None
    together, single = [], [[] for _ in named]
    alone = [weights_for([one]) for one in named]
    for scale, grads in enumerate(passes, start=1):
        together = added(together, noise.collect(weights, grads, scale))
        parts = zip(alone, grads, single, strict=True)
        single = [added(found, noise.collect(one, [g], scale)) for one, g, found in parts]
    for a, (b,) in zip(together, single, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, check_dtype=False)


# ---------------------------------------------------------------------- the optimizer's options


def test_strengths_are_read_from_the_groups_there_are_now():
    named = parameters("matrix", "vector")
    optimizer = torch.optim.SGD([{"params": [p], "strength": 0.5} for _, p in named], lr=0.1)
    weights = Weights(named, optimizer)
    before = moved_by(weights, named, Draw(0, 0))
    saved = optimizer.state_dict()
    saved["param_groups"][0]["strength"] = 1.0
    optimizer.load_state_dict(saved)
    after = moved_by(weights, named, Draw(0, 0))
    torch.testing.assert_close(after[0], 2 * before[0], rtol=1e-4, atol=1e-6)
    assert torch.equal(after[1], before[1])
    assert weights.strengths().unique().tolist() == [0.5, 1.0]


@pytest.mark.parametrize("method", [steppe.sam(0.3), steppe.asam(0.3), steppe.msam(0.3)])
def test_where_the_optimizer_maximizes_up_is_the_other_way(method):
    def gradients(model, maximize, signs):
        groups = [
            {"params": model[0].parameters(), "maximize": maximize[0]},
            {"params": model[2].parameters(), "maximize": maximize[1]},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        perturber = steppe.attach(model, optimizer, method)
        found = []
        for step in range(2):
            x, y = batch(step)
            perturber.backward(lambda: signs * loss_fn(model(x), y))
            found += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return found

    minimized = gradients(mlp(), (False, False), 1)
    maximized = gradients(mlp(), (True, True), -1)
    assert equal(minimized, [-g for g in maximized])
    mixed = gradients(mlp(), (True, False), 1)
    assert not equal(minimized, mixed)


# ---------------------------------------------------------------------- writes by others


class Writing(nn.Module):
    """A model that changes a weight in its forward, now and then."""

    def __init__(self, write, calls=(0,)):
        super().__init__()
        self.net, self.write, self.calls, self.done = mlp(), write, calls, -1

    def forward(self, x):
        self.done += 1
        if self.done in self.calls:
            with torch.no_grad():
                self.write(self.net[0].weight)
        return self.net(x)


def in_place(weight):
    weight.mul_(0.5)


def through_data(weight):
    weight.data.mul_(0.5)


def rebound(weight):
    weight.data = weight.data * 0.5


@pytest.mark.parametrize(
    ("write", "calls"),
    [(in_place, (0,)), (in_place, (3,)), (through_data, (1,)), (rebound, (2,))],
)
def test_a_write_in_the_middle_of_a_pass_is_found(write, calls):
    model = Writing(write, calls)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    perturber = steppe.attach(model, optimizer, steppe.rwp(0.05))
    true, x = weights_of(model), batch()[0]
    for _ in range(calls[0]):
        model(x).sum().backward()
        optimizer.step()
    model(x)
    with pytest.raises(
        RuntimeError, match=r"net\.0\.weight changed .* exclude=\('net\.0\.weight',\)"
    ):
        perturber.restore()
    assert equal(true, weights_of(model))
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    assert equal(true, weights_of(model))


def test_an_excluded_parameter_may_be_written():
    model = Writing(in_place, range(9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    steppe.attach(model, optimizer, steppe.rwp(0.05), exclude=("net.0.weight",))
    true = model.net[0].weight.detach().clone()
    for _ in range(3):
        model(batch()[0]).sum().backward()
        optimizer.step()
    torch.testing.assert_close(model.net[0].weight.detach(), true / 8)


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(5, 4))

    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.rows, max_norm=0.1)


def test_rows_that_a_forward_renorms_are_named():
    model = Renormed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steppe.attach(model, optimizer, steppe.rwp(0.05))
    with pytest.raises(RuntimeError, match=r"rows changed .*max_norm"):
        model(torch.tensor([0, 1])).sum().backward()


def test_a_quiet_restore_never_raises():
    named = parameters("matrix", "vector")
    weights, true = weights_for(named), values(named)
    weights.save()
    weights.add_noise(Draw(0, 0), torch.ones_like(weights.sizes))
    weights.watch()
    with torch.no_grad():
        named[0][1].zero_()
    weights.restore(quiet=True)
    assert equal(true, values(named))
    weights.save()
    weights.watch()
    named[0][1].data = torch.zeros(2)
    weights.restore(quiet=True)


def test_marks_differ_after_a_write():
    named = parameters("matrix", "vector")
    weights = weights_for(named)
    before = weights.marks()
    assert before == weights.marks()
    with torch.no_grad():
        named[1][1].add_(1)
    assert before != weights.marks()


# ---------------------------------------------------------------------- what happens to a model


@pytest.mark.parametrize("method", [steppe.rwp(0.1), steppe.msam(0.1)])
def test_converting_an_attached_model_is_refused_before_anything_moves(method):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steppe.attach(model, optimizer, method)
    model.double()
    true = weights_of(model)
    with pytest.raises(RuntimeError, match=r"0\.weight was torch\.float32 .* is torch\.float64"):
        model(batch(dtype=torch.float64)[0])
    assert equal(true, weights_of(model))


def test_a_model_that_moved_to_another_device_is_refused():
    model = mlp()
    steppe.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), steppe.rwp(0.1))
    model.to("meta")  # torch makes new parameters here
    with pytest.raises(RuntimeError, match=r"move to another device since.*Or attach again"):
        model(batch()[0].to("meta"))


def test_a_parameter_that_is_rebound_between_passes_is_followed():
    model = nn.Conv2d(3, 5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    perturber = steppe.attach(model, optimizer, steppe.rwp(0.1))
    for change in (
        lambda: model.to(memory_format=torch.channels_last),
        lambda: setattr(model.weight, "data", model.weight.detach() * 2),
    ):
        change()
        true = weights_of(model)
        model(torch.randn(2, 3, 8, 8))
        assert not torch.equal(true[0], model.weight)
        perturber.restore()
        assert equal(true, weights_of(model))


@pytest.mark.parametrize("method", [steppe.rwp(0.1), steppe.msam(0.1), steppe.sam(0.1)])
def test_a_probe_in_inference_mode_leaves_a_run_that_trains(method):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    perturber = steppe.attach(model, optimizer, method)
    x, y = batch()
    with torch.inference_mode():
        if method.in_sequence:
            with pytest.raises(RuntimeError):
                perturber.probe(lambda: loss_fn(model(x), y))
        else:
            perturber.probe(lambda: loss_fn(model(x), y))
            perturber.stats()
    for _ in range(2):
        perturber.backward(lambda: loss_fn(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "method",
    [
        steppe.sam(0.1),
        steppe.asam(0.1),
        steppe.arwp(0.1),
        steppe.arwp(0.1, elementwise=True),
        steppe.m_arwp(0.1),
        steppe.msam(0.1),
    ],
)
def test_sparse_gradients_are_like_dense_ones(method):
    def train(sparse):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        perturber = steppe.attach(model, optimizer, method)
        for step in range(3):
            tokens = torch.tensor([[step, step + 1], [4, 4]])
            batches = [(tokens, torch.tensor([0, 2]))] * method.batches_needed
            perturber.backward(lambda x, y: loss_fn(model(x), y), *batches)
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(model)

    for a, b in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(a, b)


def test_free_lets_go_of_the_memory():
    named = parameters("matrix", "half")
    weights, true = weights_for(named), values(named)
    weights.save()
    weights.add_noise(Draw(0, 0), torch.ones_like(weights.sizes))
    weights.free()
    assert equal(true, values(named))
    assert not weights._flat.flats
    weights.save()
    weights.restore()
    assert equal(true, values(named))


def test_a_scalar_and_an_empty_parameter_have_a_radius():
    named = parameters("scalar", "empty", "matrix")
    model = nn.Module()
    for name, param in named:
        model.register_parameter(name, param)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    perturber = steppe.attach(model, optimizer, steppe.arwp(0.1, elementwise=True))
    assert perturber.stats()["displacement"] > 0


@pytest.mark.parametrize("name", ["m_arwp", "m_rwp", "sam", "lpf_sgd"])
def test_gradients_of_single_passes_are_let_go_when_the_step_is_over(name):
    """Each is as large as the weights: what is kept until the next collection is a copy of them."""
    model = nn.Sequential(nn.Linear(5, 83), nn.Linear(83, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = getattr(steppe, name)()
    perturber = steppe.attach(model, optimizer, method)
    batches = [(torch.randn(16, 5),) for _ in range(method.batches_needed)]

    def gradients() -> int:
        alive = [o for o in gc.get_objects() if type(o) is torch.Tensor]
        own = {model[0].weight.data_ptr()}  # a view of the parameter itself is no copy
        return sum(
            o.shape == (83, 5) and not o._is_view() and o.data_ptr() not in own for o in alive
        )

    gc.collect()
    gc.disable()
    try:
        before = gradients()
        for _ in range(3):
            perturber.backward(lambda x: model(x).square().mean(), *batches)
            optimizer.step()
            optimizer.zero_grad()
            assert gradients() == before
    finally:
        gc.enable()
