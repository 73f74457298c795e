"""Tables: what a column becomes, and what a wrong file is told."""

import pytest
import torch

from steppe.lab import data

ROWS = 40


def written(path, delimiter=","):
    """size, colour, price: a number with a gap, a text, and numbers to predict."""
    lines = [delimiter.join(("size", "colour", "price", "grade"))]
    for i in range(ROWS):
        size = "" if i == 3 else str(i)
        cells = (size, ("red", "blue")[i % 2], f"{1.5 * i + 0.25}", str(i % 3))
        lines.append(delimiter.join(cells))
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def file(tmp_path):
    return written(tmp_path / "things.csv")


def everything(split):
    return next(split.batches([torch.arange(len(split))], augment_seed=None))


def test_numbers_are_standardised_by_the_training_rows(file):
    found = data.load(file, target="price")
    assert (found.task, found.classes, found.shape) == ("regression", None, (4,))
    assert (len(found.train), len(found.test)) == (32, 8)
    x, y = everything(found.train)
    assert y.mean().item() == pytest.approx(0, abs=1e-6)
    assert y.std(unbiased=False).item() == pytest.approx(1, abs=1e-5)
    sizes = torch.cat([x[:, 0], everything(found.test)[0][:, 0]])
    assert int((sizes == 0).sum()) >= 1, "the missing number is the mean"
    # size, colour blue or red, grade 0 to 2 as one number
    assert set(x[:, 1].tolist()) == set(x[:, 2].tolist()) == {0.0, 1.0}
    assert "8 of them test" in found.note
    assert "price in standard deviations of" in found.note
    assert "1 missing numbers set to the mean" in found.note


def test_the_kind_of_target_decides_the_task(file):
    assert data.load(file, target="colour").classes == 2
    graded = data.load(file, target="grade")
    assert (graded.task, graded.classes) == ("classification", 3)
    shares = everything(graded.test)[1].bincount().tolist()
    assert sorted(shares) == [2, 3, 3], "the test split has the classes' shares"
    assert data.load(file, target="grade", task="regression").task == "regression"
    assert data.load(file, target="price", without="size,grade").shape == (2,)


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_other_delimiters(tmp_path, delimiter, file):
    other = written(tmp_path / "other.tsv", delimiter)
    first, second = (everything(data.load(f, target="grade").train) for f in (file, other))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_the_seed_draws_the_split_and_nothing_else_does(file):
    first, again = (everything(data.load(file, target="price", seed=0).test) for _ in range(2))
    other = everything(data.load(file, target="price", seed=1).test)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        (None, {}, "has the columns size, colour, price, grade: say which one to predict"),
        (None, {"target": "pricee"}, "Did you mean price?"),
        (None, {"target": "price", "without": "colur"}, "Did you mean colour?"),
        (None, {"target": "price", "test": 1.5}, "test must be between 0 and 1, got 1.5"),
        (None, {"target": "colour", "task": "regression"}, "needs numbers, but 'colour' has 'red'"),
        (
            None,
            {"target": "size"},
            "the target 'size' is missing in 1 rows, the first of them row 4",
        ),
        (None, {"target": "price", "sheet": 1}, "has no option 'sheet'"),
        ("a,b\n1,2\n3\n", {"target": "b"}, "line 3 of .* has 1 cells, but there are 2 columns"),
        ("1,2\n3,4\n5,6\n", {"target": "2"}, "must name the columns"),
        ("a,b\n", {"target": "b"}, "at least two rows"),
        ("a,b\n1,x\n2,x\n", {"target": "b"}, "has a single value, 'x'"),
        ("b\n1\n2\n3\n", {"target": "b"}, "no column besides the target"),
    ],
)
def test_mistakes(tmp_path, file, content, options, said):
    if content is not None:
        (tmp_path / "things.csv").write_text(content)
    with pytest.raises(ValueError, match=said):
        data.load(file, **options)


@pytest.mark.parametrize("odd", ["-", "inf", "1,5"])
@pytest.mark.parametrize("target", ["price", "kind"])
def test_numbers_with_a_cell_that_is_none_are_no_categories(tmp_path, odd, target):
    rows = "\n".join(f"{odd if i == 3 else i / 4};{i % 2}" for i in range(40))
    (tmp_path / "prices.csv").write_text(f"price;kind\n{rows}\n")
    with pytest.raises(ValueError, match=f"'price' has numbers, but '{odd}' in row 4"):
        data.load(str(tmp_path / "prices.csv"), target=target)


def test_a_column_of_names_is_refused(tmp_path):
    rows = "\n".join(f"name {i},{i % 2}" for i in range(60))
    (tmp_path / "people.csv").write_text(f"who,sex\n{rows}\n")
    with pytest.raises(
        ValueError, match=r"'who' has 60 different texts.*data_options.without='who'"
    ):
        data.load(str(tmp_path / "people.csv"), target="sex")
