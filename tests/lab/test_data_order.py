import pytest
import torch

from steppe.lab.data import epoch_order, mix, sequential_order


def test_an_epoch_visits_every_sample_once_and_keeps_the_last_batch():
    order = epoch_order(103, 10, seed=3, epoch=2)
    assert [len(batch) for batch in order] == [10] * 10 + [3]
    assert torch.equal(torch.cat(order).sort().values, torch.arange(103))


def test_drop_last_drops_only_a_partial_batch():
    assert [len(b) for b in epoch_order(103, 10, seed=0, epoch=0, drop_last=True)] == [10] * 10
    assert [len(b) for b in epoch_order(20, 10, seed=0, epoch=0, drop_last=True)] == [10, 10]
    with pytest.raises(ValueError, match="leaves nothing to train on: there are 5"):
        epoch_order(5, 10, seed=0, epoch=0, drop_last=True)


def test_order_is_a_pure_function_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    first = epoch_order(50, 7, seed=1, epoch=4)
    torch.rand(3)
    again = epoch_order(50, 7, seed=1, epoch=4)
    torch.set_rng_state(before)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    epoch_order(50, 7, seed=1, epoch=5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("change", [{"seed": 2}, {"epoch": 1}, {"stream": 1}])
def test_seed_epoch_and_stream_each_give_an_unrelated_order(change):
    base = {"seed": 1, "epoch": 0, "stream": 0}
    one = torch.cat(epoch_order(1000, 100, **base))
    two = torch.cat(epoch_order(1000, 100, **(base | change)))
    # Two independent permutations agree in one place on average; Poisson, so 10 is past 1e-7.
    assert (one == two).sum() < 10


def test_seeds_do_not_collide_in_the_32_bits_that_torch_keeps():
    seeds = {
        mix("order", s, e, t) & 0xFFFFFFFF for s in range(10) for e in range(200) for t in (0, 1)
    }
    assert len(seeds) == 4000


@pytest.mark.parametrize(("n", "batch"), [(0, 4), (4, 0), (-1, 2)])
def test_sizes_below_one_are_refused(n, batch):
    with pytest.raises(ValueError, match="at least 1"):
        epoch_order(n, batch, seed=0, epoch=0)


def test_evaluation_goes_through_in_storage_order():
    assert torch.equal(torch.cat(sequential_order(11, 4)), torch.arange(11))
    assert sequential_order(0, 4) == []


def test_a_second_stream_gives_as_many_steps_and_twice_the_data():
    first, second = (epoch_order(1000, 32, seed=0, epoch=3, stream=s) for s in (0, 1))
    assert [len(b) for b in first] == [len(b) for b in second]
    shared = sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(first, second, strict=True))
    # Two independent batches of 32 share 32 * 32 / 1000 samples on average, 32.8 over an epoch.
    assert shared < 32.8 + 5 * 32.8**0.5
