"""`batch_invariant`: the bits of a sequence's log-probs do not depend on its company; where that cannot be, it is said.

Bits are compared with the same computation of the same sequence, so no test depends on the CPU's GEMMs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import batch_of
from torch import Tensor

from fused_grpo.errors import InputError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.engines.engine_choice import choose_engine
from fused_grpo.trainer.logging.run_output import RunOutput
from fused_grpo.trainer.types import Sample, SamplingParams

PROMPTS = [[2, 3], [2, 3], [4, 5, 6, 7, 8], [4, 5, 6, 7, 8], [9], [2, 3]]
COMPLETIONS = [[5, 6, 7, 1], [8, 1], [2, 3, 4, 5, 6, 1], [9], [7, 7, 7, 7, 7, 7, 7, 7, 1], [3, 1]]
COMPANIES = [[0], [1], [2], [3], [4], [5], [0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 0], [1, 4, 0]]


def samples() -> list[Sample]:
    advantages = torch.tensor([1.0, -0.5, 0.25, -1.0, 2.0, 0.5])
    sampling = [[-1.0] * len(ids) for ids in COMPLETIONS]
    return batch_of(prompt_ids=PROMPTS, completion_ids=COMPLETIONS, advantage=advantages, sampling_logprobs=sampling)


def old_logprobs(trainer: GRPOTrainer, batch: list[Sample]) -> list[Sample]:
    return trainer.learner.with_old_logprobs(batch)


def logprobs_of_the_loss(trainer: GRPOTrainer, batch: list[Sample]) -> list[Sample]:
    return trainer.learner.learn(batch)[0]


def reference_logprobs(trainer: GRPOTrainer, batch: list[Sample]) -> list[Sample]:
    batch = trainer.learner._with_reference(batch)
    return [replace(sample, old_logprobs=sample.ref_logprobs) for sample in batch]


@pytest.mark.parametrize("computed", [old_logprobs, logprobs_of_the_loss, reference_logprobs])
def test_the_company_of_a_sequence_changes_no_bit_of_its_logprobs(make_trainer, computed: Callable[..., Any]) -> None:
    trainer = make_trainer(batch_invariant=True, per_device_train_batch_size=8, beta=0.1, learning_rate=0.0)
    batch, logprobs = samples(), dict[int, Tensor]()
    for company in COMPANIES:
        for index, sample in zip(company, computed(trainer, [batch[index] for index in company]), strict=True):
            assert sample.old_logprobs is not None
            assert len(sample.old_logprobs) == len(COMPLETIONS[index])
            assert torch.equal(logprobs.setdefault(index, sample.old_logprobs), sample.old_logprobs), (company, index)


@pytest.mark.parametrize(("invariant", "sizes"), [(True, [1] * 6), (False, [4, 2])])
def test_each_sequence_is_a_micro_batch_of_its_own(make_trainer, invariant: bool, sizes: list[int]) -> None:
    learner = make_trainer(batch_invariant=invariant).learner
    packed = learner._pack(samples())
    assert [len(part.sequence_index) for part in packed] == sizes
    assert learner.packing.share_prompts is not invariant
    assert learner.packing.sequences == (1 if invariant else 4)
    if invariant:
        places = [len(prompt) + len(ids) for prompt, ids in zip(PROMPTS, COMPLETIONS, strict=True)]
        assert [tuple(part.input_ids.shape) for part in packed] == [(1, count) for count in places]


def test_a_step_is_the_same_but_for_the_order_of_its_sums(make_trainer) -> None:
    results = [make_trainer(batch_invariant=invariant).train().metrics for invariant in (True, False)]
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], abs=1e-6)
    assert results[0]["grad_norm"] == pytest.approx(results[1]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    "option",
    [{"share_prompts": True}, {"max_tokens_per_micro_batch": 64}, {"tf32": True}, {"vllm_dtype": "bfloat16"}],
)
def test_options_that_contradict_it_are_refused(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(InputError, match=rf"got {name}=.* with batch_invariant=True, want .*; fix: leave either out"):
        GRPOConfig(batch_invariant=True, **option)
    GRPOConfig(**option)


def told(equal: float | None, tmp_path, capsys, *, invariant: bool = True) -> str:
    args = GRPOConfig(str(tmp_path), batch_invariant=invariant)
    output = RunOutput(args, 9, is_main=True, facts={})
    for step in (1, 2, 3):
        metrics = {} if equal is None or step == 1 else {"sampling/bit_equal_fraction": equal}
        output.step({"step": step, "loss": 0.0, **metrics}, {})
    return " ".join(capsys.readouterr().out.split())


def test_the_console_says_once_whether_the_two_are_bit_equal(tmp_path, capsys) -> None:
    text = told(1.0, tmp_path, capsys)
    assert text.count("step 2: the log-probs of sampler and trainer are bit-equal") == text.count("equal") == 1
    text = told(0.99, tmp_path, capsys)
    assert text.count("step 2: the log-probs of sampler and trainer are not bit-equal (99.00% of") == 1
    assert text.count("equal") == 1
    assert "equal" not in told(None, tmp_path, capsys)
    assert "equal" not in told(1.0, tmp_path, capsys, invariant=False)


def test_a_sampler_that_computes_what_the_trainer_computes_is_bit_equal(make_trainer, capsys) -> None:
    trainer = make_trainer(batch_invariant=True, skip_zero_advantages=False, learning_rate=0.1, max_steps=2)

    def alone(prompt: list[int], completion: list[int]) -> list[float]:
        (part,) = trainer.learner._pack(
            batch_of(prompt_ids=[prompt], completion_ids=[completion], advantage=torch.ones(1))
        )
        output = trainer.learner.policy(part, num_tokens=1.0, num_sequences=1.0)
        return output.logprobs.tolist()

    def of_the_trainer(pairs: list[tuple[list[int], list[int]]], temperature: float) -> list[list[float]]:
        return [alone(*pair) for pair in pairs]

    trainer.engine.logprobs = of_the_trainer
    metrics = trainer.train().metrics
    assert metrics["sampling/bit_equal_fraction"] == 1.0
    assert metrics["sampling/sampling_logp_difference/max"] == 0.0
    assert "step 1: the log-probs of sampler and trainer are bit-equal" in " ".join(capsys.readouterr().out.split())


def test_transformers_completes_each_prompt_as_if_it_were_alone(make_model, tokenizer) -> None:
    model, greedy = make_model(), SamplingParams(n=1, max_tokens=8, temperature=0.0)
    calls, generate = list[int](), model.generate

    def counted(**inputs: Any) -> Any:
        calls.append(len(inputs["input_ids"]))
        return generate(**inputs)

    model.generate = counted
    engine = choose_engine("transformers", GRPOConfig(batch_invariant=True), model, tokenizer)
    together, alone = engine.generate(PROMPTS, greedy), [engine.generate([prompt], greedy) for prompt in PROMPTS]
    assert calls == [1] * 12
    assert together.completion_ids == [one.completion_ids[0] for one in alone]
    assert together.sampling_logprobs == [one.sampling_logprobs[0] for one in alone]
