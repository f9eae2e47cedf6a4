"""On-policy distillation: whole runs against full logits of both models, and what it cannot be combined with."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from batches import batch_of
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import OPTConfig, OPTForCausalLM

from fused_grpo.errors import CheckpointError, InputError, UnsupportedError, WrongTypeError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.learner import Learner
from fused_grpo.trainer.models.adapters import adapt
from fused_grpo.trainer.models.loading import load_teacher

TEMPERATURE, COEF, BETA = 0.8, 0.7, 0.3
WIDER = {"hidden_size": 48, "num_hidden_layers": 3, "num_key_value_heads": 2}
RUN = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_iterations": 2,
    "max_steps": 4,
    "temperature": TEMPERATURE,
    "max_grad_norm": 1e9,
    "distillation_coef": COEF,
    "distillation_beta": BETA,
}


def lines(trainer) -> list[dict]:
    return [json.loads(line) for line in (trainer.output_dir / "metrics.jsonl").read_text().splitlines()]


def recorded(trainer) -> list:
    rollouts, generate = [], trainer.engine.generate
    trainer.engine.generate = lambda *arguments: rollouts.append(generate(*arguments)) or rollouts[-1]
    return rollouts


def log_softmax(model, rollouts) -> list[torch.Tensor]:
    """Log-probs [T, V] for each completion, from one unpadded forward pass each."""
    logprobs = []
    for index, ids in enumerate(rollouts.completion_ids):
        prompt = rollouts.prompt_ids[index // rollouts.num_generations]
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        logprobs.append((logits / TEMPERATURE).log_softmax(-1))
    return logprobs


def divergence(p: torch.Tensor, q: torch.Tensor, kind: str) -> torch.Tensor:
    """[T] from log-probs [T, V] of student and teacher, by the formulas of docs/divergence.md."""

    def kl(a, b):
        return (a.exp() * (a - b)).sum(-1)

    if kind == "reverse_kl":
        return kl(p, q)
    m = ((1 - BETA) * p.exp() + BETA * q.exp()).log()
    return kl(q, p) if kind == "forward_kl" else BETA * kl(q, m) + (1 - BETA) * kl(p, m)


def replay(model, teacher, trainer, rollouts, *, kind: str, loss_type: str) -> list[tuple[float, float, float]]:
    """Train `model` on the rollouts; (loss, gradient norm, mean divergence) of every step."""
    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0), []
    for step in range(RUN["max_steps"]):
        batch = rollouts[step // 2]
        texts = trainer.processing_class.batch_decode(batch.completion_ids, skip_special_tokens=True)
        groups = torch.tensor(trainer.rewards.functions[0](completions=texts)).view(-1, 4)
        A = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        student = log_softmax(model, batch)
        chosen = [
            x.gather(1, torch.tensor(ids)[:, None])[:, 0] for x, ids in zip(student, batch.completion_ids, strict=True)
        ]
        if step % 2 == 0:
            old = [x.detach() for x in chosen]
        with torch.no_grad():
            teacher_logprobs = log_softmax(teacher, batch)
        apart = [divergence(p, q, kind) for p, q in zip(student, teacher_logprobs, strict=True)]
        terms = []
        for new, before, a, d in zip(chosen, old, A, apart, strict=True):
            ratio = (new - before).exp()
            terms.append(COEF * d - torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a))
        means = torch.stack([x.mean() for x in terms])
        loss = torch.cat(terms).mean() if loss_type == "dapo" else means.mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        steps.append((loss.item(), norm.item(), torch.cat(apart).mean().item()))
    return steps


@pytest.fixture
def make_model(make_model):
    """In fp64, so that Adam does not turn the rounding of gradients that ought to be zero into updates."""
    return lambda *arguments, **options: make_model(*arguments, **options).double()


@pytest.mark.parametrize(
    ("kind", "loss_type", "reward"),
    [("reverse_kl", "dapo", "digits"), ("forward_kl", "grpo", "digits"), ("jsd", "dapo", None)],
)
def test_steps_are_those_of_full_logits_of_both_models(make_trainer, make_model, kind, loss_type, reward):
    """From a teacher with another width and depth; without a reward the divergence is the whole loss."""
    teacher, start = make_model(seed=3, **WIDER), make_model()
    options = {"distillation_kind": kind, "loss_type": loss_type, **RUN}
    rewards = () if reward else (None,)
    trainer = make_trainer(*rewards, teacher_model=copy.deepcopy(teacher), **options)
    rollouts = recorded(trainer)
    trainer.train()
    expected = replay(start, teacher, trainer, rollouts, kind=kind, loss_type=loss_type)
    for line, step in zip(lines(trainer), expected, strict=True):
        actual = [line[name] for name in ("loss", "grad_norm", "distillation")]
        assert actual == pytest.approx(step, rel=1e-5, abs=1e-6)
    for name, parameter in start.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], parameter, rtol=0, atol=1e-6)


@pytest.fixture
def adapted_engine(served_engine):
    """Samples with the trainer's own model, in whose layers the adapter is."""

    class AdaptedEngine(served_engine.__base__):
        def load_weights(self, named_weights, version) -> None:
            self.weight_version = version

    return AdaptedEngine


