"""DDP: passes over ranks, against one process."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP

import steppe
from tests.nets import batch, conv, equal, images, loss_fn, mlp, weights_of
from tests.parallel.harness import run

LAMS = [0.0, 0.3, 0.5, 1.0]


def data(step, rank=0):
    return batch(100 * step + rank, dtype=torch.float64)


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def plain(tensors):
    return [t.detach().clone() for t in tensors]


def history_of(perturber):
    states = perturber.state_dict()["states"]
    return [t.clone() for state in states for value in state.values() for t in value]


# ---------------------------------------------------------------------- jobs, run on every rank


def train(rank, method, steps, wrap=None, attach=None, accumulate=1):
    model = DDP(mlp(dtype=torch.float64), **(wrap or {}))
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, method, **(attach or {}))
    for step in range(steps):
        for part in range(accumulate):
            x, y = data(step * accumulate + part, rank)
            if part < accumulate - 1:
                with model.no_sync():
                    (loss_fn(model(x), y) / accumulate).backward()
            else:
                (loss_fn(model(x), y) / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model), history_of(perturber)


def one_process(method, steps, accumulate=1):
    """The same two-rank run in one process: rank 0's batches are clean, rank 1's perturbed."""
    model = mlp(dtype=torch.float64)
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, method)
    for step in range(steps):
        for part in range(accumulate):
            number = step * accumulate + part
            perturber.backward(
                lambda x, y: loss_fn(model(x), y) / accumulate, data(number, 0), data(number, 1)
            )
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model), history_of(perturber)


def assert_close(first, second, tolerance=1e-10):
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lam", LAMS)
@pytest.mark.parametrize("make", [steppe.m_rwp, steppe.m_arwp])
def test_two_ranks_equal_one_process(make, lam):
    method = make(0.05, lam=lam)
    results = run(2, train, method, 5, None, {"noise": "shared"})
    weights, history = one_process(method, 5)
    for found, learnt in results:
        assert_close(weights, found)
        assert_close(history, learnt)
    assert equal(results[0][0], results[1][0])


WRAPS = {
    "static_graph": {"static_graph": True},
    "bucket views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "no broadcast": {"broadcast_buffers": False},
}


@pytest.mark.parametrize("name", WRAPS)
def test_ddp_options_change_nothing(name):
    method = steppe.m_arwp(0.05, eta=5.0, lam=0.3)
    weights, history = one_process(method, 4)
    for found, learnt in run(2, train, method, 4, WRAPS[name], {"noise": "shared"}):
        assert_close(weights, found)
        assert_close(history, learnt)


@pytest.mark.parametrize("views", [False, True])
def test_accumulation_with_no_sync(views):
    method = steppe.m_arwp(0.05, eta=5.0, lam=0.3)
    weights, history = one_process(method, 3, accumulate=3)
    wrap = {"gradient_as_bucket_view": views}
    for found, learnt in run(2, train, method, 3, wrap, {"noise": "shared"}, 3):
        assert_close(weights, found)
        assert_close(history, learnt)


def gradients_on_four(rank, lam, shared):
    """One step: this rank's own gradient at its own weights, and what the optimizer sees."""
    model = DDP(mlp(dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = "shared" if shared else None
    method = steppe.m_arwp(0.05, beta=0.9, lam=lam)
    perturber = steppe.attach(model, optimizer, method, noise=noise)
    x, y = data(0, rank)
    true = weights_of(model)
    loss = loss_fn(model(x), y)
    moved = weights_of(model)
    loss.backward()
    seen = plain(p.grad for p in model.parameters())
    optimizer.step()
    other = mlp(dtype=torch.float64)
    with torch.no_grad():
        for p, w in zip(other.parameters(), moved, strict=True):
            p.copy_(w)
    loss_fn(other(x), y).backward()
    own = plain(p.grad for p in other.parameters())
    eps = [a - b for a, b in zip(moved, true, strict=True)]
    return own, seen, eps, history_of(perturber)


@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shared", [False, True])
def test_four_ranks_follow_the_formula(lam, shared):
    """lam mean(g at w+eps) + (1-lam) mean(g at w), and v = mean over the perturbed ranks' own."""
    results = run(4, gradients_on_four, lam, shared)
    own = [r[0] for r in results]
    for _, seen, _, history in results:
        for number, grad in enumerate(seen):
            clean = (own[0][number] + own[1][number]) / 2
            perturbed = (own[2][number] + own[3][number]) / 2
            expected = lam * perturbed + (1 - lam) * clean
            torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-13)
        squares = [torch.cat([_filter_squares(g) for g in grads]) for grads in (own[2], own[3])]
        assert_close([sum(squares) / 2], history)
    eps = [r[2] for r in results]
    assert all(float(e.abs().max()) == 0 for e in eps[0] + eps[1]), "ranks 0 and 1 are clean"
    assert equal(eps[2], eps[3]) == shared, "each perturbed rank draws its own eps, unless shared"


def _filter_squares(grad):
    return grad.flatten(1).square().sum(1) if grad.dim() > 1 else grad.square().sum().reshape(1)


# ---------------------------------------------------------------------- methods of one pass


@pytest.mark.parametrize("noise", [None, "shared"])
@pytest.mark.parametrize("method", [steppe.rwp(0.05), steppe.arwp(0.05, eta=5.0)])
def test_one_pass_methods(method, noise):
    results = run(2, first_eps, method, noise)
    assert equal(results[0][0], results[1][0]) == (noise == "shared")
    assert equal(results[0][1], results[1][1]), "weights after training"
    assert equal(results[0][2], results[1][2]), "history after training"


def first_eps(rank, method, noise):
    model = DDP(mlp(dtype=torch.float64))
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, method, noise=noise)
    true = weights_of(model)
    eps = None
    for step in range(4):
        x, y = data(step, rank)
        loss = loss_fn(model(x), y)
        eps = eps or [a - b for a, b in zip(weights_of(model), true, strict=True)]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return eps, weights_of(model), history_of(perturber)


