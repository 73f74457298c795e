import json

import pytest

from steppe.lab.config import Config, as_config, read_config, settings
from steppe.lab.errors import LabError


def test_settings_are_read_by_the_type_of_their_field():
    changed = Config().override(
        {
            "epochs": "3",
            "steps": "none",
            "train-size": "1e2",
            "channels_last": "true",
            "augment": "flip,cutout:size=8,probability=1",
            "model_options.dropout": ".1",
            "data_options.downsample": "16",
        }
    )
    assert changed.epochs == 3.0
    assert changed.steps is None
    assert changed.train_size == 100
    assert changed.channels_last is True
    assert changed.augment == ("flip", "cutout:size=8,probability=1")
    assert changed.model_options == {"dropout": 0.1}
    assert changed.data_options == {"downsample": 16}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"epochz": 3}, "No setting is called 'epochz'. Did you mean epochs?"),
        ({"epochs": "many"}, "epochs must be a number, got 'many'"),
        ({"batch": "1.5"}, "batch must be a whole number, got '1.5'"),
        ({"seed": "true"}, "seed must be a whole number, got 'true'"),
        ({"optimizer": "rmsprop"}, "optimizer must be sgd or adam or adamw, got 'rmsprop'"),
        ({"lr.x": "1"}, "lr takes one value"),
        ({"lr": "nan"}, "lr must be above 0, got nan"),
        ({"label_noise": 1}, "label_noise must be in [0, 1), got 1.0"),
        ({"threads": 0}, "threads must be above 0, got 0"),
    ],
)
def test_a_wrong_setting_says_what_and_what_next(given, said):
    with pytest.raises(LabError) as error:
        Config().override(given)
    assert said in str(error.value)


def test_identity_has_the_version_of_the_noise(monkeypatch):
    before, experiment = Config().identity, Config().experiment
    monkeypatch.setattr("steppe.noise.VERSION", 99)
    assert Config().identity != before
    assert Config().experiment == experiment


def test_identity_is_of_what_decides_the_weights():
    base = Config(epochs=30)
    assert base.identity == Config(epochs=30.0, root="/elsewhere", workers=4, keep=9).identity
    changes = ({"seed": 1}, {"threads": 2}, {"method": "rwp"}, {"drop_last": True}, {"code": "x"})
    for change in changes:
        assert base.replace(**change).identity != base.identity
    assert base.replace(seed=1, threads=2, device="cuda").experiment == base.experiment
    assert base.replace(epochs=29).experiment != base.experiment


def test_a_config_survives_its_file(tmp_path):
    config = Config(augment=("flip",), model_options={"depth": 2}, steps=7, method="arwp:eta=1")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_dict()))
    assert read_config(file) == config
    assert as_config(config.to_dict()) == config


def test_toml(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('method = "sam:rho=.1"\nepochs = 3\n[model_options]\ndepth = 2\n')
    config = read_config(file)
    assert (config.method, config.epochs, config.model_options) == ("sam:rho=.1", 3.0, {"depth": 2})
    file.write_text("epochs = = 3")
    with pytest.raises(LabError, match="not valid TOML"):
        read_config(file)


def test_pairs():
    assert settings(("lr=.1", "method=arwp:eta=1")) == {"lr": ".1", "method": "arwp:eta=1"}
    with pytest.raises(LabError, match="NAME=VALUE"):
        settings(("lr",))
