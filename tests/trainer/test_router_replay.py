"""Runs that replay an engine's experts: what the option changes, what a checkpoint keeps, and what is refused."""

import copy
import hashlib
import logging
from contextlib import nullcontext
from dataclasses import replace
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from batches import batch_of
from clocked import read_log
from mixtures import EXPERTS, experts_of, mixture
from numerics import logprobs_of
from safetensors.torch import save_file
from transformers import Qwen2Config

from fused_grpo.errors import InputError, UnavailableError, UnsupportedError, WrongTypeError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.batching.rollout_buffer import as_tensors
from fused_grpo.trainer.checkpoint.training_state import check_rollouts
from fused_grpo.trainer.engines import engine_choice
from fused_grpo.trainer.engines.checked_engine import WeightCheck
from fused_grpo.trainer.engines.engine_choice import check_routing
from fused_grpo.trainer.learner import Learner

REPLAY = {"router_replay": True, "vllm_mode": "server", "max_steps": 4, "logprob_mismatch": "warn"}
METRIC = "sampling/routing_disagreement"


@pytest.fixture
def make_model():
    return lambda seed=0: mixture("Qwen3Moe")


@pytest.fixture
def routed_engine(served_engine):
    class RoutedEngine(served_engine):
        """Computes in bf16, and says which experts it computed with; with `spoil` after a change of these."""

        name, spoil = "routed", staticmethod(lambda experts: experts)

        def __init__(self, model, tokenizer):
            super().__init__(model, tokenizer)
            self.model = self.model.bfloat16()

        def load_weights(self, named_weights, version):
            with TemporaryDirectory() as folder:  # under the names of a checkpoint, where experts are apart
                self.model.config.save_pretrained(folder)
                save_file(dict(named_weights), f"{folder}/model.safetensors", {"format": "pt"})
                self.model = type(self.model).from_pretrained(folder, dtype=torch.bfloat16)
            self.weight_version = version

        def generate(self, prompt_ids, sampling):
            made = super().generate(prompt_ids, sampling)
            pairs = [(prompt_ids[place // sampling.n], ids) for place, ids in enumerate(made.completion_ids)]
            return replace(made, routed_experts=[self.spoil(experts_of(self.model, *pair)) for pair in pairs])

    return RoutedEngine


def learned(model, *, count=8, parts=1, teacher=None, **options):
    """(model, samples, metrics) of a step on what a bf16 copy of the model sampled, of two prompts."""
    sampler, generator = copy.deepcopy(model).bfloat16(), torch.Generator().manual_seed(3)
    ids = torch.randint(2, 22, (count, 24), generator=generator).tolist()
    pairs = [(ids[place // 4][:8], row[8:]) for place, row in enumerate(ids)]
    batch = batch_of(
        prompt_ids=[prompt for prompt, _ in pairs],
        completion_ids=[completion for _, completion in pairs],
        sampling_logprobs=[logprobs_of(sampler, *pair, 1.0) for pair in pairs],
        routed_experts=[experts_of(sampler, *pair) for pair in pairs],
        advantage=torch.linspace(-1, 1, count),
    )
    shared = {"per_device_train_batch_size": count // parts, "gradient_accumulation_steps": parts, "bf16": False}
    shared |= {"use_cpu": True, "gradient_checkpointing": False, "learning_rate": 1e-3}
    args = GRPOConfig(num_generations=8, **shared | options)
    return model, *Learner(model, args, Accelerator(cpu=True), max_steps=1, teacher=teacher).learn(batch)


def same_weights(one, other, **bounds):
    torch.testing.assert_close(one.state_dict(), other.state_dict(), **bounds)


def test_replay_takes_the_routing_out_of_the_difference_to_the_sampler(make_model):
    # Which choices bf16 changes is chance, and of many tokens their share is not.
    _, _, off = learned(make_model(), count=32)
    _, _, on = learned(make_model(), count=32, router_replay=True)
    assert off[METRIC] > 0.005
    assert 0.005 < on[METRIC] <= off[METRIC] * 1.5
    for kind in ("mean", "max"):
        assert on[f"sampling_difference_{kind}"] < 0.6 * off[f"sampling_difference_{kind}"]


@pytest.mark.parametrize("options", [{"parts": 4}, {"max_tokens_per_micro_batch": 60}, {"share_prompts": False}])
def test_micro_batches_learn_the_same(make_model, options):
    sgd = {"router_replay": True, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0}
    one, _, metrics = learned(make_model(), **sgd)
    other, _, other_metrics = learned(make_model(), **sgd, **options)
    same_weights(one, other, rtol=0, atol=1e-6)
    # A shared prompt counts once: without that, the differences in completions are a share of a fifth more tokens.
    assert other_metrics[METRIC] == pytest.approx(
        metrics[METRIC], rel=0.1 if options.get("share_prompts", True) else 0.25
    )


def test_recomputed_layers_learn_the_same_bits(make_model):
    one, _, metrics = learned(make_model(), router_replay=True)
    other, _, other_metrics = learned(make_model(), router_replay=True, gradient_checkpointing=True)
    same_weights(one, other, rtol=0, atol=0)
    assert other_metrics == metrics


def test_reference_and_teacher_have_their_own_routers(make_model):
    options = {"beta": 0.1, "distillation_coef": 0.5, "teacher": "self", "share_prompts": False}
    _, on, metrics = learned(make_model(), router_replay=True, **options)
    assert metrics["distillation"] > 1e-5  # of the same weights, from other experts
    model = make_model()
    for sample in on:
        own = logprobs_of(model, sample.prompt_ids, sample.completion_ids, 1.0)
        torch.testing.assert_close(sample.ref_logprobs, torch.tensor(own), rtol=0, atol=1e-5)
        assert sample.routed_experts is not None


def test_nothing_is_left_behind_a_step(make_model):
    model, _, _ = learned(make_model(), router_replay=True)
    ids = torch.arange(2, 12)[None]
    fresh = make_model()
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, fresh(ids).logits)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def result(trainer):
    records = read_log(trainer.output_dir / "metrics.jsonl")
    weights = b"".join(value.numpy().tobytes() for value in trainer.model.state_dict().values())
    return records, hashlib.sha256(weights).hexdigest()


@pytest.mark.parametrize("options", [{"generate_ahead": 2}, {"steps_per_generation": 2, "num_iterations": 2}])
def test_a_resumed_run_replays_what_was_sampled_before(make_trainer, routed_engine, options):
    routed_engine.spoil = staticmethod(lambda own: (own + 1) % EXPERTS)
    options = {**REPLAY, "engine": routed_engine, "save_steps": 1, "overwrite_output_dir": False, **options}
    whole = make_trainer(**options)
    whole.train()
    expected = result(whole)
    assert len(expected[0]) == 4
    assert min(record[METRIC] for record in expected[0]) > 0.5
    resumed = make_trainer(**options)
    resumed.train(resume_from_checkpoint=str(whole.output_dir / "checkpoint-1"))
    assert result(resumed) == expected


WRONG = {
    "one row too many": (lambda own: torch.cat([own, own[:1]]), r"experts of shape"),
    "a layer less": (lambda own: own[:, 1:], r"experts of shape .* in 3 layers"),
    "no such expert": (lambda own: own + EXPERTS, r"of 8 in layer 0"),
    "negative": (lambda own: own.to(torch.int16) - 1, "experts -1 to [0-9] of 8"),
    "no number": (lambda own: own[None], r"experts of shape \(1, "),
    "zeros": (lambda own: own * 0, "an expert twice for a token"),
}


@pytest.mark.parametrize("case", WRONG)
def test_experts_that_the_model_does_not_have_are_refused(make_trainer, routed_engine, case):
    change, message = WRONG[case]
    trainer = make_trainer(engine=routed_engine, **REPLAY)
    trainer.engine.spoil = change
    with pytest.raises(UnavailableError, match=rf"got .*{message}.* from the routed engine"):
        trainer.train()


OTHER_TYPES = {
    "list": lambda own: own.tolist(),
    "ndarray": lambda own: own.numpy(),
    "NoneType": lambda own: None,
    "float32": lambda own: own.float(),
    "bool": lambda own: own.bool(),
    "uint16": lambda own: own.to(torch.uint16),
}


@pytest.mark.parametrize("kind", OTHER_TYPES)
def test_experts_of_another_type_are_refused(make_trainer, routed_engine, kind):
    trainer = make_trainer(engine=routed_engine, **REPLAY)
    trainer.engine.spoil = OTHER_TYPES[kind]
    with pytest.raises(WrongTypeError, match=rf"got routed_experts with .*{kind}.* from the routed engine.*fix:"):
        trainer.train()


def test_experts_of_a_checkpoint_are_checked_like_an_engines(make_trainer, make_model):
    batch = batch_of(prompt_ids=[[2, 3]] * 4, completion_ids=[[4, 5]] * 4, routed_experts=[torch.zeros(3, 3, 2)] * 4)
    learner = make_trainer(vllm_mode="server").learner
    for experts, wrong in ((torch.arange(2).expand(3, 3, 2), None), (torch.arange(2), r"experts of shape \(2,\)")):
        table = as_tensors([replace(sample, routed_experts=experts) for sample in batch])
        with nullcontext() if wrong is None else pytest.raises(ValueError, match=rf"prefetched has {wrong}"):
            check_rollouts({"prefetched": table}, None, learner, step=0)


def test_rollouts_of_a_run_without_replay_are_trained_without_it(make_trainer, routed_engine, caplog):
    class Quiet(routed_engine):
        def generate(self, prompt_ids, sampling):
            made = super().generate(prompt_ids, sampling)
            return made if sampling.routed_experts else replace(made, routed_experts=None)

    options = {**REPLAY, "engine": Quiet, "steps_per_generation": 2, "save_steps": 1, "overwrite_output_dir": False}
    make_trainer(**options | {"router_replay": False, "max_steps": 1}).train()
    resumed = make_trainer(**options)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=True)
    assert "rollouts in progress without experts are trained without them" in caplog.text
    assert [METRIC in record for record in result(resumed)[0]] == [False, False, True, True]


def test_completions_with_wrong_experts_can_be_dropped(make_trainer, routed_engine):
    trainer = make_trainer(
        engine=routed_engine, rollout_failure="drop", dynamic_sampling=2, **REPLAY | {"max_steps": 1}
    )
    calls = iter(range(100))
    trainer.engine.spoil = lambda own: own[1:] if next(calls) == 1 else own
    trainer.train()
    assert result(trainer)[0][0]["rollouts/dropped"] == 4.0


def test_an_engine_without_experts_is_refused(make_trainer, served_engine):
    trainer = make_trainer(engine=served_engine, **REPLAY)
    with pytest.raises(UnsupportedError, match=r"router_replay=True and no experts .* scripted engine.*fix: vLLM"):
        trainer.train()


def test_without_replay_one_warning_has_what_was_measured(make_trainer, routed_engine, caplog):
    routed_engine.spoil = staticmethod(lambda own: own.where(torch.arange(len(own))[:, None, None] > 0, own.flip(0)))
    trainer = make_trainer(engine=routed_engine, vllm_mode="server", logprob_mismatch="warn")
    with caplog.at_level(logging.WARNING):
        trainer.train()
    said = [record.getMessage() for record in caplog.records if "router_replay=True" in record.getMessage()]
    assert len(said) == 1
    measured = result(trainer)[0][0]
    assert f"{measured[METRIC]:.2%} of the choices of experts" in said[0]
    assert f"{measured['sampling/sampling_logp_difference/max']:.3g} at most" in said[0]


@pytest.mark.parametrize(
    ("largest", "share", "case", "said"),
    [
        (0.5, {}, "a mixture", 1),
        (0.5, {METRIC: 0.0}, "a mixture", 0),
        (1e-4, {}, "a mixture", 0),
        (0.5, {}, "no weights of its own", 0),
        (0.5, {}, "replay", 0),
        (0.5, {}, "dense", 0),
    ],
)
def test_it_is_said_where_experts_may_be_the_reason(make_model, caplog, largest, share, case, said):
    args = GRPOConfig(use_cpu=True, router_replay=case == "replay", logprob_mismatch="warn")
    own_weights = case != "no weights of its own"
    kinds = {"own_weights": own_weights, "is_mixture": case != "dense"}
    check = WeightCheck(args, make_model(), torch.device("cpu"), **kinds)
    metrics = {"sampling_difference_mean": 0.1, "sampling_difference_max": largest, **share}
    for _ in range(2):
        check.check_step(metrics, lambda dtype: 0.0, engine=SimpleNamespace(name="vllm", weight_version=0))
    assert sum("mixture of experts" in record.getMessage() for record in caplog.records) == said


@pytest.fixture
def start(tmp_path, tokenizer, make_model):
    def start(**named):
        args = GRPOConfig(str(tmp_path), use_cpu=True, router_replay=True, **named.pop("options", {}))
        rows = [{"prompt": "1"}] * 8
        GRPOTrainer(make_model(), lambda completions, **_: [0.0], args, rows, processing_class=tokenizer, **named)

    return start


def test_what_cannot_replay_is_refused_at_the_start(start, make_model):
    with pytest.raises(InputError, match=r"router_replay=True with the transformers engine.* fix: use_vllm=True"):
        start(options={"use_vllm": False})
    with pytest.raises(InputError, match=r"router_replay=True with a rollout_func.* fix:"):
        start(rollout_func=lambda prompts, trainer: {})
    args, config = GRPOConfig(router_replay=True, use_cpu=True), make_model().config
    with pytest.raises(InputError, match=r"router_replay=True with the transformers engine"):
        check_routing(args, "transformers", config)
    check_routing(args, "server", config)
    with pytest.raises(InputError, match=r"a model of type qwen2, which has no experts"):
        check_routing(args, "server", Qwen2Config())
    check_routing(replace(args, router_replay=False), "transformers", Qwen2Config())


@pytest.mark.engine
def test_a_vllm_without_its_second_model_runner_is_refused_at_the_start(start):
    with pytest.raises(UnsupportedError, match=r"no Triton for its device, want its model runner V2.* fix: a GPU"):
        start(options={"use_vllm": True})


@pytest.mark.parametrize("replay", [True, False])
def test_engines_are_asked_for_experts(monkeypatch, make_model, tokenizer, replay):
    asked = []
    monkeypatch.setattr(engine_choice, "VLLMEngine", lambda model, tokenizer, options: asked.append(options))
    monkeypatch.setattr(engine_choice, "VLLMServerEngine", lambda *_, **options: asked.append(options))
    monkeypatch.setattr(engine_choice, "check_installed", lambda: None)
    args = GRPOConfig(router_replay=replay, use_cpu=True)
    for name in ("vllm", "server"):
        engine_choice.choose_engine(name, args, make_model(), tokenizer)
    assert asked[0].needed == ({"enable_return_routed_experts": True} if replay else {})
    assert asked[1]["routed_experts"] is args.sampling(seed=0).routed_experts is replay