def test_shared_rwp_on_two_ranks_is_rwp_on_both_batches():
    method = steppe.arwp(0.05, eta=5.0)
    results = run(2, train, method, 4, None, {"noise": "shared"})
    model = mlp(dtype=torch.float64)
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, method)
    for step in range(4):
        (x, y), (x2, y2) = data(step, 0), data(step, 1)
        loss_fn(model(torch.cat([x, x2])), torch.cat([y, y2])).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(weights_of(model), results[0][0])
    assert_close(history_of(perturber), results[0][1])


# ---------------------------------------------------------------------- micro-batches under DDP


def micro(rank, method):
    model = DDP(mlp(dtype=torch.float64))
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, method, passes_over="microbatches", noise="shared")
    for step in range(3):
        with model.no_sync():
            (loss_fn(model(data(2 * step, rank)[0]), data(2 * step, rank)[1]) / 2).backward()
        x, y = data(2 * step + 1, rank)
        (loss_fn(model(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model), history_of(perturber)


def test_micro_batches_under_ddp_exchange_their_history():
    method = steppe.m_rwp(0.05, lam=0.3)
    results = run(2, micro, method)
    model = mlp(dtype=torch.float64)
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, method)

    def both(number):
        (x, y), (x2, y2) = data(number, 0), data(number, 1)
        return torch.cat([x, x2]), torch.cat([y, y2])

    for step in range(3):
        perturber.backward(lambda x, y: loss_fn(model(x), y), both(2 * step), both(2 * step + 1))
        optimizer.step()
        optimizer.zero_grad()
    assert_close(weights_of(model), results[0][0])
    results = run(2, micro, steppe.m_arwp(0.05, lam=0.3, eta=5.0))
    assert equal(*[r[0] for r in results])
    assert equal(*[r[1] for r in results]), "both ranks have learnt the same"
    assert float(results[0][1][0].max()) > 0


# ---------------------------------------------------------------------- replicas


def drift(rank, steps):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steppe.attach(model, optimizer, steppe.m_arwp(0.05))
    by_subtraction = copy.deepcopy(weights_of(model))
    for step in range(steps):
        x, y = batch(100 * step + rank)
        loss_fn(model(x), y).backward()
        if rank == 1:  # what the released scripts do: take the noise off again
            generator = torch.Generator().manual_seed(step)
            for w in by_subtraction:
                noise = 0.05 * w.norm() * torch.randn(w.shape, generator=generator)
                w.add_(noise).sub_(noise)
        for w, p in zip(by_subtraction, model.parameters(), strict=True):
            w.sub_(0.05 * p.grad)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model), by_subtraction


def test_replicas_are_bit_identical_after_hundreds_of_steps():
    (ours, theirs), (ours_1, theirs_1) = run(2, drift, 300)
    assert equal(ours, ours_1)
    assert not equal(theirs, theirs_1), "putting back by subtraction lets replicas drift apart"


# ---------------------------------------------------------------------- BatchNorm


