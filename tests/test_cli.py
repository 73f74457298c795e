"""The commands, in this process where that is enough and as real processes where it is not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import steppe
from steppe.cli import run

QUICK = ["--steps", "5", "--batch", "64"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def steppe_says(capsys, *arguments, code=0):
    found = run(list(arguments))
    said = capsys.readouterr()
    assert found == code, said.err
    return said.out, said.err


def test_help_and_version(capsys):
    out, _ = steppe_says(capsys, "--help")
    names = ("train", "compare", "sweep", "recipes", "runs", "table", "data")
    for name in (*names, "analyze", "figure", "report"):
        assert f"\n  {name} " in out
    assert steppe_says(capsys, "--version")[0] == f"steppe {steppe.__version__}\n"
    with pytest.raises(SystemExit) as leaving:
        run(["train", "cifar10-resnet18", "--help"])
    assert leaving.value.code == 0
    said = capsys.readouterr().out
    assert "--label-noise" in said
    assert "(default: 200.0)" in said  # epochs, as the recipe has them


HELPED = [
    *(["compare"], ["train"], ["train", "cifar10-resnet18"], ["sweep"], ["recipes"], ["runs"]),
    *(["table"], ["data"], ["figure"], ["report"], ["analyze"]),
    *(["analyze", name] for name in ("landscape", "spectrum", "radius", "sharpness")),
    *(["analyze", name] for name in ("robustness", "ensemble")),
]


@pytest.mark.parametrize("words", HELPED, ids=" ".join)
def test_help_shows_no_internals(capsys, words):
    with pytest.raises(SystemExit):
        run([*words, "--help"])
    said = capsys.readouterr().out
    assert "--help" in said
    for internal in ("None)", "(default: )", "{[", "STR [STR"):
        assert internal not in said
    usage, *lines = said.splitlines()
    assert usage.startswith("usage: ")
    assert max(map(len, lines)) <= 80


def test_help_does_not_wait_for_torch():
    """Under a second of processor time, for the list of commands and for the longest help."""
    program = (
        "import resource, sys\n"
        "from steppe.cli import run\n"
        "run(['--help'])\n"
        "for words in (['compare'], ['analyze', 'landscape'], ['figure'], ['runs']):\n"
        "    try: run([*words, '--help'])\n"
        "    except SystemExit: pass\n"
        "spent = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print('torch' in sys.modules, spent.ru_utime + spent.ru_stime < 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False True", done.stderr


def test_help_shows_the_values_that_will_be_used(capsys):
    def shown(*words):
        with pytest.raises(SystemExit):
            run([*words, "--help"])
        return " ".join(capsys.readouterr().out.replace("│", " ").split())

    demonstration = shown("compare")
    assert "Optimizer steps, in place of epochs. (default: 600)" in demonstration
    assert "by random other classes. (default: 0.2)" in demonstration
    own = shown("compare", "--data", "digits")
    assert "Optimizer steps, in place of epochs. --batch" in own
    assert "by random other classes. (default: 0.0)" in own
    assert "--method" not in own


def test_data_never_brings_settings_along():
    """The recipe `digits` has 20 % wrong labels; data, named by the user, has what it has."""
    from steppe.lab import Config
    from steppe.lab.command_line import parse

    for words in (["--data", "digits"], ["--data=digits"], ["--set", "data=digits"]):
        assert parse("compare", words).settings == Config()
    assert parse("compare", ["--model", "small-conv"]).settings == Config(model="small-conv")
    assert parse("compare", ["--label-noise", "0"]).settings.recipe == "digits"
    assert parse("compare", ["--epochs", "3"]).settings.steps is None
    assert parse("compare", ["--epochs", "3"]).settings.epochs == 3


def test_train_from_recipe_options_and_settings(capsys):
    out, _ = steppe_says(
        capsys,
        "train",
        "digits",
        "--method",
        "arwp:eta=1",
        "--seed",
        "3",
        *QUICK,
        "--set",
        "lr=.05",
        "-q",
    )
    assert "digits · mlp · arwp:eta=1 · seed 3" in out
    (line,) = steppe_says(capsys, "runs", "list", "--csv")[0].splitlines()[1:]
    name = line.split(",")[0]
    config = json.loads(Path(f"runs/{name}/config.json").read_text())
    assert (config["lr"], config["steps"], config["label_noise"]) == (0.05, 5, 0.2)
    assert (config["recipe"], config["method"]) == ("digits", "arwp:eta=1")

    again, said = steppe_says(capsys, "train", "--config", f"runs/{name}/config.json")
    assert again == out
    assert "finished before" in said
    shown, _ = steppe_says(capsys, "runs", "show", name)
    assert "torch" in shown
    header = steppe_says(capsys, "runs", "show", name, "--csv")[0].splitlines()[0]
    assert header.startswith("epoch,step,lr,loss")
    steppe_says(capsys, "runs", "remove", name)
    assert "No runs" in steppe_says(capsys, "runs")[0]


def test_a_shown_recipe_is_a_config_file(capsys, tmp_path):
    text, _ = steppe_says(capsys, "recipes", "cifar10-small", "--method", "m-arwp:ratio=.5")
    (tmp_path / "mine.toml").write_text(text)
    from steppe.lab import read_config
    from steppe.lab.recipes import recipe

    assert read_config(tmp_path / "mine.toml") == recipe("cifar10-small", "m-arwp:ratio=.5")


def test_compare_writes_every_form(capsys, tmp_path):
    arguments = ["sgd", "sam:rho=.2", "sgd:lr=.01", "--seeds", "2", "--jobs", "1", *QUICK]
    out, said = steppe_says(
        capsys, "compare", *arguments, "--out", "a/b.json", "--out", "b.md", "--out", "b.csv"
    )
    assert out.startswith("digits (400 training images")
    assert "SGD (lr 0.01)" in out
    assert "[1/6] sgd seed 0: finished" in said
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "6 runs in runs (`steppe runs` lists them)\nnext: steppe report a/b.json -o" in said
    content = json.loads((tmp_path / "a/b.json").read_text())
    assert [row["spec"] for row in content["rows"]] == ["sgd", "sam:rho=0.2", "sgd:lr=0.01"]
    assert (tmp_path / "b.md").read_text().count("|---|") == 2  # as trained, and compressed
    assert "measuring 6 models after rounding and pruning" in said
    assert (tmp_path / "b.csv").read_text().startswith("method,spec,")
    arguments = ["compare", "sgd", "--recipe", "digits-clean", "--seeds", "1"]
    arguments += ["--no-robustness", "--format", "json", "-q"]
    clean, _ = steppe_says(capsys, *arguments, "--jobs", "1", *QUICK)
    rows = json.loads(clean)["rows"]
    assert rows[0]["runs"][0]["config"]["label_noise"] == 0
    assert rows[0]["runs"][0]["compressed"] == {}


def test_compare_says_what_to_do_next_without_a_file(capsys):
    quick = ["sgd", "--seeds", "1", "--jobs", "1", *QUICK, "--store", "my runs"]
    _, said = steppe_says(capsys, "compare", *quick)
    assert "1 run in my runs" in said
    assert "next: add --out mine.json (finished runs are reused), then" in said
    assert "steppe report mine.json --store 'my runs' -o report.html" in said


def test_a_recipe_gives_its_strengths_to_bare_methods(capsys):
    from steppe.lab.command_line import parse

    command = parse("compare", ["sam", "m-arwp:lam=.3,batch=64", "--recipe", "cifar10-resnet18"])
    assert [command._spec(text) for text in command.methods] == [
        "sam:rho=0.1",
        "m-arwp:sigma=0.015,lam=0.3,eta=0.1,beta=0.99,batch=64",
    ]
    other = parse("compare", ["--data", "cifar10", "--model", "resnet18"])
    assert other.settings.train_size is None  # nothing of the digits recipe comes along
    assert parse("compare", []).settings.recipe == "digits"


def test_sweep(capsys):
    out, _ = steppe_says(
        capsys,
        "sweep",
        "digits",
        "--over",
        "lr=.01,.1",
        "--validation",
        ".2",
        "--jobs",
        "1",
        *QUICK,
    )
    assert "validation accuracy" in out
    assert "Best on the validation split: lr=" in out


def test_tables_and_data(capsys):
    shown = steppe_says(capsys, "table", "cifar")[0]
    assert "96.68 ± 0.13" in shown
    assert "These are the paper's numbers alone: the store runs has no finished run" in shown
    assert "ours" not in shown
    assert "| 76.62 |" in steppe_says(capsys, "table", "overview", "--format", "markdown")[0]
    assert "digits" in steppe_says(capsys, "data")[0]
    assert "digits" in steppe_says(capsys, "data", "verify", "digits")[0]


MISTAKES = [
    (["frobnicate"], "No command is called 'frobnicate'"),
    (["train", "digitz"], "No recipe is called 'digitz'. Did you mean digits"),
    (["train", "digits", "--method", "arwq"], "Did you mean arwp"),
    (
        ["train", "digits", "--method", "arwp:ratio=-1"],
        "ratio must be finite and at least 0, got -1",
    ),
    (["train", "digits", "--set", "epochz=3"], "Did you mean epochs?"),
    (["train", "digits", "--set", "epochs"], "NAME=VALUE"),
    (["train", "--data", "digts"], "Did you mean digits"),
    (["train", "--data", "cifar10", "--root", "nowhere"], "steppe data fetch cifar10"),
    (["train", "--model", "resnt18"], "Did you mean resnet18"),
    (["train", "--model", "nomodule:f"], "nomodule"),
    (["train", "--task", "regresion"], "Did you mean regression?"),
    (["train", "--device", "cuda"], "no GPU here"),
    (["train", "--init", "no.pt"], "cannot read the weights no.pt: No such file"),
    (["train", "--config", "no.toml"], "cannot read the config file no.toml: No such file"),
    (["train", "digits", "--config", "no.toml"], "not both"),
    (["train", "--resume", "gone"], "there is no run 'gone'"),
    (["train", "digits", "--lr", "1e30", "--steps", "5"], "not a number at step"),
    (["train", "--store", "/dev/null/x", "--steps", "1"], "Not a directory"),
    (["compare", "--out", "table.pdf"], "must end in .md, .csv, .json, .txt"),
    (["compare", "sgd", "--method", "arwp"], "compare does not take --method: write the methods"),
    (["compare", "--set", "method=arwp"], "compare does not take --method"),
    (["compare", "sgd", "--seed=3"], "compare does not take --seed: it trains seeds 0 to N-1"),
    (["compare", "adamw", "sgd"], "adamw is an optimizer: --optimizer adamw"),
    (["compare", "--epochs", "3", "--steps", "9"], "give --epochs or --steps, not both"),
    (["compare", "--tune", "--tuning.factors"], "tuning needs factors above 0, at least one"),
    (["compare", "--tune", "--tuning.seeds", "0"], "2 or more seeds per value, got 0"),
    (["compare", "sgd:rho=1"], "sgd has no options, got 'rho'"),
    (["sweep", "digits", "--over", "lr=.1", "--seeds", "0"], "a sweep needs at least one seed"),
    (["sweep", "digits", "--over", "lr=.1", "--seed", "3"], "sweep does not take --seed"),
    (["train", "--resume", "x", "--lr", "1"], "--lr cannot change a resumed run"),
    (["train", "digits", "--resume", "x"], "the recipe digits cannot change a resumed run"),
    (["sweep", "digits"], "say what to vary"),
    (["sweep", "digits", "--search", "rh"], "Did you mean rho"),
    (["table", "cifra"], "Did you mean cifar"),
    (["runs", "show"], "say which run to show"),
    (["data", "fetch", "emnist"], "No data set to fetch is called 'emnist'"),
]


@pytest.mark.parametrize(
    ("arguments", "said"),
    MISTAKES,
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_code_two(capsys, arguments, said):
    import torch

    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU: to ask for one is no mistake here")
    out, err = steppe_says(capsys, *arguments, code=2)
    (line,) = [line for line in err.splitlines() if line.startswith("steppe: ")]
    assert said in line
    assert "Traceback" not in err
    assert out == ""


def test_the_core_does_not_bring_the_lab():
    code = "import sys, steppe; sys.exit(any(m.startswith('steppe.lab') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_as_a_process_a_full_disk_is_one_line(tmp_path):
    """/dev/full is a disk with no room; the run folder's config.json cannot be written."""
    program = (
        "import os, steppe.lab.checkpoints as c, steppe.cli as cli\n"
        "real = os.fsync\n"
        "def full(fd):\n"
        "    with open('/dev/full', 'wb', buffering=0) as f: f.write(b'x')\n"
        "os.fsync = full\n"
        "cli.main(['train', 'digits', '--steps', '2'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_as_processes_side_by_side_and_stopped(tmp_path):
    import signal
    import time

    command = [
        sys.executable,
        "-m",
        "steppe",
        "compare",
        "sgd",
        "rwp",
        "--seeds",
        "2",
        "--jobs",
        "2",
    ]
    command += ["--steps", "100000", "--store", str(tmp_path / "runs")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while len(list(tmp_path.glob("runs/*/metrics.jsonl"))) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 130
    assert (
        "Stopped: 0 of 4 runs finished, the others are saved. The same command resumes them."
        in said
    )
    assert "Traceback" not in said
    assert list(tmp_path.glob("runs/*/checkpoints/step-*.pt"))
