"""What `compare` and `train` take from Python, and what they say to anything else."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import steppe
from steppe.lab import Config, Event, LabError, Sources, compare, sweep, train
from steppe.lab.data import epoch_order, wrap
from steppe.lab.specs import as_spec

QUICK = {"steps": 3, "batch": 16, "eval_every": 0}
DRAWS = torch.Generator().manual_seed(0)
X = torch.randn(60, 4, generator=DRAWS)
CLASSES = (X[:, 0] > 0).long()
NUMBERS = X[:, 0] + X[:, 1]
PAIRS = ((X[:40], CLASSES[:40]), (X[40:], CLASSES[40:]))


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Pairs(Dataset):
    """A dataset that tells nothing but its samples."""

    classes = ("no", "yes")

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return X[self.rows[index]], int(CLASSES[self.rows[index]])


class Mappings(Pairs):
    def __getitem__(self, index):
        return dict(zip("xy", super().__getitem__(index), strict=True))


ONE_HOT = (X, nn.functional.one_hot(CLASSES))


def compared(model, data, methods=("sgd",), **options):
    given = {"seeds": 1, "config": QUICK, "store": None, "progress": False}
    return compare(model, data, methods, **{**given, **options})


FORMS = {
    "pairs of tensors": PAIRS,
    "pairs of arrays": tuple((x.numpy().astype(np.float64), y.numpy()) for x, y in PAIRS),
    "a column of targets": tuple((x, y.unsqueeze(1)) for x, y in PAIRS),
    "lists": [[x.tolist(), y.tolist()] for x, y in PAIRS],
    "datasets": tuple(TensorDataset(x, y) for x, y in PAIRS),
    "loaders": tuple(DataLoader(TensorDataset(x, y), 8, shuffle=True) for x, y in PAIRS),
    "subsets": (
        Subset(TensorDataset(X, CLASSES), range(40)),
        Subset(TensorDataset(X, CLASSES), range(40, 60)),
    ),
    "own datasets": (Pairs(range(40)), Pairs(range(40, 60))),
    "loaders of own datasets": (
        DataLoader(Pairs(range(40)), 8),
        DataLoader(Pairs(range(40, 60)), 8),
    ),
    "validation too": (PAIRS[0], PAIRS[1], PAIRS[1]),
    "a function of the seed": lambda seed: PAIRS,
}


@pytest.fixture(scope="module")
def expected():
    return compared(net, PAIRS).rows[0].results[0].metrics["test"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_is_the_same_run(form, expected):
    found = compared(net, FORMS[form]).rows[0].results[0]
    assert found.metrics["test"] == expected


def test_tables_of_pandas_are_arrays(expected):
    pandas = pytest.importorskip("pandas")
    tables = [(pandas.DataFrame(x.numpy()), pandas.Series(y.numpy())) for x, y in PAIRS]
    assert compared(net, tables).rows[0].results[0].metrics["test"] == expected


def test_random_split_divides_one_dataset():
    parts = random_split(TensorDataset(X, CLASSES), [40, 20], torch.Generator().manual_seed(0))
    assert compared(net, parts).example.metric == "accuracy"


def test_floats_mean_regression():
    data = ((X[:40], NUMBERS[:40].double().numpy()), (X[40:], NUMBERS[40:]))
    found = compared(lambda: nn.Linear(4, 1), data)
    assert found.example.metric == "rmse"


def test_a_loaders_collate_function_is_kept():
    def doubled(samples):
        x, y = torch.utils.data.default_collate(samples)
        return 2 * x, y

    loaders = [DataLoader(TensorDataset(x, y), 8, collate_fn=doubled) for x, y in PAIRS]
    twice = tuple((2 * x, y) for x, y in PAIRS)
    found, wanted = (compared(net, d).rows[0].results[0].metrics for d in (loaders, twice))
    assert found == wanted


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


MISTAKES = [
    (net(), PAIRS, "got a Sequential: every run starts from new weights"),
    (lambda size: net(), PAIRS, "the model function takes size, but is called without arguments"),
    (lambda: 5, PAIRS, "must return a torch.nn.Module, got int"),
    (5, PAIRS, "a name or a function that makes a model, got int"),
    (net, (X, CLASSES), r"a training and a test split: \(\(x_train, y_train\)"),
    (net, TensorDataset(X, CLASSES), "got TensorDataset. torch.utils.data.random_split divides"),
    (net, DataLoader(TensorDataset(X, CLASSES)), "got DataLoader. torch.utils.data.random_split"),
    (net, 5, "got int"),
    (net, ((X[:9], CLASSES[:8]), PAIRS[1]), "must have one length, got 9 and 8"),
    (net, ((X, np.array(["a"] * 60)), PAIRS[1]), "must be numbers, got ndarray"),
    (net, (Stream(), Stream()), "got Stream"),
    (net, (DataLoader(Stream()), PAIRS[1]), "a DataLoader's Stream would be ignored"),
    (
        net,
        (DataLoader(Pairs(range(9)), sampler=WeightedRandomSampler([1.0] * 9, 9)), PAIRS[1]),
        "a DataLoader's WeightedRandomSampler would be ignored",
    ),
    (net, ((X, X), (X, X, X)), "a split must be a pair"),
    (net, (PAIRS[0], (X[:0], CLASSES[:0])), "the test split is empty"),
    (net, (Mappings(range(9)), Mappings(range(9))), r"must be pairs \(x, y\), got a dict"),
    (net, ((X, 2 * CLASSES - 1), PAIRS[1]), "count from 0 to .* got -1"),
    (
        net,
        (ONE_HOT, ONE_HOT),
        r"cannot take outputs of shape \(2, 2\) and targets of shape \(2, 2\)",
    ),
    (
        lambda: nn.Sequential(net(), nn.Flatten(0)),
        PAIRS,
        r"gives Tensor \(4,\), but own data has 2",
    ),
]


@pytest.mark.parametrize(("model", "data", "said"), MISTAKES, ids=[m[2][:30] for m in MISTAKES])
def test_mistakes_are_explained(model, data, said):
    with pytest.raises(LabError, match=said):
        compared(model, data)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"methods": "sgd"}, r"methods must be a list such as \["),
        ({"methods": ["sgd"], "seeds": "two"}, "seeds must be their number or a list.*got 'two'"),
        ({"methods": ["sgd"], "seeds": [7, 8, 7]}, r"seeds must differ: .* Got \[7, 8, 7\]"),
        ({"methods": ["sgd"], "seeds": 2.5}, "seeds must be their number or a list.*got 2.5"),
    ],
)
def test_mistakes_in_methods_and_seeds_are_explained(options, said):
    with pytest.raises(LabError, match=said):
        compare(**options, config=Config(steps=2), store=None, progress=False)


def test_data_that_are_not_finite_are_not_blamed_on_the_learning_rate():
    bad = X.clone().fill_(float("nan")), CLASSES
    result = compare(net, (bad, bad), ["sgd"], seeds=1, config=QUICK, store=None, progress=False)
    with pytest.raises(LabError, match="look for values that are not finite in the data"):
        str(result)


def test_values_that_are_not_finite_later_in_the_data_are_named_beside_the_learning_rate():
    order = epoch_order(40, 16, seed=0, epoch=0)
    some = X.clone()
    some[order[1][0]] = float("nan")
    with pytest.raises(LabError, match="Lower it, or look for values that are not finite"):
        str(compared(net, ((some[:40], CLASSES[:40]), PAIRS[1])))


def test_a_last_batch_of_one_is_explained():
    with pytest.raises(
        LabError, match=r"one sample, .*BatchNorm .*\(40 samples in batches of 39\)"
    ):
        compared(
            lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)),
            PAIRS,
            config={**QUICK, "batch": 39},
        )


def test_classes_of_floats_are_explained():
    floats = tuple((x, y.float()) for x, y in PAIRS)
    with pytest.raises(LabError, match=r"float32 targets. Give whole numbers, y.long\(\)"):
        compared(net, floats, task="classification")


def test_names_may_be_long(tmp_path):
    named = wrap(*PAIRS, name="é" * 300)
    found = compared(net, named, store=tmp_path, robustness=False)
    assert found.rows[0].results[0].folder.is_dir()


def test_outputs_that_are_not_numbers_are_wrong():
    bad = torch.full((5, 4), float("nan"))
    found = compared(net, (PAIRS[0], (bad, torch.zeros(5, dtype=torch.int64))))
    assert found.rows[0].results[0].metrics["test"]["accuracy"] == 0


def test_sequences_and_targets_that_the_loss_ignores():
    class Tokens(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Embedding(3, 8), nn.Linear(8, 3))

        def forward(self, x):
            return super().forward(x).transpose(1, 2)

    class Sentences(Dataset):
        targets = torch.randint(3, (40, 6), generator=DRAWS)

        def __len__(self):
            return len(self.targets)

        def __getitem__(self, index):
            return self.targets[index], self.targets[index]

    class Padded(Sentences):
        targets = Sentences.targets.clone().index_fill_(1, torch.arange(2, 6), -100)

        def __getitem__(self, index):
            return Sentences.targets[index], self.targets[index]

    config = {**QUICK, "steps": 60, "lr": 1.0}
    found = compared(Tokens, (Sentences(), Padded()), config=config)
    metrics = found.rows[0].results[0].metrics["test"]
    assert metrics["accuracy"] == 100
    assert metrics["nll"] == pytest.approx(metrics["loss"], rel=1e-3)


def test_a_config_may_be_a_mapping():
    result = train({**QUICK, "train_size": 50}, store=None, progress=False)
    assert (result.steps, result.config.train_size) == (3, 50)
    points = sweep({**QUICK, "train_size": 50}, {"lr": [0.1]}, store=None, progress=False).points
    assert len(points) == 1
    with pytest.raises(LabError, match="No setting is called 'epoch'. Did you mean epochs"):
        compared(net, PAIRS, config={"epoch": 3})
    with pytest.raises(LabError, match="config must be a Config or a mapping, got list"):
        train([("steps", 3)], store=None)


METHODS = [
    (steppe.sgd(), "sgd"),
    (steppe.arwp(), "arwp"),
    (steppe.arwp(ratio=0.6, eta=1.0), "arwp:ratio=0.6,schedule=constant,eta=1.0"),
    (steppe.rwp(steppe.cosine_increase(0, 0.01)), "rwp:sigma=0.01"),
    (steppe.rwp(steppe.linear(0, 0.01)), "rwp:sigma=0.01,schedule=linear"),
    (steppe.rwp(0.01, isotropic=True), "rwp:sigma=0.01,schedule=constant,isotropic=true"),
    (steppe.arwp(0.01, elementwise=True), "arwp:sigma=0.01,schedule=constant,elementwise=true"),
    (steppe.m_rwp(), "m-rwp"),
    (steppe.m_arwp(0.015, lam=0.3, same_batch=True), "m-arwp:sigma=0.015,lam=0.3,same_batch=true"),
    (steppe.sam(), "sam"),
    (steppe.sam(0.1, m=8), "sam:rho=0.1,m=8"),
    (steppe.sam(same_batch=False), "sam:same_batch=false"),
    (steppe.asam(0.2, eta=0.1), "asam:rho=0.2,eta=0.1"),
    (steppe.lpf_sgd(0.01, samples=4), "lpf-sgd:sigma=0.01,samples=4"),
    (steppe.antithetic_rwp(ratio=0.2), "antithetic-rwp:ratio=0.2"),
    (steppe.msam(0.5, momentum=0.8), "msam:rho=0.5,momentum=0.8"),
]


@pytest.mark.parametrize(("method", "text"), METHODS, ids=[text for _, text in METHODS])
def test_a_method_is_the_text_that_makes_it(method, text):
    spec = as_spec(method)
    assert str(spec) == text
    assert as_spec(text) == spec
    assert spec.build(steps=7) == method.with_steps(7)


def test_a_constant_schedule_is_a_number():
    constant = as_spec(steppe.rwp(steppe.constant(0.01)))
    assert constant == as_spec(steppe.rwp(0.01)) == as_spec("rwp:sigma=.01,schedule=constant")


def test_methods_as_objects_and_as_texts_are_the_same_runs():
    objects = compared(net, PAIRS, [steppe.sgd(), steppe.sam(0.1)])
    texts = compared(net, PAIRS, ["sgd", "sam:rho=.1"])
    assert [r.spec for r in objects.rows] == [r.spec for r in texts.rows]
    for one, other in zip(objects.rows, texts.rows, strict=True):
        assert one.results[0].metrics == other.results[0].metrics


OWN = steppe.Method("mine", (steppe.Pass(steppe.Gaussian(0.1)),))


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (OWN, "mine cannot be trained by the lab"),
        (steppe.Method("rwp", (steppe.Pass(steppe.Gaussian(0.1), sign=-1.0),)), "rwp cannot be"),
        (steppe.rwp(lambda step: 0.1), "in the lab a strength is a number"),
        (steppe.rwp(steppe.linear(0.1, 0.2)), "in the lab a strength is a number"),
        (steppe.arwp, 'a method is a text such as "arwp:ratio=.6" or an object .* got arwp'),
        (5, "got int"),
    ],
)
def test_methods_the_lab_cannot_make(method, said):
    with pytest.raises(LabError, match=said):
        as_spec(method)


@pytest.mark.parametrize("grid", ["rwp", {"lr": 0.1}, {"model": "mlp"}])
def test_a_grid_names_lists(grid):
    with pytest.raises(LabError, match="grid names lists of values"):
        sweep(QUICK, grid, store=None, progress=False)


def test_progress_is_given_to_a_function():
    events: list[Event] = []
    compared(net, PAIRS, ["sgd", "rwp"], progress=events.append)
    assert {event.run for event in events} == {"sgd seed 0", "rwp seed 0"}
    last = [event for event in events if event.done]
    assert [(event.step, event.steps, event.done) for event in last] == [(3, 3, "finished")] * 2
    train(Config(**QUICK), sources=Sources(), store=None, progress=events.append)
    assert events[-1].loss is not None


def test_a_comparison_prints_plots_and_reports_itself(tmp_path):
    found = compared(net, PAIRS, ["sgd", "sam:rho=.1", "sam:rho=.2"], seeds=2, store=tmp_path)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("own data, net, 3 steps")
    assert [row.label for row in found.rows] == ["SGD", "SAM (rho 0.1)", "SAM (rho 0.2)"]
    assert "accuracy % ↑" in str(found)
    assert "NLL ↓" in str(found)
    assert repr(found) == (
        "<Comparison of SGD, SAM (rho 0.1), SAM (rho 0.2) on 2 seeds; print it for the table>"
    )
    assert '<div class="steppe-table">' in found._repr_html_()
    page = found.report(tmp_path / "page.html")
    assert "SAM (rho 0.2)" in page.read_text()
    with pytest.raises(LabError, match="must have a name that ends in .html"):
        found.report(tmp_path / "page.pdf")
    pytest.importorskip("matplotlib")
    left, right = found.plot().axes
    assert "higher is better" in left.get_xlabel()
    assert "minus SGD" in right.get_xlabel()