BATCH = batch_of(
    prompt_ids=[[2, 3, 4], [5, 6]],
    completion_ids=[[7, 8, 9, 1], [10, 11, 12, 13, 1]],
    sampling_logprobs=None,
    advantage=torch.tensor([1.0, -0.5]),
)


def numbers(trainer, *names: str) -> list[float]:
    return [line[name] for line in lines(trainer) for name in (names or ("loss", "grad_norm", "distillation"))]


@pytest.mark.parametrize("cut", [{"per_device_train_batch_size": 8}, {"max_tokens_per_micro_batch": 20}], ids=str)
def test_neither_packing_nor_the_cut_into_micro_batches_changes_a_step(make_trainer, make_model, cut):
    runs = []
    for options in (RUN, RUN, {**RUN, **cut}):
        cuts = {"gradient_accumulation_steps": 8 // options["per_device_train_batch_size"]}
        trainer = make_trainer(teacher_model=make_model(seed=3, **WIDER), **{**options, **cuts})
        # Of the first run, every sequence has a padded row.
        trainer.learner.packing = replace(trainer.learner.packing, share_rows=bool(runs))
        trainer.train()
        runs.append(numbers(trainer))
    assert runs[1] == pytest.approx(runs[0], rel=1e-6, abs=1e-9)
    assert runs[2] == pytest.approx(runs[0], rel=1e-6, abs=1e-9)


def test_a_teacher_that_mixes_packed_sequences_gets_each_in_its_own_row(make_trainer, tokenizer, caplog):
    shape = {"hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32, "num_hidden_layers": 2, "dropout": 0.0}
    config = OPTConfig(**shape, vocab_size=len(tokenizer), num_attention_heads=2, pad_token_id=0)
    teacher = OPTForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    trainer = make_trainer(teacher_model=copy.deepcopy(teacher), **{**RUN, "max_steps": 1})
    assert "OPTForCausalLM does not keep the sequences of a packed row apart" in caplog.text
    student, rollouts = copy.deepcopy(trainer.model), recorded(trainer)
    trainer.train()
    pairs = zip(log_softmax(student, rollouts[0]), log_softmax(teacher, rollouts[0]), strict=True)
    expected = torch.cat([divergence(p, q, "reverse_kl") for p, q in pairs]).mean().item()
    assert numbers(trainer, "distillation") == pytest.approx([expected], rel=1e-6)


def test_the_reference_is_a_teacher_without_a_kl_term(make_trainer, make_model):
    runs = {}
    for name, teacher in (("self", "self"), ("copy", make_model())):
        trainer = make_trainer(teacher_model=teacher, **RUN)
        trainer.train()
        runs[name] = numbers(trainer)
    assert runs["self"] == runs["copy"]
    assert runs["self"][2] == 0.0  # the divergence from itself, in the first step
    assert runs["self"][5] > 1e-6
    assert "kl" not in lines(trainer)[0]


def test_with_an_adapter_the_teacher_is_the_base(make_trainer, make_model, adapted_engine):
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj", "lm_head"], "init_lora_weights": False}
    runs = {}
    for name, teacher in (("self", "self"), ("base", make_model())):
        trainer = make_trainer(engine=adapted_engine, teacher_model=teacher, peft_config=LoraConfig(**lora), **RUN)
        trainer.train()
        assert trainer.learner.reference is None
        trained = {key: value for key, value in trainer.model.state_dict().items() if "lora_" in key}
        runs[name] = numbers(trainer), trained
    assert runs["self"][0] == pytest.approx(runs["base"][0], rel=1e-9)
    assert runs["self"][0][2] > 1e-3
    for key, value in runs["self"][1].items():
        torch.testing.assert_close(runs["base"][1][key], value, rtol=0, atol=1e-9)


def test_an_adapter_that_the_model_came_with_is_the_teachers_as_it_was(make_model):
    args = GRPOConfig(distillation_coef=1.0, learning_rate=1e-2, lr_scheduler_type="constant", bf16=False)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    accelerator = Accelerator(cpu=True)
    model = adapt(get_peft_model(make_model(), lora), None, args, accelerator, keep_reference=True)
    learner = Learner(model, args, accelerator, max_steps=2, teacher="self")
    first, second = (learner.learn(BATCH)[1]["distillation"] for _ in range(2))
    assert first == 0.0
    assert second > 1e-6


def ones(completions, **_):
    return [1.0] * len(completions)


@pytest.mark.parametrize("rewards", [ones, None, pytest.param([], marks=pytest.mark.learning)])
def test_completions_without_an_advantage_learn_from_the_teacher(
    make_trainer, make_model, rewards, learning_seed, learned
):
    options = {"distillation_coef": 1.0, "learning_rate": 1e-2, "max_steps": 12, "per_device_train_batch_size": 8}
    options |= {"num_generations": 1 if rewards is None else 4, "seed": learning_seed}
    rows = [{"prompt": "1+2="}]
    trainer = make_trainer(rewards, teacher_model=make_model(seed=3), dataset=rows * 8, **options)
    rollouts = recorded(trainer)
    trainer.train()
    for line, batch in zip(lines(trainer), rollouts, strict=True):
        assert line["completion_tokens"] == sum(map(len, batch.completion_ids))
        assert line["loss"] == pytest.approx(line["distillation"], rel=1e-6)
        assert line["reward_std_within_groups"] == 0 or rewards is None
    divergences = numbers(trainer, "distillation")
    learned(
        "a teacher and no rewards: fall of the divergence", measured=1 - divergences[-1] / divergences[0], least=0.15
    )


def test_an_evaluation_has_the_loss_of_a_step(make_trainer, make_model):
    rows = [{"prompt": "1+2="}, {"prompt": "3+4="}]
    teacher = make_model(seed=3)
    options = {"num_generations_eval": 2, "distillation_coef": COEF, "temperature": TEMPERATURE}
    trainer = make_trainer(None, teacher_model=copy.deepcopy(teacher), eval_dataset=rows, **options)
    rollouts = recorded(trainer)
    loss = trainer.evaluate()["eval_loss"]
    pairs = zip(log_softmax(trainer.model, rollouts[0]), log_softmax(teacher, rollouts[0]), strict=True)
    expected = COEF * torch.cat([divergence(p, q, "reverse_kl") for p, q in pairs]).mean().item()
    assert loss == pytest.approx(expected, rel=1e-5)


def test_dropout_of_the_policy_is_not_the_teachers(make_trainer, adapted_engine):
    """The teacher is the policy itself here, without its adapter, while the policy is being trained."""
    lora = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.5)
    trainer = make_trainer(engine=adapted_engine, teacher_model="self", peft_config=lora, **RUN)
    modes = []
    first = trainer.model.get_base_model().model.layers[0].self_attn.q_proj
    first.base_layer.register_forward_hook(lambda *_: modes.append((first.training, first.disable_adapters)))
    trainer.learner.learn(BATCH)
    assert set(modes) == {(False, True), (True, False)}
    assert trainer.model.training


@pytest.mark.parametrize("changed", [{"distillation_coef": 0.1}, {"seed": 4}], ids=str)
def test_a_run_does_not_go_on_with_another_teacher(make_trainer, make_model, changed):
    options = {**RUN, "save_steps": 1, "overwrite_output_dir": False}
    make_trainer(teacher_model=make_model(seed=3), **options).train()
    teacher = make_model(seed=changed.pop("seed", 3))
    trainer = make_trainer(teacher_model=teacher, **{**options, "max_steps": 6, **changed})
    with pytest.raises(CheckpointError, match=r"got teacher=.* want teacher="):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distillation_coef": -1.0}, "distillation_coef=-1.0, want at least 0, and finite"),
        ({"distillation_coef": float("nan")}, "distillation_coef=nan"),
        ({"distillation_kind": "kl"}, "distillation_kind='kl', want .*'reverse_kl', 'forward_kl', 'jsd'"),
        ({"distillation_beta": 1.0}, "distillation_beta=1.0, want between 0 and 1, .*fix: .*'reverse_kl' for its 1"),
        ({"distillation_coef": 1.0, "entropy_coef": 0.1}, "=1.0 with entropy_coef=0.1, want no entropy bonus"),
        ({"distillation_coef": 1.0, "use_adaptive_entropy": True}, "use_adaptive_entropy=True"),
        ({"distillation_coef": 1.0, "top_p": 0.9}, "with top_p=0.9, .* fix: .*, or sampling_support='off'"),
        ({"distillation_coef": 1.0, "generation_kwargs": {"min_p": 0.1}}, "min_p=0.1"),
    ],
)
def test_options_that_do_not_go_with_a_teacher_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        GRPOConfig(**options)


