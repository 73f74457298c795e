"""LoRA with Flat-LoRA in a Transformers Trainer: a tiny language model that learns another rule.

The model is made from its config and first learns to count up, then by LoRA to count down, from 64
sequences with a tenth of the labels wrong. Reports the loss on others without errors. Nothing is
downloaded; one seed, so a demonstration and no evidence. TRL's trainers take the same callback.

    python examples/transformers_lora.py
"""

import argparse
import tempfile
import warnings

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments
from transformers.utils import logging

import steppe
from steppe.integrations.transformers import Perturb

VOCABULARY, LENGTH = 13, 12


def counting(by: int, count: int, seed: int, noise: float = 0.0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, VOCABULARY, (count, 1), generator=generator)
    tokens = (first + by * torch.arange(LENGTH)) % VOCABULARY
    wrong = torch.rand(tokens.shape, generator=generator) < noise
    labels = torch.where(wrong, (tokens + 5) % VOCABULARY, tokens)
    return [{"input_ids": t, "labels": w} for t, w in zip(tokens, labels, strict=True)]


def train(
    model: nn.Module, rows: list[dict[str, Tensor]], method: steppe.Method, steps: int
) -> float:
    """Loss on sequences that count down without errors, after training on these."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                max_steps=steps,
                learning_rate=5e-3,
                per_device_train_batch_size=32,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=rows,
            eval_dataset=counting(-1, 256, seed=2),
            callbacks=[Perturb(method)],  # the one line
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        loss: float = trainer.evaluate()["eval_loss"]
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="four steps: only to see it run")
    steps = 4 if parser.parse_args().quick else 100
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    torch.manual_seed(0)
    base = LlamaForCausalLM(config)
    train(base, counting(1, 256, seed=0), steppe.sgd(), steps)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    for name, method in {
        "LoRA, AdamW": steppe.sgd(),
        "LoRA with Flat-LoRA": steppe.flat_lora(),
    }.items():
        base.load_state_dict(before)
        torch.manual_seed(0)
        model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
        loss = train(model, counting(-1, 64, seed=1, noise=0.1), method, steps)
        base = model.unload()
        same = all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
        print(f"{name:22}loss {loss:.3f}, base {'unchanged' if same else 'changed'}")


if __name__ == "__main__":
    main()
