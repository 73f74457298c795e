"""What a problem takes as data, how it shows itself, and who hears of progress."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from steppe.analysis import Problem, landscape, sharpness, top_eigs

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


class Singles:
    """Samples as Python has them: an array and an int."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index].numpy(), int(Y[index])


class Stream(IterableDataset):
    def __iter__(self):
        return zip(X, Y, strict=True)


FORMS = {
    "tensors": (X, Y),
    "a list": [X, Y],
    "arrays": (X.numpy(), Y.numpy()),
    "float64": (X.double().numpy(), Y.numpy()),
    "a dataset": TensorDataset(X, Y),
    "a loader": DataLoader(TensorDataset(X, Y), 5),
    "a subset": Subset(TensorDataset(X, Y), range(12)),
    "single samples": Singles(),
    "a loader of them": DataLoader(Singles(), 5),
    "a stream": Stream(),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_is_the_same_problem(model, form):
    problem = Problem(model, F.cross_entropy, FORMS[form])
    expected = F.cross_entropy(model(X), Y).item()
    assert problem.value() == pytest.approx(expected, rel=1e-6)
    assert problem.samples == 12


def test_tables_of_pandas_are_arrays(model):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X.numpy()), pandas.Series(Y.numpy())
    found = Problem(model, F.cross_entropy, table)
    assert found.value() == Problem(model, F.cross_entropy, (X, Y)).value()


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (X, TypeError, "data must be a pair of tensors or arrays .* got Tensor"),
        (DataLoader(X, 4), TypeError, "gives such pairs, got DataLoader"),
        ({"x": X}, TypeError, "got dict"),
        (5, TypeError, "got int"),
        ((X, Y, Y), TypeError, "got tuple"),
        ((X, Y[:5]), ValueError, "the same number of samples"),
        (Subset(TensorDataset(X, Y), []), ValueError, "the Subset is empty"),
    ],
)
def test_anything_else_is_explained(model, data, error, said):
    with pytest.raises(error, match=said):
        Problem(model, F.cross_entropy, data)


def test_a_problem_shows_itself_in_a_line(model):
    assert repr(Problem(model, F.cross_entropy, (X, Y), bn="batch")) == (
        "<Problem: Linear, 8 of its weights, cross_entropy on 12 samples of shape (3,), "
        "BatchNorm batch>"
    )


@pytest.mark.parametrize(
    "analysis",
    [
        lambda p, heard: landscape(p, n=3, progress=heard),
        lambda p, heard: top_eigs(p, progress=heard),
        lambda p, heard: sharpness(p, steps=2, progress=heard),
    ],
)
def test_a_function_hears_the_part_that_is_done(model, analysis, capsys):
    heard = []
    analysis(Problem(model, F.cross_entropy, (X, Y)), heard.append)
    assert heard[0] == 0
    assert heard[-1] == 1
    assert heard == sorted(heard)
    assert len(heard) > 2
    assert capsys.readouterr().err == ""


def test_arrays_are_numbers_whatever_their_size(model):
    small = Problem(model, F.cross_entropy, (X.numpy().astype(np.float16), Y.numpy()))
    assert small.value() == pytest.approx(F.cross_entropy(model(X), Y).item(), rel=1e-2)