def test_truncated_sampling_without_supports_has_a_teacher(make_trainer):
    make_trainer(teacher_model="self", distillation_coef=1.0, top_p=0.9, sampling_support="off", max_steps=1).train()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"distillation_coef": 1.0}, InputError, "distillation_coef=1.0 without a teacher_model, want one"),
        ({"teacher_model": "self"}, InputError, "teacher_model with distillation_coef=0, where it has no effect"),
        ({"teacher_model": 7, "distillation_coef": 1.0}, WrongTypeError, "got a int as teacher_model, want a path"),
        (
            {"teacher_model": "self", "distillation_coef": 1.0, "reward": None, "dynamic_sampling": 1},
            InputError,
            "got dynamic_sampling=1 without reward_funcs",
        ),
        (
            {"teacher_model": "self", "distillation_coef": 1.0, "num_generations": 1},
            InputError,
            "num_generations=1 with reward_funcs, want at least 2",
        ),
        (
            {
                "teacher_model": "self",
                "distillation_coef": 1.0,
                "peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
            },
            UnsupportedError,
            "got a teacher_model, and the policy has virtual tokens",
        ),
    ],
)
def test_arguments_that_do_not_go_with_a_teacher_are_refused(make_trainer, arguments, error, message):
    with pytest.raises(error, match=message):
        make_trainer(**arguments)


