"""Flat minima in a Transformers Trainer: a tiny causal language model from its config.

Learns 64 sequences with a rule (each token is the sum of the two before it), a tenth of whose
labels are wrong, and reports the loss on others without errors. Nothing is downloaded. About 25
seconds on an idle core; one seed, so a demonstration and no evidence.

    python examples/transformers_lm.py
"""

import argparse
import tempfile
import warnings

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

import steppe
from steppe.integrations.transformers import Perturb, PerturbTrainer

VOCABULARY, LENGTH = 13, 12


def sequences(count: int, seed: int, noise: float) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
    for place in range(2, LENGTH):
        tokens[:, place] = (tokens[:, place - 1] + tokens[:, place - 2]) % VOCABULARY
    wrong = torch.rand(tokens.shape, generator=generator) < noise
    random = torch.randint(0, VOCABULARY, tokens.shape, generator=generator)
    labels = torch.where(wrong, random, tokens)
    labels[:, :2] = -100  # the first two follow no rule
    return [{"input_ids": t, "labels": w} for t, w in zip(tokens, labels, strict=True)]


def train(method: steppe.Method, steps: int, accumulate: int = 1) -> float:
    """Loss of the final model on sequences without wrong tokens."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = PerturbTrainer(
            model=LlamaForCausalLM(config),
            args=TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                max_steps=steps,
                learning_rate=3e-3,
                per_device_train_batch_size=32,
                per_device_eval_batch_size=256,
                gradient_accumulation_steps=accumulate,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=sequences(64, seed=0, noise=0.1),
            eval_dataset=sequences(256, seed=1, noise=0.0),
            callbacks=[Perturb(method)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        loss: float = trainer.evaluate()["eval_loss"]
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="four steps: only to see it run")
    steps = 4 if parser.parse_args().quick else 120
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print(f"AdamW         {train(steppe.sgd(), steps):.3f}")
    print(f"with ARWP     {train(steppe.arwp(ratio=0.1), steps):.3f}")
    print(f"with SAM      {train(steppe.sam(0.05), steps):.3f}  (two gradients a step)")
    print(f"with m-ARWP   {train(steppe.m_arwp(ratio=0.3), steps, accumulate=2):.3f}  (the same)")


if __name__ == "__main__":
    main()
