import math

import pytest
import torch

from steppe.lab import tasks
from steppe.lab.data import wrap
from steppe.lab.errors import LabError
from steppe.lab.tasks import EVAL_BATCH, evaluate


def test_classification_by_hand():
    task = tasks.get("classification")
    logits = torch.log(torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]]))
    found = task.summary(task.measure(logits, torch.tensor([0, 1, 1])))
    assert found["accuracy"] == pytest.approx(200 / 3)
    assert found["nll"] == pytest.approx(-(math.log(0.9) + math.log(0.4) + math.log(0.8)) / 3)
    # each in a bin of its own: |.9 - 1| + |.6 - 0| + |.8 - 1|, over 3
    assert found["ece"] == pytest.approx(100 * (0.1 + 0.6 + 0.2) / 3, abs=1e-3)


def test_calibration_adds_up_within_a_bin():
    confidence = torch.full((10,), 0.7)
    correct = torch.tensor([1.0] * 7 + [0.0] * 3)
    assert tasks.calibration_error(confidence, correct) == pytest.approx(0, abs=1e-6)


def test_regression_by_hand():
    task = tasks.get("regression")
    outputs, targets = torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 0.0])
    found = task.summary(task.measure(outputs, targets))
    assert found == {"rmse": pytest.approx(math.sqrt(5)), "mae": pytest.approx(2)}
    assert task.loss(outputs, targets) == pytest.approx(5)  # no (2, 1) against (2,) broadcast
    with pytest.raises(LabError, match="one output per target"):
        task.loss(torch.zeros(2, 3), targets)


def test_evaluation_does_not_depend_on_how_batches_fall():
    torch.manual_seed(0)
    x, y = torch.randn(EVAL_BATCH + 37, 4), torch.randint(3, (EVAL_BATCH + 37,))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
    data = wrap((x, y), (x, y))
    found = evaluate(model, data.test, tasks.get("classification"))
    with torch.no_grad():
        outputs = model.eval()(x)
    assert found["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, y)))
    assert found["accuracy"] == pytest.approx(100 * float((outputs.argmax(1) == y).float().mean()))
    few = evaluate(model, data.test, tasks.get("classification"), limit=10)
    assert few["accuracy"] in {10.0 * k for k in range(11)}


def test_names():
    assert tasks.get("regression").metric == "rmse"
    with pytest.raises(LabError, match="Did you mean regression"):
        tasks.get("regresion")
    with pytest.raises(LabError, match=r"must return a steppe\.lab\.Task, got float"):
        tasks.get("time:time")
