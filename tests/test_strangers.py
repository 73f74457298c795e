"""Loops of libraries that are not ours: at strength zero each trains as it does without steppe."""

from collections.abc import Callable
from dataclasses import dataclass

import peft
import pytest
import schedulefree
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Dense
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import steppe
from tests.nets import batch, equal, loss_fn, mlp, weights_of

STEPS = 4


@dataclass
class Loop:
    """A model, who trains it (the first optimizer is the attached one), and its loss on a batch."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    loss_of: Callable[[int], torch.Tensor]
    loss: nn.Module | None = None

    def leaves(self):
        return weights_of(self.model) + ([] if self.loss is None else weights_of(self.loss))

    def training(self, on):
        """Schedule-free optimizers have other weights for evaluation than for training."""
        self.model.train(on)
        for optimizer in self.optimizers:
            if hasattr(optimizer, "train"):
                (optimizer.train if on else optimizer.eval)()


def sgd(*modules):
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1, momentum=0.9)


def schedule_free(kind):
    model = mlp(dtype=torch.float64)
    optimizer = kind(model.parameters(), lr=0.1, warmup_steps=2)
    return Loop(model, [optimizer], lambda step: loss_fn(model(data(step)[0]), data(step)[1]))


def data(step):
    return batch(step, dtype=torch.float64)


def muon():
    """Matrices by Muon, the rest by AdamW."""
    model = mlp(dtype=torch.float64)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)]
    return Loop(model, optimizers, lambda step: loss_fn(model(data(step)[0]), data(step)[1]))


class Uncertain(nn.Module):
    """Two tasks, weighted by what is learnt of their noise."""

    def __init__(self):
        super().__init__()
        self.log_variances = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, output, target):
        tasks = torch.stack([loss_fn(output, target), output.square().mean()])
        return (tasks * (-self.log_variances).exp() + self.log_variances).sum()


def weighted(together):
    model, loss = mlp(dtype=torch.float64), Uncertain()
    optimizers = [sgd(model, loss)] if together else [sgd(model), sgd(loss)]
    return Loop(model, optimizers, lambda step: loss(model(data(step)[0]), data(step)[1]), loss)


def renormed():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(20, 6, max_norm=1.0), nn.Flatten(), nn.Linear(12, 3)
    ).double()

    def loss_of(step):
        words = torch.randint(0, 20, (16, 2), generator=torch.Generator().manual_seed(step))
        return loss_fn(model(words), data(step)[1])

    return Loop(model, [sgd(model)], loss_of)


def lora():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        use_cache=False,
    )
    adapters = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.0
    )
    model = peft.get_peft_model(LlamaForCausalLM(config), adapters)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def loss_of(step):
        tokens = torch.randint(0, 17, (4, 8), generator=torch.Generator().manual_seed(step))
        return model(input_ids=tokens, labels=tokens).loss

    return Loop(model, [optimizer], loss_of)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, 8)

    def forward(self, features):
        mask = features["attention_mask"].unsqueeze(-1)
        found = (self.table(features["input_ids"]) * mask).sum(1) / mask.sum(1)
        return {**features, "sentence_embedding": found}


def dense():
    return Dense(8, 8, activation_function=nn.Tanh())  # its default is one Tanh for all models


def sentences(kind, *options, columns=2, labels=None):
    torch.manual_seed(0)
    model = SentenceTransformer(modules=[Words(), dense()], device="cpu")
    loss = kind(model, *options).double()

    def loss_of(step):
        generator = torch.Generator().manual_seed(step)
        features = [
            {
                "input_ids": torch.randint(0, 30, (6, 4), generator=generator),
                "attention_mask": torch.ones(6, 4),
            }
            for _ in range(columns)
        ]
        target = None if labels is None else labels(generator)
        return loss(features, target)

    shared = set(model.parameters())
    own = nn.ParameterList(p for p in loss.parameters() if p not in shared)
    return Loop(model, [sgd(model, own)], loss_of, own)


LOOPS = {
    "schedule-free SGD": lambda: schedule_free(schedulefree.SGDScheduleFree),
    "schedule-free AdamW": lambda: schedule_free(schedulefree.AdamWScheduleFree),
    "Muon and AdamW": muon,
    "weighted loss": lambda: weighted(together=True),
    "weighted loss, two optimizers": lambda: weighted(together=False),
    "max_norm": renormed,
    "LoRA": lora,
    "ranking": lambda: sentences(losses.MultipleNegativesRankingLoss),
    "CoSENT": lambda: sentences(
        losses.CoSENTLoss, labels=lambda generator: torch.rand(6, generator=generator)
    ),
    "triplets": lambda: sentences(losses.TripletLoss, columns=3),
    "softmax": lambda: sentences(
        losses.SoftmaxLoss,
        8,
        3,
        labels=lambda generator: torch.randint(0, 3, (6,), generator=generator),
    ),
    "cached ranking": lambda: sentences(
        lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)
    ),
}
WAYS = {
    "rwp": (steppe.rwp, 0.05, "loop"),
    "m_rwp": (steppe.m_rwp, 0.05, "micro-batches"),
    "antithetic": (steppe.antithetic_rwp, 0.05, "backward"),
    "sam": (steppe.sam, 0.1, "backward"),
    "held open": (steppe.rwp, 0.05, "backward"),
}


def train(build, way, strength):
    """The weights at the end and the losses at evaluations; no strength: without steppe."""
    loop, (make, _, kind) = build(), WAYS[way]
    perturber = None
    if strength is not None:
        perturber = steppe.attach(loop.model, loop.optimizers[0], make(strength))
    seen = []
    for step in range(STEPS):
        loop.training(True)
        if kind == "backward" and perturber is not None:
            perturber.backward(lambda: loop.loss_of(step))
        else:
            parts = 2 if kind == "micro-batches" else 1
            for part in range(parts):
                (loop.loss_of(parts * step + part) / parts).backward()
        for optimizer in loop.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loop.training(False)
        with torch.no_grad():
            seen.append(loop.loss_of(100).clone())
    loop.training(True)
    return loop.leaves() + seen, perturber


UNSERVED = {("cached ranking", way) for way in ("rwp", "m_rwp")}
"""A loss that calls the model inside of its backward needs the pass held open."""


CASES = [(name, way) for name in LOOPS for way in WAYS if (name, way) not in UNSERVED]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_at_strength_zero_a_loop_trains_as_without_steppe(name, way):
    plain, _ = train(LOOPS[name], way, None)
    still, perturber = train(LOOPS[name], way, 0.0)
    assert perturber.step == STEPS
    # a pass has several backwards, or halves of a loss whose smallest gradients underflow
    if name == "cached ranking" or way == "antithetic":
        for found, wanted in zip(still, plain, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    else:
        assert equal(plain, still)


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_loop_trains_under_perturbation(name, way):
    still, _ = train(LOOPS[name], way, None)
    found, perturber = train(LOOPS[name], way, WAYS[way][1])
    assert perturber.step == STEPS
    assert all(t.isfinite().all() for t in found)
    assert not equal(still, found)


@pytest.mark.parametrize("way", ["rwp", "m_rwp"])
def test_a_loss_with_a_backward_of_its_own_is_refused_with_the_way_to_run_it(way):
    with pytest.raises(RuntimeError, match=r"passes\(\)|perturber\.backward") as caught:
        train(LOOPS["cached ranking"], way, 0.05)
    assert "use_reentrant=False" not in str(caught.value)


# ---------------------------------------------------------------------- two networks


def test_two_models_that_share_a_module_without_weights():
    """The default activation of sentence-transformers' Dense is one object for all models."""
    models = [SentenceTransformer(modules=[Words(), Dense(8, 8)], device="cpu") for _ in range(2)]
    assert models[0][1].activation_function is models[1][1].activation_function
    features = {"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": torch.ones(2, 3)}
    perturbers = []
    for model in models:
        optimizer = sgd(model)
        perturbers.append(steppe.attach(model, optimizer, steppe.rwp(0.05)))
        model(features)["sentence_embedding"].sum().backward()
        optimizer.step()
    assert [p.step for p in perturbers] == [1, 1]


