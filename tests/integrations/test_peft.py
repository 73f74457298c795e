"""Noise on frozen layers and on merged LoRA weights, against the same noise written into the weights."""

import copy
import io
import math
import re

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import steppe
from steppe import frozen
from steppe.integrations.peft import low_rank_parts
from steppe.integrations.transformers import Perturb
from tests.nets import batch, equal, loss_fn, mlp, weights_of

HALF = steppe.flat_lora(ratio=0.5)


def plain_llama(dtype=torch.float64):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(dtype)


def lora(model=None, adapters=("default",), *, B=0.1, **options):
    """A PEFT model whose B is not zero, so that the merged weights are not the base's."""
    config = LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    )
    model = plain_llama() if model is None else model
    model = get_peft_model(model, config, adapters[0], autocast_adapter_dtype=False)
    for name in adapters[1:]:
        model.add_adapter(name, config, autocast_adapter_dtype=False)
    model.base_model.set_adapter(list(adapters))
    generator = torch.Generator().manual_seed(1)
    for name, param in model.named_parameters():
        if "lora_B" in name and B:
            param.data.copy_(B * torch.randn(param.shape, generator=generator))
    return model


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def bases(model):
    return [p for name, p in model.named_parameters() if name.endswith("base_layer.weight")]


def tokens(step=0, rows=4):
    ids = torch.randint(0, 17, (rows, 9), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def attached(model, method=HALF, lr=0.1, **options):
    optimizer = torch.optim.SGD(trained(model), lr=lr)
    return optimizer, steppe.attach(model, optimizer, method, **options)


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        model(**tokens(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def drawn(perturber):
    """The noise that is in the frozen layers right now, by the names of their weights."""
    found = {}
    for slot in perturber._training.weights.params:
        noise = slot.layer.noise
        parts = [(rows, unit.clone()) for rows, unit in slot.layer.unit_noise(noise)]
        found[slot.name] = torch.cat([unit * noise.std[rows, None] for rows, unit in parts])
    return found


def written(model, eps):
    """A copy of a model that is not attached, with noise in its weights, which have gradients too."""
    twin = copy.deepcopy(model)
    for name, param in twin.named_parameters():
        if name in eps:
            param.data += eps[name]
            param.requires_grad_(True)
    return twin


# ---------------------------------------------------------------------- the same as written weights


@pytest.mark.parametrize("chunk", [2**18, 100], ids=["one chunk", "many chunks"])
@pytest.mark.parametrize("adapters", [("default",), ("one", "two")])
def test_equals_noise_written_into_the_weights(adapters, chunk, monkeypatch):
    monkeypatch.setattr(frozen, "CHUNK", chunk)
    model = lora(adapters=adapters)
    before, plain = weights_of(model), copy.deepcopy(model)
    _, perturber = attached(model, steppe.flat_lora(rise=steppe.constant(0.05)))
    loss = model(**tokens()).loss
    twin = written(plain, eps := drawn(perturber))
    loss.backward()
    slope = perturber._training.step.slopes.popitem()[1][0]
    expected = twin(**tokens()).loss
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    others = dict(twin.named_parameters())
    for name, param in model.named_parameters():
        if param.requires_grad:
            assert "lora_" in name
            torch.testing.assert_close(param.grad, others[name].grad, rtol=1e-9, atol=1e-12)
        else:
            assert param.grad is None
    along = sum((eps[name] * others[name].grad).sum() for name in eps)
    torch.testing.assert_close(slope, along, rtol=1e-9, atol=1e-14)
    assert equal(weights_of(model), before)


def test_the_noise_is_that_of_the_same_weights_unfrozen():
    model, other = lora(B=0), lora(B=0)
    _, perturber = attached(model)
    model(**tokens()).loss.backward()
    for param in bases(other):
        param.requires_grad_(True)
    groups = [
        {"params": [p for p in trained(other) if p not in set(bases(other))], "perturb": False},
        {"params": bases(other)},
    ]
    steppe.attach(other, torch.optim.SGD(groups, lr=0.1), steppe.rwp(ratio=0.5))
    other(**tokens()).loss.backward()
    found, expected = (
        [p.grad for n, p in m.named_parameters() if "lora_" in n] for m in (model, other)
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_the_std_comes_from_the_rows_of_the_merged_weight():
    model = lora(adapters=("one", "two"), use_rslora=True)
    _, perturber = attached(model)
    model(**tokens())
    layers = [m for m in model.modules() if hasattr(m, "get_delta_weight")]
    for slot, layer in zip(perturber._training.weights.params, layers, strict=True):
        delta = sum(layer.get_delta_weight(name) for name in ("one", "two"))
        merged = layer.base_layer.weight + delta
        expected = 0.5 * merged.norm(dim=1) / merged.shape[1] ** 0.5
        torch.testing.assert_close(slot.layer.noise.std, expected.detach())
        assert (
            expected - 0.5 * layer.base_layer.weight.norm(dim=1) / merged.shape[1] ** 0.5
        ).abs().max() > 1e-3


def test_only_active_adapters_count():
    model = lora(adapters=("one", "two"))
    model.base_model.set_adapter("two")
    layer = next(m for m in model.modules() if hasattr(m, "get_delta_weight"))
    B, A = low_rank_parts(model)[layer.base_layer]()
    torch.testing.assert_close(B @ A, layer.get_delta_weight("two"))
    with model.disable_adapter():
        assert low_rank_parts(model)[layer.base_layer]() is None
    model.merge_adapter()
    assert low_rank_parts(model)[layer.base_layer]() is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant):
    results = []
    for checkpointed in (False, True):
        model = lora()
        if checkpointed:
            model.enable_input_require_grads()
            kwargs = {"use_reentrant": reentrant}
            model.base_model.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs=kwargs
            )
        optimizer, perturber = attached(model, steppe.flat_lora(rise=steppe.constant(0.05)))
        train(model, optimizer, 5)
        results.append([*(p.detach() for p in trained(model)), *states(perturber)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def states(perturber):
    found = perturber.state_dict()["states"]
    return [t.clone() for state in found for tensors in state.values() for t in tensors]


@pytest.mark.parametrize("method", [HALF, steppe.flat_lora(rise=steppe.constant(0.05))])
def test_compiled(method):
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = lora()
        called = torch.compile(model, backend="eager") if compiled else model
        optimizer, perturber = attached(called, method)
        train(called, optimizer, 4)
        results.append([*(p.detach() for p in trained(model)), *states(perturber)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------------- nothing else changes


@pytest.mark.slow
def test_a_bf16_base_is_the_same_to_the_bit_after_2000_steps():
    model = lora(plain_llama(torch.bfloat16), B=0)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer, perturber = attached(model, steppe.flat_lora(ratio=0.1), lr=0.05)
    train(model, optimizer, 2000)
    assert perturber.step == 2000
    now = dict(model.named_parameters())
    assert all(torch.equal(before[n], now[n]) for n in before)
    assert all(p.abs().max() > 0 for n, p in now.items() if "lora_B" in n)


def test_the_saved_adapter_is_plain_peft(tmp_path):
    model = lora()
    optimizer, _ = attached(model)
    train(model, optimizer, 3)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(plain_llama(), tmp_path)
    assert set(again.state_dict()) == set(lora().state_dict())
    model.eval(), again.eval()
    torch.testing.assert_close(model(**tokens()).logits, again.to(torch.float64)(**tokens()).logits)


def test_copies_and_pickles_carry_nothing_of_it():
    model = lora()
    optimizer, perturber = attached(model)
    train(model, optimizer, 1)
    model(**tokens())  # a pass is under way
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    for other in (copy.deepcopy(model), torch.load(memory, weights_only=False)):
        assert not [m for m in other.modules() if "forward" in vars(m)]
        assert equal(weights_of(other), weights_of(model))
    perturber.detach()
    assert not [m for m in model.modules() if "forward" in vars(m)]
    a, b = (model(**tokens()).loss for _ in range(2))
    assert torch.equal(a, b)


def test_evaluation_sees_true_weights_and_probe_perturbed_ones():
    model = lora()
    expected = copy.deepcopy(model).eval()(**tokens()).loss.detach()
    _, perturber = attached(model)
    model(**tokens())
    assert perturber.perturbed
    assert torch.equal(model.eval()(**tokens()).loss, expected)
    assert not perturber.perturbed
    probe = perturber.probe(lambda: model(**tokens()).loss, samples=8)
    assert probe.true == float(expected)
    assert probe.stderr > 0
    assert not perturber.perturbed


def test_strength_zero_is_ordinary_training():
    model, other = lora(), lora()
    optimizer, _ = attached(model, steppe.flat_lora(ratio=0.0))
    train(model, optimizer, 3)
    train(other, torch.optim.SGD(trained(other), lr=0.1), 3)
    assert equal(weights_of(model), weights_of(other))


def test_resumes_bit_exactly():
    method = steppe.flat_lora(rise=steppe.constant(0.05))
    model = lora()
    optimizer, perturber = attached(model, method)
    train(model, optimizer, 8)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), perturber.state_dict()))
    train(model, optimizer, 8, 8)
    again = lora()
    optimizer, second = attached(again, method, seed=5)
    for part, state in zip((again, optimizer, second), saved, strict=True):
        part.load_state_dict(state)
    train(again, optimizer, 8, 8)
    assert equal(weights_of(again), weights_of(model))
    assert equal(states(second), states(perturber))


def test_print_and_stats_tell_what_is_perturbed():
    model = lora()
    _, perturber = attached(model)
    text, stats = str(perturber), perturber.stats()
    assert text.startswith("flat_lora at step 0, strength 0.5")
    assert "q_proj.base_layer.weight (16, 16) frozen" in text
    assert "lora_A.default.weight: trained; only merged weights are perturbed" in text
    assert stats["perturbed_parameters"] == sum(p.numel() for p in bases(model))
    assert math.isclose(stats["displacement"], 0.5, rel_tol=1e-6)


# ---------------------------------------------------------------------- loops


def test_accumulation_and_scaler_measure_the_same_rise():
    """Two halves of a batch, their losses divided by two and multiplied by a scale."""
    method = steppe.flat_lora(rise=steppe.constant(0.05))
    one, two = lora(), lora()
    optimizer, perturber = attached(one, method)
    train(one, optimizer, 6)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer, other = attached(two, method, scaler=scaler)
    for step in range(6):
        ids = tokens(step)["input_ids"]
        for part in ids.chunk(2):
            scaler.scale(two(input_ids=part, labels=part).loss / 2).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.testing.assert_close(states(other)[0], states(perturber)[0], rtol=1e-6, atol=1e-9)


def test_a_step_that_the_scaler_skips_is_not_measured():
    method = steppe.flat_lora(rise=steppe.constant(0.05))
    model = lora(plain_llama(torch.float32))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer, perturber = attached(model, method, scaler=scaler)
    for step in range(4):
        loss = scaler.scale(model(**tokens(step)).loss)
        (loss * float("inf") if step == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert perturber.step == 3
    (state,) = states(perturber)
    assert state.isfinite().all()
    assert math.isfinite(perturber.stats()["measured_rise"])


def test_mixed():
    model = lora()
    method = steppe.mixed(steppe.flat_lora(ratio=0.5), lam=0.3)
    _, perturber = attached(model, method)
    assert method.name == "m_flat_lora"
    clean = copy.deepcopy(model)
    clean(**tokens(0)).loss.backward()
    (model(**tokens(0)).loss / 2).backward()
    (loss := model(**tokens(1)).loss / 2)
    noisy = written(clean, drawn(perturber))
    noisy.zero_grad()
    loss.backward()
    noisy(**tokens(1)).loss.backward()
    pairs = zip(
        trained(model),
        trained(clean),
        (dict(noisy.named_parameters())[n] for n, p in model.named_parameters() if p.requires_grad),
        strict=True,
    )
    for ours, a, b in pairs:
        torch.testing.assert_close(ours.grad, 0.7 * a.grad + 0.3 * b.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_computes_as_linear_does(dtype):
    model = lora(plain_llama(torch.float32))
    plain = copy.deepcopy(model)
    _, perturber = attached(model)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype == torch.bfloat16):
        out = model(**tokens())
        twin = written(plain, drawn(perturber))
        expected = twin(**tokens())
    assert out.logits.dtype == expected.logits.dtype
    torch.testing.assert_close(out.logits, expected.logits, rtol=2e-2, atol=2e-2)
    out.loss.backward()


def test_trainer_callback(tmp_path):
    model = lora()
    before = [p.clone() for p in bases(model)]
    perturb = Perturb("flat_lora:ratio=0.1")
    rows = [{k: v[0] for k, v in tokens(step, 1).items()} for step in range(16)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[perturb]).train()
    assert perturb.perturber.step == 8
    assert perturb.perturber.stats()["strength"] == 0.1
    assert equal(bases(model), before)


def test_the_mixed_method_goes_by_the_name_that_is_printed():
    mixed = steppe.mixed(steppe.flat_lora(ratio=0.1), lam=0.3)
    _, perturber = attached(lora(), mixed)
    assert str(perturber).startswith("m_flat_lora at step 0")
    assert Perturb("m_flat_lora:ratio=0.1,lam=0.3").method == mixed
    assert Perturb("m-flat-lora").method == steppe.mixed(steppe.flat_lora())


# ---------------------------------------------------------------------- frozen layers of any model


def test_frozen_layers_beside_trained_ones():
    model = mlp(dtype=torch.float64)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    method = steppe.rwp(rise=steppe.constant(0.05))
    perturber = steppe.attach(model, optimizer, method, include_frozen="0.weight")
    before = model[0].weight.clone()
    x, y = batch(dtype=torch.float64)
    loss = loss_fn(model(x), y)
    slot = perturber._training.weights.params[-1]
    assert slot.name == "0.weight"
    with torch.no_grad():
        ((rows, unit),) = slot.layer.unit_noise(slot.layer.noise)
        eps = unit * slot.layer.noise.std[:, None]
        frozen_weight = (before + eps).requires_grad_(True)
    moved = [p.detach().clone().requires_grad_(True) for p in model[2].parameters()]
    hidden = torch.tanh(nn.functional.linear(x, frozen_weight, model[0].bias))
    expected = loss_fn(nn.functional.linear(hidden, *moved), y)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    away = [m.detach() - p.detach() for m, p in zip(moved, model[2].parameters(), strict=True)]
    slope = (eps * frozen_weight.grad).sum() + sum(
        (e * m.grad).sum() for e, m in zip(away, moved, strict=True)
    )
    found = perturber._training.step.slopes.popitem()[1][0]
    torch.testing.assert_close(found, slope, rtol=1e-9, atol=1e-12)
    assert torch.equal(model[0].weight, before)


def test_unfrozen_later_it_is_perturbed_in_place():
    model = mlp(dtype=torch.float64)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    perturber = steppe.attach(model, optimizer, steppe.rwp(ratio=0.5), include_frozen="0.weight")
    before = model[0].weight.clone()
    model[0].weight.requires_grad_(True)
    x, y = batch(dtype=torch.float64)
    loss = loss_fn(model(x), y)
    assert not torch.equal(model[0].weight, before)
    assert perturber._training.weights.params[-1].layer.noise is None
    loss.backward()
    assert torch.equal(model[0].weight, before)


def test_a_checkpoint_of_the_users_own():
    model = mlp(dtype=torch.float64)
    model[0].requires_grad_(False)
    losses = []
    for run in (
        nn.Sequential.forward,
        lambda m, x: checkpoint(
            m[2], checkpoint(m[:2], x, use_reentrant=False), use_reentrant=False
        ),
    ):

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = copy.deepcopy(model)

            def forward(self, x):
                return run(self.net, x)

        net = Net()
        optimizer = torch.optim.SGD(trained(net), lr=0.1)
        steppe.attach(
            net, optimizer, steppe.rwp(rise=steppe.constant(0.05)), include_frozen="*0.weight"
        )
        x, y = batch(dtype=torch.float64)
        loss_fn(net(x), y).backward()
        losses.append([p.grad for p in trained(net)])
    assert equal(*losses)


# ---------------------------------------------------------------------- what is refused


class Half(nn.Linear):
    pass


class Int8Params(nn.Parameter):
    """As bitsandbytes and torchao hold them: a parameter of a type of its own."""


def quantized(layer):
    layer.weight = Int8Params(layer.weight.data, requires_grad=False)
    return layer


@pytest.mark.parametrize(
    ("layer", "name", "why"),
    [
        (nn.Conv1d(2, 2, 1), "*0.weight", "belongs to Conv1d, and only nn.Linear"),
        (nn.Embedding(4, 2), "*0.weight", "belongs to Embedding"),
        (Half(2, 2), "*0.weight", "belongs to Half"),
        (
            quantized(nn.Linear(2, 2)),
            "*0.weight",
            r"but it is quantized \(Int8Params, torch.float32\)",
        ),
        (quantized(Half(2, 2)), "*0.weight", "noise needs a base loaded in floating point"),
        (nn.Linear(2, 2), "*0.bias", "the bias of a linear layer"),
        (nn.Linear(2, 2), "*1.weight_v", "matches no parameter of the model"),
    ],
)
def test_layers_that_cannot_have_noise(layer, name, why):
    model = nn.Sequential(layer.requires_grad_(False), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with pytest.raises(ValueError, match=why) as error:
        steppe.attach(model, optimizer, steppe.rwp(ratio=0.1), include_frozen=(name,))
    assert "DDP" not in str(error.value)


@pytest.mark.parametrize("method", [steppe.arwp(0.1), steppe.sam(0.1), steppe.msam(0.1)])
def test_methods_that_need_gradients_of_frozen_weights(method):
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="frozen weights have none. Use rwp"):
        steppe.attach(model, optimizer, method, include_frozen=("0.weight",))


def refusal(model, method=HALF, **options):
    """What attach says about a model that it refuses."""
    with pytest.raises(ValueError) as error:
        attached(model, method, **options)
    return str(error.value)


def gpt2(*targets):
    config = GPT2Config(
        vocab_size=17,
        n_embd=16,
        n_layer=5,
        n_head=2,
        n_positions=16,
        bos_token_id=1,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    return lora(GPT2LMHeadModel(config), target_modules=list(targets), fan_in_fan_out=True)


def test_adapters_that_are_not_plain_lora():
    told = refusal(lora(use_dora=True))
    assert re.search("q_proj uses Dora.* without a variant .such as use_dora., or steppe.rwp", told)
    ia3 = IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    assert re.search(
        r"q_proj is ia3\. Use LoraConfig ", refusal(get_peft_model(plain_llama(), ia3))
    )


def test_a_model_without_lora_is_told_how_to_get_it():
    assert "Make them with peft.get_peft_model(model, LoraConfig(...))" in refusal(plain_llama())


def test_what_flat_lora_refuses_was_not_named_by_the_user():
    nothing_left = "No LoRA layer can have noise; steppe.rwp() perturbs what is trained."
    told = refusal(gpt2("c_attn"))
    assert told.startswith("flat_lora() perturbs ")
    assert "belongs to Conv1D" in told
    assert told.endswith(nothing_left)
    told = refusal(gpt2("c_attn", "lm_head"))
    assert re.search("Leave out with exclude: '.*', '.*', '.*' and 2 more", told)
    attached(gpt2("c_attn", "lm_head"), exclude="*c_attn*")
    told = refusal(lora(), steppe.mixed(HALF), exclude="*base_layer*")
    assert told.startswith(
        "m_flat_lora() perturbs the frozen weights under LoRA layers, but all are"
    )
    assert told.endswith(nothing_left)


def test_an_int8_base_of_torchao():
    quantization = pytest.importorskip("torchao.quantization")
    model = plain_llama(torch.float32)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    told = refusal(get_peft_model(model, LoraConfig(target_modules=["q_proj"])))
    assert "q_proj.base_layer.weight, but it is quantized (Int8Tensor, torch.float32)" in told
    assert "DDP" not in told


def test_a_base_that_is_trained_has_a_short_reason():
    told = refusal(lora().requires_grad_(True))
    assert "but all are trained" in told
    assert "lora_A" not in told


def test_a_pattern_that_matches_nothing_names_a_few_weights():
    told = refusal(lora(), include_frozen="nothing*")
    assert re.search(r"Its frozen ones are .*embed_tokens.weight, \S+, \S+ and 18 more\.$", told)


def test_a_model_that_does_not_call_its_frozen_layers():
    model = nn.MultiheadAttention(4, 2)
    model.requires_grad_(False)
    model.in_proj_bias.requires_grad_(True)
    model.out_proj = nn.Linear(4, 4).requires_grad_(False)
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    steppe.attach(
        model,
        optimizer,
        steppe.rwp(ratio=0.1),
        include_frozen=("out_proj.weight",),
    )
    x = torch.randn(3, 2, 4)
    with pytest.raises(RuntimeError, match="No frozen layer that takes noise was called"):
        model(x, x, x)[0].sum().backward()
