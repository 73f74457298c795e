"""Robustness against known answers: margins, no change at all, everything pruned, NaN."""

import copy
import json
import math
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import steppe
from steppe.analysis import (
    Blur,
    Contrast,
    InputNoise,
    Problem,
    Pruning,
    Result,
    Rounding,
    WeightNoise,
    ensemble,
    robustness,
)
from steppe.analysis.robustness import changed_weights
from steppe.analysis.robustness_result import moved_words

from .known import settled_net


def linear(rows, x, y):
    model = nn.Linear(len(rows[0]), len(rows), bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor(rows))
    return Problem(model, F.cross_entropy, (x.double(), y))


def conv_problem(**options):
    model, data = settled_net("conv")
    return Problem(model, F.cross_entropy, data, **options)


# Filters [1, .45, .2] and [.9, .5, -.3]; the samples are the unit vectors, of classes 0, 1, 0. The
# margins are .1, .05 and .5.
MARGINS = ([[1.0, 0.45, 0.2], [0.9, 0.5, -0.3]], torch.eye(3), torch.tensor([0, 1, 0]))


@pytest.mark.parametrize(
    ("bits", "right"),
    [
        # 2 bits: [1, 0, 0] and [.9, .9, 0]: the third is a tie, which goes to class 0.
        (2, 3),
        # 3 bits, steps 1/3 and .3: [1, 1/3, 1/3] and [.9, .6, -.3].
        (3, 3),
        # 4 bits, steps 1/7 and .9/7: 3/7 = .429 and 4 * .9/7 = .514.
        (4, 3),
    ],
)
def test_accuracy_after_rounding_a_linear_model(bits, right):
    result = robustness(linear(*MARGINS), [Rounding(bits)])
    assert result.accuracy[0].tolist() == [1.0, right / 3]


def test_rounding_loses_exactly_the_samples_whose_margin_it_eats():
    # 3 bits, step 1/3: .45 becomes 1/3, .4 too, and the tie goes to class 0.
    rows = [[1.0, 0.4], [1.0, 0.45]]
    problem = linear(rows, torch.eye(2)[[1, 1, 1, 0]], torch.tensor([1, 1, 1, 0]))
    result = robustness(problem, [Rounding(3), Rounding(8)])
    assert result.accuracy[0].tolist() == [1.0, 0.25, 1.0]
    margin = torch.tensor([0.05, 0.0, 0.4488189 - 0.4015748])
    expected = 0.75 * F.softplus(-margin) + 0.25 * math.log(2)
    torch.testing.assert_close(result.loss[0].float(), expected, rtol=1e-5, atol=1e-6)


def test_accuracy_under_weight_noise_is_the_normal_distribution_of_the_margin():
    # Samples are unit vectors, so their margins move independently of each other.
    d, ratio, draws = 40, 0.5, 50
    rows = [[0.6] * d, [0.5] * d]
    problem = linear(rows, torch.eye(d), torch.zeros(d, dtype=torch.long))
    result = robustness(problem, [WeightNoise(ratio)], draws=draws)
    # std of an entry: ratio ‖w‖ / sqrt(d) = ratio * |entry|.
    z = 0.1 / (ratio * math.hypot(0.6, 0.5))
    expected = 0.5 * (1 + math.erf(z / math.sqrt(2)))
    error = math.sqrt(expected * (1 - expected) / (2 * draws * d))
    assert abs(result.accuracy[0, 1].item() - expected) < 4 * error
    # The spread of one draw's accuracy is that of d independent samples.
    assert result.spread()[0, 1].item() == pytest.approx(error * math.sqrt(2 * draws), rel=0.3)


def test_the_noise_that_is_borne_lies_below_where_the_margin_is_lost():
    # ‖w‖ entries are 1 and .5; the margin .5 is lost in a share Phi(-.5 / (ratio sqrt(1.25))).
    problem = linear([[1.0] * 200, [0.5] * 200], torch.eye(200), torch.zeros(200, dtype=torch.long))
    ratios = [0.1, 0.2, 0.3, 0.6]
    result = robustness(problem, [WeightNoise(r) for r in reversed(ratios)], draws=8)
    lost = [0.5 * math.erfc(0.5 / (r * math.sqrt(1.25) * math.sqrt(2))) for r in ratios]
    assert lost[1] < 0.02 < 0.05 < lost[2] < 0.08 < lost[3]
    assert result.noise_borne(drop=0.03) == 0.2
    assert result.noise_borne(drop=0.1, confidence=0.99) == 0.3
    assert result.noise_borne(drop=0.9) == 0.6
    assert result.noise_borne(drop=-0.01) == 0.0
    with pytest.raises(ValueError, match="at least 2 draws, got 1"):
        robustness(problem, [WeightNoise(0.1)], draws=1).noise_borne()
    with pytest.raises(ValueError, match="weight noise among the changes, and none was measured"):
        robustness(problem, [Rounding(4)]).noise_borne()
    with pytest.raises(ValueError, match=r"confidence must be in \[0, 1\), got 95"):
        result.noise_borne(confidence=95)
    with pytest.raises(TypeError, match="drop must be a number, got 'a'"):
        result.noise_borne(drop="a")
    with pytest.raises(ValueError, match="statistics must be one of .* got 'batch'"):
        result.noise_borne(statistics="batch")