def gan(attaches, method, freezes, explicit=False):
    """A critic and a generator in turn; the critic may be frozen while the generator learns."""
    torch.manual_seed(0)
    nets = {
        "generator": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)).double(),
        "critic": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double(),
    }
    optimizers = {name: torch.optim.Adam(net.parameters(), lr=0.01) for name, net in nets.items()}
    perturber = None
    if method is not None:
        perturber = steppe.attach(nets[attaches], optimizers[attaches], method)

    def learn(name, loss_of):
        nets[name].zero_grad()
        if explicit and perturber is not None and name == attaches:
            perturber.backward(loss_of)
        else:
            loss_of().backward()
        optimizers[name].step()

    for step in range(3):
        noise, real = data(step)[0][:, :4], data(step)[0]
        with torch.set_grad_enabled(not explicit):
            fake = nets["generator"](noise).detach()
        learn("critic", lambda: (nets["critic"](fake) - nets["critic"](real)).mean())
        nets["critic"].requires_grad_(not freezes)
        learn("generator", lambda: -nets["critic"](nets["generator"](noise)).mean())
        nets["critic"].requires_grad_(True)
    return [w for net in nets.values() for w in weights_of(net)], perturber


@pytest.mark.parametrize("freezes", [True, False], ids=["critic frozen", "critic not frozen"])
@pytest.mark.parametrize("attaches", ["generator", "critic"])
def test_a_gan_of_which_one_half_is_attached(attaches, freezes):
    plain, _ = gan(attaches, None, freezes)
    still, _ = gan(attaches, steppe.rwp(0.0), freezes)
    assert equal(plain, still)
    found, perturber = gan(attaches, steppe.rwp(0.05), freezes)
    assert perturber.step == 3
    assert not equal(plain, found)


@pytest.mark.parametrize(
    "attaches",
    ["generator", "critic"],
)
def test_a_gan_of_which_one_half_has_sam(attaches):
    plain, _ = gan(attaches, None, freezes=True, explicit=True)
    still, perturber = gan(attaches, steppe.sam(0.0), freezes=True, explicit=True)
    assert perturber.step == 3
    assert equal(plain, still)
