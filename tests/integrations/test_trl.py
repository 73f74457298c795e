"""TRL's trainers with the Transformers callback: SFT of a LoRA model against the same loop by hand."""

from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import steppe
from steppe.integrations.transformers import PassesMixin, Perturb, pulled_on
from tests.nets import equal, weights_of

pytestmark = pytest.mark.slow  # importing TRL takes five seconds
WORDS = "<pad> <eos> the a cat dog sat ran on in mat fog . , and or"
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
HALF = steppe.flat_lora(ratio=0.5)
RISE = steppe.flat_lora(rise=0.05)


@pytest.fixture(scope="module")
def trl():
    return pytest.importorskip("trl", reason="TRL is not installed: pip install trl")


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(torch.float64)


def lora():
    torch.manual_seed(1)
    return get_peft_model(llama(), LORA, autocast_adapter_dtype=False)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(dict(zip(WORDS.split(), range(16), strict=True)), "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )


ARGUMENTS = {
    "use_cpu": True,
    "bf16": False,
    "max_steps": 6,
    "learning_rate": 0.02,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 4,
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}


def make(trl, method, folder, *, kind=None, model=None, **options):
    from datasets import Dataset

    data = Dataset.from_dict({"text": ["the cat sat on the mat .", "a dog ran in fog"] * 16})
    perturb = None if method is None else Perturb(method)
    trainer = (kind or trl.SFTTrainer)(
        model=lora() if model is None else model,
        args=trl.SFTConfig(str(folder), **{**ARGUMENTS, **options}),
        train_dataset=data,
        processing_class=tokenizer(),
        callbacks=[] if perturb is None else [perturb],
    )
    collate, trainer.seen = trainer.data_collator, []

    def keep(rows):
        batch = collate(rows)
        trainer.seen.append({name: value.clone() for name, value in batch.items()})
        return batch

    trainer.data_collator = keep
    return trainer, perturb


def by_hand(method, batches, accumulate):
    model = lora()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02, weight_decay=0.0)
    perturber = steppe.attach(model, optimizer, method)
    for start in range(0, 6 * accumulate, accumulate):
        parts = batches[start : start + accumulate]
        tokens = sum(part["labels"][:, 1:].ne(-100).sum() for part in parts)
        for part in parts:
            model(**part, num_items_in_batch=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, perturber


@pytest.mark.parametrize(
    ("method", "accumulate"),
    [(HALF, 1), (RISE, 1), (steppe.mixed(HALF, 0.3), 2)],
    ids=["ratio", "rise", "mixed"],
)
def test_sft_equals_a_loop_by_hand(trl, method, accumulate, tmp_path):
    """Up to float32, in which the model's own loss is; with TRL's default gradient checkpointing."""
    trainer, perturb = make(trl, method, tmp_path, gradient_accumulation_steps=accumulate)
    bases = [p.clone() for p in trainer.model.parameters() if not p.requires_grad]
    trainer.train()
    model, perturber = by_hand(method, trainer.seen, accumulate)
    assert perturb.perturber.step == perturber.step == 6
    for found, wanted in zip(weights_of(trainer.model), weights_of(model), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    frozen = [p for p in trainer.model.parameters() if not p.requires_grad]
    assert equal(bases, frozen)
    states = [p.state_dict()["states"] for p in (perturb.perturber, perturber)]
    torch.testing.assert_close(*states, rtol=1e-3, atol=1e-6)


def test_strength_zero_is_sft_without_steppe(trl, tmp_path):
    without, _ = make(trl, None, tmp_path)
    without.train()
    still, _ = make(trl, steppe.flat_lora(ratio=0.0), tmp_path)
    still.train()
    moved, _ = make(trl, HALF, tmp_path)
    moved.train()
    assert equal(weights_of(still.model), weights_of(without.model))
    assert not equal(weights_of(moved.model), weights_of(without.model))


def test_the_trainers_own_peft_config(trl, tmp_path):
    """`SFTTrainer(peft_config=...)` makes the LoRA model; bf16 and checkpointing as TRL sets them."""
    kind = partial(trl.SFTTrainer, peft_config=LORA)
    trainer, perturb = make(trl, RISE, tmp_path, kind=kind, model=llama().float(), bf16=True)
    trainer.train()
    assert perturb.perturber.step == 6
    assert perturb.perturber.stats()["perturbed_parameters"] == 512
    assert perturb.perturber.stats()["measured_rise"] != 0


def test_resuming_is_bit_exact(trl, tmp_path):
    whole, ended = make(trl, RISE, tmp_path / "whole", save_strategy="steps", save_steps=3)
    whole.train()
    resumed, perturb = make(trl, RISE, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert perturb.perturber.step == ended.perturber.step == 6
    assert equal(weights_of(resumed.model), weights_of(whole.model))


def test_errors_name_what_to_change_in_trl(trl, tmp_path):
    trainer, _ = make(trl, steppe.mixed(HALF), tmp_path)
    with pytest.raises(RuntimeError, match=r"Set SFTConfig\(gradient_accumulation_steps=2\)"):
        trainer.train()
    trainer, _ = make(trl, steppe.sam(0.1), tmp_path)
    with pytest.raises(
        RuntimeError, match=r"sam\(\) needs each batch.*class Mine\(PassesMixin, SFT"
    ):
        trainer.train()


def test_sam_takes_the_mixin(trl, tmp_path):
    class Mine(PassesMixin, trl.SFTTrainer):
        pass

    trainer, perturb = make(trl, steppe.sam(0.1), tmp_path, kind=Mine)
    trainer.train()
    assert perturb.perturber.step == 6


def test_dpo_wants_its_reference_before_training(trl, tmp_path):
    """The reference of a PEFT model is the model itself, which has noise in it during training."""
    from datasets import Dataset

    texts = {"prompt": "the cat", "chosen": " sat on the mat .", "rejected": " ran in fog"}
    data = Dataset.from_dict({name: [text] * 8 for name, text in texts.items()})
    perturb = Perturb(HALF)

    def trainer(**options):
        args = trl.DPOConfig(str(tmp_path), **ARGUMENTS, **options)
        return trl.DPOTrainer(
            lora(), args=args, train_dataset=data, processing_class=tokenizer(), callbacks=[perturb]
        )

    with pytest.raises(ValueError, match=r"DPOConfig\(precompute_ref_log_probs=True\)"):
        trainer().train()
    trainer(precompute_ref_log_probs=True).train()
    assert perturb.perturber.step == 6


def test_the_pull_on_the_logits_is_known_from_log_probabilities():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.randint(0, 7, (5, 1), generator=generator)
    output = {"log_probs": logits.log_softmax(-1).gather(1, labels)[:, 0], "logits": None}
    before = output["log_probs"]
    zeros = pulled_on(output)
    assert torch.equal(output["log_probs"], before)
    (output["log_probs"] * torch.linspace(-1, 2, 5)).square().sum().backward()
    torch.testing.assert_close(zeros.grad.abs().sum(), logits.grad.abs().sum())
    assert pulled_on(given := {"logits": logits}) is given