NOTHING = [
    Pruning(0.0),
    Pruning(0.0, "global"),
    WeightNoise(0.0),
    InputNoise(0.0),
    Blur(0.0),
    Contrast(1.0),
]


def test_no_change_gives_the_plain_result_bit_for_bit():
    problem = conv_problem()
    result = robustness(problem, NOTHING, draws=1)
    with problem.replica() as replica:
        loss, accuracy = replica.evaluate()
    assert (result.loss == loss).all()
    assert (result.accuracy == accuracy).all()
    assert result.loss[0, 0].item() == problem.value()


def test_everything_pruned_leaves_chance():
    x, y = torch.randn(50, 4), torch.arange(50) % 5
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 5, bias=False))
    for scope in ("tensor", "global"):
        result = robustness(Problem(model, F.cross_entropy, (x, y)), [Pruning(1.0, scope)])
        assert result.loss[0, 1].item() == pytest.approx(math.log(5), rel=1e-6)
        assert result.accuracy[0, 1].item() == 0.2
        assert result.ece[0, 1].item() == pytest.approx(0, abs=1e-6)  # says .2, is right in .2


def test_a_constant_model_loses_nothing():
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    data = torch.randn(30, 4), torch.randint(3, (30,))
    result = robustness(Problem(model, F.cross_entropy, data))
    assert (result.accuracy == result.accuracy[0, 0]).all()
    torch.testing.assert_close(result.loss, result.loss[:, :1].expand_as(result.loss))
    assert result.noise_borne(drop=0.0) == 0.5


def test_a_nan_is_kept_and_counts_as_wrong(tmp_path):
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight[0, 0] = math.nan
    data = torch.randn(30, 4), torch.zeros(30, dtype=torch.long)
    result = robustness(Problem(model, F.cross_entropy, data))
    assert result.loss[0, 0].isnan()
    assert result.accuracy[0, 0].item() == 0
    again = Result.load(result.save(tmp_path / "nan.npz"))
    assert "nan" in again.table()
    none, *_ = json.loads(json.dumps(result.to_dict(), allow_nan=False))["changes"]
    assert none["as is"]["loss"] == {"mean": None, "spread": None, "draws": [None]}


def test_recalibrated_numbers_are_those_of_training_batches():
    """Against a copy of the model on which the same was done by hand."""
    model, (x, y) = settled_net("conv", samples=32)
    other = torch.randn(24, 1, 6, 6).double() * 2 + 1
    batches = [(other[:10], None), (other[10:20], None), (other[20:], None)]
    problem = Problem(model, F.cross_entropy, (x, y))
    before = copy.deepcopy(model.state_dict())
    result = robustness(problem, [Rounding(3)], recalibrate=iter(batches), recalibration_samples=15)
    assert result.statistics == ("as is", "recalibrated")
    assert result.recalibration_samples == 20  # whole batches
    by_hand = copy.deepcopy(model)
    state = copy.deepcopy(before)
    for name in changed_weights(model):
        (state[name],) = Rounding(3).weights([state[name]], None)
    for weights, c in ((before, 0), (state, 1)):
        by_hand.load_state_dict(weights)
        with torch.no_grad():
            as_is = F.cross_entropy(by_hand(x), y).item()
            steppe.recompute_norm_stats(by_hand, batches[:2])
            fresh = F.cross_entropy(by_hand(x), y).item()
        assert result.loss[:, c].tolist() == pytest.approx([as_is, fresh], rel=1e-9)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_the_table_says_when_recalibrating_alone_moves_the_model():
    problem = conv_problem()
    x = problem.data[0]
    same = robustness(problem, [Rounding(4)], recalibrate=[x])
    other = robustness(problem, [Rounding(4)], recalibrate=[5 * x + 3])
    assert abs(other.recalibration_shift) > 0.005
    assert "augmentation" in other.table()
    assert f"{100 * same.recalibration_shift:+.2f} points" in same.table()
    alone = robustness(problem, [Rounding(4)])
    assert math.isnan(alone.recalibration_shift)
    assert "recalibrate=" in alone.table()
    assert moved_words({"A": same.recalibration_shift, "B": math.nan}) == ""
    shift = other.recalibration_shift
    said = f"moves the unchanged model by B {100 * shift:+.2f} points. Compare"
    assert said in moved_words({"A": 0.005, "B": shift})


