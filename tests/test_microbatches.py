"""Passes over consecutive micro-batches of one optimizer step, in an unchanged loop."""

from dataclasses import replace

import pytest
import torch

import steppe
from tests.nets import batch, equal, loss_fn, mlp, weights_of


def attached(method, **options):
    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, steppe.attach(model, optimizer, method, **options)


def data(step):
    return batch(step, dtype=torch.float64)


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def gradient_at(model, eps, parts):
    """Mean gradient over batches at w + eps, by a copy that steppe does not know."""
    other = mlp(dtype=torch.float64)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for p, e in zip(other.parameters(), eps, strict=True):
            p.add_(e)
    for part in parts:
        (loss_fn(other(data(part)[0]), data(part)[1]) / len(parts)).backward()
    return gradients(other)


@pytest.mark.parametrize("lam", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("convention", ["mean", "sum"])
@pytest.mark.parametrize("count", [2, 4])
def test_the_optimizer_sees_exactly_the_mixed_gradient(lam, convention, count):
    model, optimizer, perturber = attached(steppe.m_rwp(0.05, lam=lam), microbatch_loss=convention)
    true = weights_of(model)
    seen = []
    for part in range(count):
        x, y = data(part)
        loss = loss_fn(model(x), y)
        seen.append([p - t for p, t in zip(weights_of(model), true, strict=True)])
        (loss / count if convention == "mean" else loss).backward()
    assert all(float(e.abs().max()) == 0 for e in seen[0] + seen[-2])
    assert equal(seen[1], seen[-1]), "one eps per perturbed pass and step"
    assert float(seen[1][0].abs().max()) > 0
    clean = gradient_at(model, seen[0], range(0, count, 2))
    perturbed = gradient_at(model, seen[1], range(1, count, 2))
    half = count // 2 if convention == "sum" else 1
    for found, p, c in zip(gradients(model), perturbed, clean, strict=True):
        torch.testing.assert_close(found, half * (lam * p + (1 - lam) * c), rtol=1e-10, atol=1e-12)
    optimizer.step()
    assert perturber.step == 1


def test_micro_batches_and_backward_take_the_same_steps():
    method = steppe.m_arwp(0.05, eta=5.0, lam=0.3)
    ends = []
    for way in ("hooks", "backward"):
        model, optimizer, perturber = attached(method)
        for step in range(4):
            parts = [data(2 * step), data(2 * step + 1)]
            if way == "hooks":
                for x, y in parts:
                    (loss_fn(model(x), y) / 2).backward()
            else:
                perturber.backward(lambda x, y: loss_fn(model(x), y), *parts)
            optimizer.step()
            optimizer.zero_grad()
        (state,) = perturber.state_dict()["states"]
        ends.append((weights_of(model), state["history"]))
    for ours, theirs in zip(*[e[0] + e[1] for e in ends], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("convention", ["mean", "sum"])
def test_history_over_several_perturbed_micro_batches_is_the_mean_of_their_own_norms(convention):
    """v <- beta v + mean_k ‖g_k‖², each undone of its loss divisor and lam."""
    model, optimizer, perturber = attached(
        steppe.m_arwp(0.05, beta=0.9, lam=0.2), microbatch_loss=convention
    )
    squares = []
    true = weights_of(model)
    unattached = mlp(dtype=torch.float64)
    for part in range(6):
        x, y = data(part)
        loss = loss_fn(model(x), y)
        eps = [p - t for p, t in zip(weights_of(model), true, strict=True)]
        (loss / 6 if convention == "mean" else loss).backward()
        if part % 2:
            grads = gradient_at(unattached, eps, [part])
            norms = [g.flatten(1).norm(dim=1) if g.dim() > 1 else g.norm() for g in grads]
            squares.append([n**2 for n in norms])
    optimizer.step()
    (state,) = perturber.state_dict()["states"]
    expected = [sum(parts) / 3 for parts in zip(*squares, strict=True)]
    expected = torch.cat([e.reshape(-1) for e in expected])
    torch.testing.assert_close(state["history"][0], expected, rtol=1e-9, atol=1e-14)


def test_steps_that_are_never_complete_raise_and_explain():
    """A loop may step first after one micro-batch; one that never gives enough is refused."""
    model, optimizer, _ = attached(steppe.m_rwp(0.05))
    loss_fn(model(data(0)[0]), data(0)[1]).backward()
    with pytest.warns(UserWarning, match=r"had 1.*\(\(step \+ 1\) % 2 == 0\)"):
        optimizer.step()
    optimizer.zero_grad()
    loss_fn(model(data(1)[0]), data(1)[1]).backward()
    with pytest.raises(
        RuntimeError, match=r"2 passes over consecutive micro-batches.*had 1.*batch1, batch2"
    ):
        optimizer.step()
    strict = {"on_incomplete": "raise"}
    model, optimizer, _ = attached(steppe.lpf_sgd(0.05, samples=4), **strict)
    for part in range(6):
        (loss_fn(model(data(part)[0]), data(part)[1]) / 6).backward()
    with pytest.raises(RuntimeError, match=r"multiple of 4 micro-batches"):
        optimizer.step()


@pytest.mark.parametrize("lam", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("convention", ["mean", "sum"])
def test_a_later_incomplete_step_is_weighed_to_one_and_counted(lam, convention):
    model, optimizer, perturber = attached(steppe.m_rwp(0.05, lam=lam), microbatch_loss=convention)
    for part in range(2):
        loss = loss_fn(model(data(part)[0]), data(part)[1])
        (loss / 2 if convention == "mean" else loss).backward()
    optimizer.step()
    for again in range(2):
        optimizer.zero_grad()
        clean = gradient_at(model, [0] * 4, [2])
        loss_fn(model(data(2)[0]), data(2)[1]).backward()
        before = weights_of(model)
        if again:
            optimizer.step()
        else:
            with pytest.warns(
                UserWarning, match="weighted so that the passes present add up to one"
            ):
                optimizer.step()
        for after, old, grad in zip(weights_of(model), before, clean, strict=True):
            torch.testing.assert_close(after, old - 0.1 * grad, rtol=1e-10, atol=1e-13)
    assert perturber.stats()["incomplete_steps"] == 2


def test_on_incomplete_raise():
    model, optimizer, _ = attached(steppe.m_rwp(0.05), on_incomplete="raise")
    for step in range(2):
        for part in range(2 - step):
            (loss_fn(model(data(part)[0]), data(part)[1]) / 2).backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="this step had 1"):
        optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_pass_that_starts_with_no_gradients_begins_a_new_step(set_to_none):
    """An abandoned step (a skipped one, say) does not shift the turn of the passes."""
    model, optimizer, perturber = attached(steppe.m_rwp(0.05))
    true = weights_of(model)
    for _ in range(3):
        (loss_fn(model(data(0)[0]), data(0)[1]) / 2).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert perturber.stats()["passes_since_step"] == 1
    model(data(0)[0])
    assert equal(true, weights_of(model)), "the first pass of a step is the clean one"
    (loss_fn(model(data(0)[0]), data(0)[1]) / 2).backward()
    model(data(1)[0])
    assert not equal(true, weights_of(model))
    (loss_fn(model(data(1)[0]), data(1)[1]) / 2).backward()
    optimizer.step()
    assert perturber.step == 1


def test_lpf_sgd_takes_a_fresh_eps_for_every_micro_batch():
    model, optimizer, _ = attached(steppe.lpf_sgd(0.05, samples=2))
    true = weights_of(model)
    seen = []
    for part in range(4):
        loss = loss_fn(model(data(part)[0]), data(part)[1]) / 4
        seen.append(weights_of(model))
        loss.backward()
    for i in range(4):
        for j in range(i):
            assert not torch.equal(seen[i][0], seen[j][0])
    optimizer.step()
    assert not equal(true, weights_of(model))


def test_one_pass_methods_accumulate_with_one_eps_per_step():
    model, optimizer, perturber = attached(steppe.rwp(0.05))
    seen = []
    for _ in range(2):
        true = weights_of(model)
        for part in range(3):
            loss = loss_fn(model(data(part)[0]), data(part)[1]) / 3
            seen.append([p - t for p, t in zip(weights_of(model), true, strict=True)])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert equal(seen[0], seen[2])
    assert not equal(seen[2], seen[3])


@pytest.mark.parametrize("method", [steppe.rwp(0.05), steppe.arwp(0.05, eta=5.0)])
def test_lam_one_is_the_unmixed_method_and_lam_zero_is_plain_training(method):
    """Without BatchNorm, with the same schedule and batches and no clipping."""

    def train(method, lam):
        model, optimizer, perturber = attached(method)
        for step in range(4):
            optimizer.zero_grad()
            if lam is None:
                perturber.backward(lambda x, y: loss_fn(model(x), y), data(step))
            else:
                other = data(50 + step)
                parts = (other, data(step)) if lam == 1 else (data(step), other)
                perturber.backward(lambda x, y: loss_fn(model(x), y), *parts)
            optimizer.step()
        return weights_of(model)

    # a mixed method's perturbed pass has the stream of its place, so give the twin the same one
    (only,) = method.passes
    twin = replace(method, passes=(replace(only, stream=1),))
    assert equal(train(twin, None), train(steppe.mixed(method, 1.0), 1))
    assert equal(train(steppe.sgd(), None), train(steppe.mixed(method, 0.0), 0))