def test_further_rows_of_a_teachers_vocabulary_take_no_part(make_trainer, make_model):
    larger = make_model(seed=3, vocab_size=30)
    same, runs = copy.deepcopy(larger), []
    same.resize_token_embeddings(22)
    for teacher in (larger, same):
        trainer = make_trainer(teacher_model=teacher, **RUN)
        trainer.train()
        runs.append(numbers(trainer))
    assert runs[0] == pytest.approx(runs[1], rel=1e-9)


def test_a_teacher_has_the_vocabulary_of_the_policy(make_trainer, make_model, tokenizer, tmp_path):
    options = {"distillation_coef": 1.0}
    with pytest.raises(
        InputError, match=r"vocabulary of 20 and a policy with one of 22, .*resize_token_embeddings\(20"
    ):
        make_trainer(teacher_model=make_model(vocab_size=20), **options)
    tokenizer.save_pretrained(tmp_path / "teacher")
    make_model().save_pretrained(tmp_path / "teacher")
    assert make_trainer(teacher_model=tmp_path / "teacher", **options).learner.teacher is not None
    file = tmp_path / "teacher" / "tokenizer.json"
    file.write_text(file.read_text().replace('"3":', '"x":').replace('"4":', '"3":').replace('"x":', '"4":'))
    with pytest.raises(InputError, match=r"2 tokens of the policy's have other ids \(\d+ is '[34]' and not '[34]'\)"):
        make_trainer(teacher_model=tmp_path / "teacher", **options)


def test_the_policy_is_no_teacher_of_itself_while_it_moves(make_trainer, make_model, monkeypatch):
    trainer = make_trainer()
    with pytest.raises(InputError, match="got the model that is trained as its teacher_model"):
        type(trainer.learner)(trainer.model, trainer.args, trainer.accelerator, max_steps=1, teacher=trainer.model)
    base, other = make_model(), make_model(1)
    other.model.embed_tokens = base.model.embed_tokens
    with pytest.raises(InputError, match="or one that has some of its weights"):
        load_teacher(other, trainer.args, trainer.accelerator, None, base)
    for policy in (base, get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))):
        trained = [parameter.requires_grad for parameter in base.parameters()]
        with pytest.raises(InputError, match="got the model that is trained as its teacher_model"):
            load_teacher(base, trainer.args, trainer.accelerator, None, policy)
        assert [parameter.requires_grad for parameter in base.parameters()] == trained  # what they share