def batchnorm(rank, wrap, method):
    model = DDP(conv(), **wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    steppe.attach(model, optimizer, method)
    for step in range(3):
        x, y = images(10 * step + rank)
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [b.clone() for b in model.buffers()]


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("method", [steppe.m_rwp(0.3), steppe.m_arwp(0.3)])
def test_statistics_come_from_the_clean_ranks_only(broadcast, method):
    results = run(2, batchnorm, {"broadcast_buffers": broadcast}, method)
    twin = conv()
    for step in range(3):
        twin(images(10 * step)[0])
    expected = [b.clone() for b in twin.buffers()]
    assert equal(expected, results[0])
    assert_close(expected, results[1], 1e-6)


def sync_batchnorm(rank):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(conv())
    ranks = []
    model = _PretendDDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    perturber = steppe.attach(model, optimizer, steppe.m_rwp(0.1))
    layers = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm)]
    ranks = [dist.get_process_group_ranks(layer.process_group) for layer in layers]
    perturber.detach()
    return ranks, [layer.process_group is None for layer in layers]


class _PretendDDP(DDP):
    """SyncBatchNorm refuses DDP on the CPU; its groups can be looked at all the same."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module
        self.process_group = dist.group.WORLD
        self.static_graph = self.gradient_as_bucket_view = False


def test_sync_batchnorm_is_narrowed_to_the_ranks_of_one_pass():
    results = run(4, sync_batchnorm)
    assert [r[0] for r in results] == [[[0, 1]] * 2, [[0, 1]] * 2, [[2, 3]] * 2, [[2, 3]] * 2]
    assert all(all(r[1]) for r in results), "detach() gives the old groups back"


# ---------------------------------------------------------------------- groups and refusals


def subgroup(rank):
    pair = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    model = DDP(mlp(dtype=torch.float64), process_group=pair)
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, steppe.m_arwp(0.05, lam=0.3), noise="shared")
    for step in range(3):
        x, y = data(step, rank // 2)
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model), history_of(perturber)


def test_a_process_group_that_is_not_the_world():
    results = run(4, subgroup)
    weights, history = one_process(steppe.m_arwp(0.05, lam=0.3), 3)
    for found, learnt in (results[1], results[3]):
        assert_close(weights, found)
        assert_close(history, learnt)


def refusals(rank):
    """The messages of everything that must not be attached."""
    messages = []

    def note(make, method, **options):
        model = make()
        try:
            steppe.attach(model, sgd(model), method, **options)
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))
        else:
            messages.append("attached")

    note(mlp, steppe.rwp(0.1))
    note(lambda: DDP(mlp()), steppe.m_arwp(0.01, elementwise=True))
    note(lambda: DDP(mlp()), steppe.m_rwp(0.01, same_batch=True))
    note(lambda: DDP(mlp()), steppe.sam(), passes_over="ranks")
    note(lambda: DDP(mlp(), static_graph=True), steppe.sam())
    note(lambda: DDP(mlp()), steppe.lpf_sgd(0.01, samples=3))
    return messages


def test_what_cannot_work_says_so():
    for messages in run(2, refusals):
        assert "not wrapped" in messages[0]
        assert "DistributedDataParallel(model)" in messages[0]
        assert "history as large as the model" in messages[1]
        assert "every rank brings its own" in messages[2]
        assert "cannot run on different ranks" in messages[3]
        assert 'ascent="global"' in messages[4]
        assert "3, 6, 9, … ranks work" in messages[5]


def test_one_rank_is_not_enough_and_says_which_numbers_are():
    (text,) = run(1, alone)
    assert "which 1 cannot be divided into; 2, 4, 6, … ranks work" in text
    assert 'passes_over="microbatches"' in text


def alone(rank):
    model = DDP(mlp())
    try:
        steppe.attach(model, sgd(model), steppe.m_rwp(0.1))
    except RuntimeError as error:
        return str(error)
    return "attached"


def test_passes_over_ranks_needs_a_process_group():
    model = mlp()
    with pytest.raises(RuntimeError, match="needs a process group: start with torchrun"):
        steppe.attach(model, sgd(model), steppe.m_rwp(0.1), passes_over="ranks")


# ---------------------------------------------------------------------- SAM, scaler, explicit API


def sam(rank, ascent, views, accumulate):
    model = DDP(mlp(dtype=torch.float64), gradient_as_bucket_view=views)
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, steppe.sam(0.2), ascent=ascent)
    for step in range(3):
        for part in range(accumulate):
            x, y = data(step * accumulate + part, rank)
            perturber.backward(lambda: loss_fn(model(x), y) / accumulate)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("ascent", ["rank", "global", None])
def test_sam_climbs_per_rank_or_globally(ascent, views, accumulate):
    first, second = run(2, sam, ascent, views, accumulate)
    assert equal(first, second)
    model = mlp(dtype=torch.float64)
    optimizer = sgd(model)
    method = steppe.sam(0.2) if ascent == "global" else steppe.sam(0.2, m=16)
    perturber = steppe.attach(model, optimizer, method)
    for step in range(3):
        for part in range(accumulate):
            (x, y), (x2, y2) = (data(step * accumulate + part, r) for r in range(2))
            batch = (torch.cat([x, x2]), torch.cat([y, y2]))
            perturber.backward(lambda x, y: loss_fn(model(x), y) / accumulate, batch)
        optimizer.step()
        optimizer.zero_grad()
    assert_close(weights_of(model), first, 1e-9)


def overflow(rank, method):
    model = DDP(mlp())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    perturber = steppe.attach(model, optimizer, method, scaler=scaler)
    before = None
    for step in range(4):
        x, y = batch(100 * step + rank)
        if step == 2:
            before = weights_of(model) + history_of(perturber)
            x = x * float("inf") if rank == 1 else x
        scaler.scale(loss_fn(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == 2:
            unchanged = equal(before, weights_of(model) + history_of(perturber))
    return unchanged, perturber.step, weights_of(model), history_of(perturber), scaler.get_scale()


@pytest.mark.parametrize("method", [steppe.m_arwp(0.05), steppe.arwp(0.05)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(method):
    first, second = run(2, overflow, method)
    for unchanged, steps, weights, _, scale in (first, second):
        assert unchanged
        assert steps == 3
        assert scale == 512.0
        assert all(w.isfinite().all() for w in weights)
    assert equal(first[2], second[2])
    assert equal(first[3], second[3])


def explicit(rank, way):
    model = DDP(mlp(dtype=torch.float64))
    optimizer = sgd(model)
    perturber = steppe.attach(model, optimizer, steppe.m_arwp(0.05, lam=0.3), noise="shared")
    assert perturber.batches_needed == 1
    for step in range(3):
        x, y = data(step, rank)
        if way == "backward":
            perturber.backward(lambda x, y: loss_fn(model(x), y), (x, y))
        else:
            for only in perturber.passes():
                with only:
                    loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    try:
        perturber.backward(lambda x, y: loss_fn(model(x), y), (x, y), (x, y))
    except ValueError as error:
        message = str(error)
    return weights_of(model), history_of(perturber), message, repr(perturber)


@pytest.mark.parametrize("way", ["backward", "passes"])
def test_the_explicit_api_runs_this_ranks_pass(way):
    weights, history = one_process(steppe.m_arwp(0.05, lam=0.3), 3)
    results = run(2, explicit, way)
    for found, learnt, message, _ in results:
        assert_close(weights, found)
        assert_close(history, learnt)
        assert "every rank brings one batch of its own; got 2" in message
    assert (
        "2 passes over 2 replicas; this is replica 1 and runs pass 1 (perturbed)" in results[1][3]
    )


# ---------------------------------------------------------------------- checkpoints


def resumed(rank, folder):
    """Six steps at once, and three steps, a distributed checkpoint, new objects, three more."""
    method = steppe.m_arwp(0.05, eta=5.0, lam=0.3)

    def fresh(seed):
        model = DDP(mlp(dtype=torch.float64))
        optimizer = sgd(model)
        return model, optimizer, steppe.attach(model, optimizer, method, seed=seed)

    def go(model, optimizer, steps):
        for step in steps:
            loss_fn(model(data(step, rank)[0]), data(step, rank)[1]).backward()
            optimizer.step()
            optimizer.zero_grad()

    def states(model, optimizer, perturber):
        weights, optim = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": optim, "perturber": perturber.state_dict()}

    whole = fresh(0)
    go(*whole[:2], range(6))
    first = fresh(0)
    go(*first[:2], range(3))
    dcp.save(states(*first), checkpoint_id=folder)
    model, optimizer, perturber = second = fresh(99)
    loaded = states(*second)
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    perturber.load_state_dict(loaded["perturber"])
    go(model, optimizer, range(3, 6))
    return (
        equal(weights_of(whole[0]), weights_of(model)),
        equal(history_of(whole[2]), history_of(perturber)),
        perturber.step,
    )


def test_resume_through_distributed_checkpoint_is_bit_exact(tmp_path):
    assert run(2, resumed, str(tmp_path)) == [(True, True, 6)] * 2