def test_where_there_is_nothing_to_recalibrate_it_says_so():
    model, data = settled_net("attention")
    with pytest.warns(UserWarning, match="recalibrate= does nothing.*the model has none"):
        result = robustness(Problem(model, F.cross_entropy, data), recalibrate=[data[0]])
    assert result.statistics == ("as is",)
    assert "BatchNorm" not in result.table()
    problem = conv_problem(bn="batch")
    with pytest.warns(UserWarning, match='recalibrate= does nothing.*bn="batch" uses none'):
        result = robustness(problem, [Rounding(4)], recalibrate=[problem.data[0]])
    assert result.statistics == ("batch",)


def test_batch_statistics_are_named_and_the_samples_own_are_refused():
    assert robustness(conv_problem(bn="batch"), [Rounding(4)]).statistics == ("batch",)
    with pytest.raises(ValueError, match="are not those of training.*recalibrate=train_loader"):
        robustness(conv_problem(bn="recalibrate"))
    with pytest.raises(ValueError, match="recalibrate holds no batches"):
        robustness(conv_problem(), recalibrate=[])


def test_regression_has_a_loss_and_no_accuracy():
    model = nn.Linear(3, 1)
    problem = Problem(model, F.mse_loss, (torch.randn(20, 3), torch.randn(20, 1)))
    result = robustness(problem)
    assert result.accuracy.isnan().all()
    assert result.loss.isfinite().all()
    assert "accuracy" not in result.table()
    with pytest.raises(ValueError, match="targets are not classes"):
        result.noise_borne()


class Named(nn.Module):
    """A classifier that gives its logits by name, as those of transformers do."""

    def __init__(self, inner, kind):
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, x):
        return self.kind(logits=self.inner(x))


@pytest.mark.parametrize("kind", [dict, types.SimpleNamespace])
def test_logits_that_have_a_name_are_found(kind):
    model, data = settled_net("conv")
    plain = Problem(model, F.cross_entropy, data)

    def loss(output, y):
        return F.cross_entropy(output["logits"] if kind is dict else output.logits, y)

    named = Problem(Named(model, kind), loss, data)
    changes = [Rounding(3), WeightNoise(0.3)]
    one, other = (robustness(p, changes, draws=2) for p in (plain, named))
    torch.testing.assert_close(one.values, other.values, rtol=0, atol=0, equal_nan=True)
    assert one.noise_borne() == other.noise_borne()
    one, other = (ensemble(p, ratio=0.2, samples=2) for p in (plain, named))
    assert torch.equal(one.averaged, other.averaged)


class Tokens(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.mix(self.embedding(x) + self.positions)).movedim(-1, 1)


def test_ignored_targets_count_neither_as_right_nor_as_wrong():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 5), nn.Flatten(1), nn.Unflatten(1, (4, 5)))
    model.append(nn.Linear(5, 5))
    model.forward = lambda x: nn.Sequential.forward(model, x).transpose(1, 2)
    x = torch.randint(5, (8, 4))
    y = model(x).argmax(1)
    y[:, 2:] = -100
    y[0, :2] = (y[0, :2] + 1) % 5  # two of the 16 that count are wrong
    result = robustness(Problem(model, F.cross_entropy, (x, y)), [Rounding(32)])
    assert result.accuracy[0].tolist() == [14 / 16, 14 / 16]
    everything = Problem(model, lambda out, y: out.mean(), (x, torch.full_like(y, -100)))
    assert robustness(everything, []).accuracy.isnan().all()


def test_embeddings_positions_and_vectors_stay_unless_asked_for():
    assert changed_weights(Tokens()) == ["mix.weight", "head.weight"]
    assert changed_weights(Tokens(tied=True)) == ["mix.weight"]
    assert len(changed_weights(Tokens(), "all")) == 5
    tokens = torch.randint(11, (6, 5))
    problem = Problem(Tokens(), F.cross_entropy, (tokens, tokens))
    result = robustness(problem)
    assert not {"input noise", "blur", "contrast"} & set(result.kinds)
    assert result.changed == ("mix.weight", "head.weight")
    everything = robustness(problem, [Rounding(2)], include="all")
    assert everything.loss[0, 1] != robustness(problem, [Rounding(2)]).loss[0, 1]
    with pytest.raises(ValueError, match="needs inputs of real numbers, got x of shape"):
        robustness(problem, [InputNoise(0.1)])
    with pytest.raises(ValueError, match="no weights to change"):
        robustness(Problem(Tokens(), F.cross_entropy, (tokens, tokens), params=["positions"]))


def test_what_cannot_be_measured_is_refused():
    model, data = settled_net("attention")
    problem = Problem(model, F.cross_entropy, data)
    with pytest.raises(ValueError, match=r"Blur\(pixels=1.0\) needs images"):
        robustness(problem, [Blur(1.0)])
    with pytest.raises(TypeError, match=r"such as Rounding\(4\) or Pruning\(0.5\), got 4"):
        robustness(problem, [4])
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        robustness(problem, draws=0)
    with pytest.raises(TypeError, match="draws must be a whole number, got 1.5"):
        robustness(problem, draws=1.5)
    with pytest.raises(TypeError, match=r"changes must be a list such as \[Rounding\(4\)\]"):
        robustness(problem, Rounding(4))
    for samples in (data[0], torch.utils.data.TensorDataset(*data)):
        with pytest.raises(TypeError, match="recalibrate takes batches, got a Tensor.* of single"):
            robustness(problem, recalibrate=samples)
    with pytest.raises(TypeError, match="recalibrate takes batches, got a int. Give it"):
        robustness(problem, recalibrate=5)
    pictures = [{"image": conv_problem().data[0]}]
    with pytest.raises(ValueError, match=r"cannot run its first batch \(TypeError: .*'image'"):
        robustness(conv_problem(), [Rounding(4)], recalibrate=pictures)
    with pytest.raises(TypeError, match="seed must be an int, got 'a'"):
        robustness(problem, seed="a")
    result = robustness(problem, [Rounding(4)])
    with pytest.raises(TypeError, match=r"place\(\) takes a change such as Rounding\(4\), got 4"):
        result.place(4)
    with pytest.raises(ValueError, match="metric must be one of loss, accuracy, ece, got 'foo'"):
        result.spread("foo")
    with pytest.raises(TypeError, match="amount must be a number, got 'half'"):
        Pruning("half")
    with pytest.raises(ValueError, match='include must be "matrices" or "all", got'):
        robustness(problem, include="some")


def test_the_number_of_forwards_is_counted(capsys):
    problem = conv_problem()
    robustness(problem, [Rounding(4), WeightNoise(0.1)], draws=3, progress=True)
    assert f"robustness: {1 + 1 + 6} forwards" in capsys.readouterr().err
    batches = [problem.data[0]] * 2
    twice = {"recalibrate": batches, "recalibration_samples": 2 * problem.samples}
    robustness(problem, [Rounding(4)], **twice, progress=True)
    assert f"robustness: {2 * (1 + 1 + 2)} forwards" in capsys.readouterr().err


def test_a_result_reads_in_words_and_draws_itself():
    result = robustness(conv_problem(), recalibrate=[conv_problem().data[0]], draws=2)
    assert result.place(Rounding(3)) == result.labels.index("3 bits, per filter")
    assert result.place(Rounding(5)) is None
    assert "| 50 % pruned, global |" in result.table("markdown")
    titles = [axis.get_title() for axis in result.plot().axes]
    assert titles[:3] == ["bits, per filter", "bits, per tensor", "share pruned, per tensor"]
    assert "share pruned, 2:4" in titles
    assert len(titles) == 9
    assert str(result) == result.table()
    assert "blur of 1 pixel" in result.labels


def test_a_change_of_one_size_has_a_panel_too():
    only = robustness(conv_problem(), [Rounding(4)])
    (axis,) = only.plot().axes
    assert (axis.get_title(), len(axis.get_lines()[0].get_xdata())) == ("bits, per filter", 1)
    with pytest.raises(ValueError, match="nothing to draw: no change was measured"):
        robustness(conv_problem(), []).plot()


def test_the_noise_borne_is_in_the_table_and_the_dictionary_for_each_kind_of_statistics():
    problem = conv_problem()
    changes = [Pruning(0.5), WeightNoise(0.0), WeightNoise(3.0)]
    result = robustness(problem, changes, recalibrate=[problem.data[0]], draws=3)
    assert result.borne == {way: result.noise_borne(statistics=way) for way in result.statistics}
    as_is, fresh = (f"{ratio:g} {way}" for way, ratio in result.borne.items())
    assert f"confidence over draws: {as_is}, {fresh}." in result.table()
    known = result.to_dict()
    assert known["noise_borne"] == result.borne
    noise = known["changes"][3]
    assert (noise["label"], known["sizes"][3]) == ("weight noise 3", 3.0)
    assert noise["recalibrated"]["loss"]["mean"] == result.loss[1, 3].item()
    assert noise["as is"]["accuracy"]["spread"] == result.spread()[0, 3].item()
    assert noise["as is"]["ece"]["draws"] == result.values[2, 0, 3].tolist()
    assert len(known["changes"][1]["as is"]["ece"]["draws"]) == 1
    assert robustness(problem, changes[:1]).borne == {}


def test_one_draw_is_two_signs_and_the_table_says_so():
    table = robustness(conv_problem(), [WeightNoise(0.3)], draws=1).table()
    assert "±" in table
    assert "over 1 draw taken with both signs" in table
