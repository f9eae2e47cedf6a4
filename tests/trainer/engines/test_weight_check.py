"""The check of log-probs accepts rounding, and nothing else."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fused_grpo.errors import WeightSyncError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.engines.checked_engine import WeightCheck
from fused_grpo.trainer.engines.rollout_func import FunctionEngine


def engine_in(dtype: torch.dtype | None) -> Any:
    return SimpleNamespace(name="vllm", weight_version=3, weight_dtype=dtype)


def compare(mean: float, largest: float, dtype: torch.dtype, device: str = "cpu", bound: float | None = None) -> None:
    args = GRPOConfig(bf16=False, max_logprob_difference=bound)
    WeightCheck(args, nn.Linear(1, 1), torch.device(device))(mean, largest, engine=engine_in(dtype))


@pytest.mark.parametrize(
    ("dtype", "mean", "largest"),
    [(torch.float32, 5e-7, 9e-6), (torch.float16, 0.004, 0.3), (torch.bfloat16, 0.03, 1.5)],
)
def test_rounding_of_the_dtype_passes(dtype: torch.dtype, mean: float, largest: float) -> None:
    compare(mean, largest, dtype)


@pytest.mark.parametrize(
    ("dtype", "mean", "largest", "message"),
    [
        (torch.float32, 1e-5, 2e-3, r"got a max difference of 0\.002 .* version 3, want at most 0\.001 .* fix: "),
        (torch.float16, 0.03, 0.03, "got a mean difference"),
        (torch.bfloat16, 0.2, 0.6, "got a mean difference"),
        (torch.float32, float("nan"), float("nan"), "nan"),
        (torch.bfloat16, float("nan"), float("nan"), "nan"),
    ],
)
def test_more_than_rounding_is_an_error(dtype: torch.dtype, mean: float, largest: float, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        compare(mean, largest, dtype)


@pytest.mark.parametrize(("name", "takes_adapter"), [("vllm-server", True), ("vllm-server", False), ("vllm", True)])
def test_servers_of_another_base_are_named_where_they_have_their_own(name: str, takes_adapter: bool) -> None:
    engine = SimpleNamespace(name=name, weight_version=0, weight_dtype=torch.float32, takes_adapter=takes_adapter)
    check = WeightCheck(GRPOConfig(bf16=False), nn.Linear(1, 1), torch.device("cpu"))
    with pytest.raises(WeightSyncError) as raised:
        check(1.0, 2.0, engine=engine)
    assert ("servers of the base that is trained" in str(raised.value)) == (name == "vllm-server" and takes_adapter)


def test_in_fp32_a_gpu_may_round_to_tf32_and_a_cpu_may_not() -> None:
    compare(0.004, 0.3, torch.float32, device="cuda")
    with pytest.raises(WeightSyncError, match=r"got a mean difference of 0\.03 .* want at most 0\.02 in float32"):
        compare(0.03, 0.3, torch.float32, device="cuda")
    with pytest.raises(WeightSyncError, match="got a max difference"):
        compare(0.004, 0.3, torch.float32)


def test_an_option_replaces_the_bound_in_both_directions() -> None:
    compare(0.01, 0.05, torch.float32, bound=0.1)
    with pytest.raises(WeightSyncError, match="want at most 1e-05"):
        compare(5e-7, 9e-5, torch.float32, bound=1e-5)


def test_warn_says_it_once_with_the_fix_and_a_healthy_run_says_nothing(caplog) -> None:
    model, cpu, names = nn.Linear(1, 1), torch.device("cpu"), {"engine": engine_in(torch.float32)}
    warns = WeightCheck(GRPOConfig(logprob_mismatch="warn", bf16=False), model, cpu)
    warns(1e-6, 1e-5, **names)
    assert caplog.records == []
    for _ in range(2):
        warns(0.1, 0.5, **names)
    (record,) = caplog.records
    assert "got a max difference of 0.5 between the log-probs of the vllm engine" in record.getMessage()
    assert "a larger max_logprob_difference" in record.getMessage()
    with pytest.raises(WeightSyncError, match="got a max difference"):
        WeightCheck(GRPOConfig(bf16=False), model, cpu)(0.1, 0.5, **names)
    with pytest.raises(WeightSyncError, match="got a max difference"):
        WeightCheck(GRPOConfig(logprob_mismatch="fail", bf16=False), model, cpu, own_weights=False)(0.1, 0.5, **names)
    WeightCheck(GRPOConfig(bf16=False, max_logprob_difference=0.6), model, cpu)(0.1, 0.5, **names)


@pytest.mark.parametrize(
    ("bf16", "sampler", "bound"),
    [
        (False, None, "0.001 in float32"),
        (False, torch.float32, "0.001 in float32"),
        (False, torch.float16, "0.02 in float16"),
        (False, torch.bfloat16, "0.1 in bfloat16"),
        (True, torch.float32, "0.1 in bfloat16"),
        (True, torch.float16, "0.1 in bfloat16"),
    ],
)
def test_the_bound_is_of_the_coarser_of_trainer_and_sampler(bf16, sampler, bound) -> None:
    check = WeightCheck(GRPOConfig(bf16=bf16), nn.Linear(1, 1), torch.device("cpu"))
    limit = float(bound.split()[0])
    check(0.9 * limit, 0.9 * limit, engine=engine_in(sampler))
    with pytest.raises(WeightSyncError, match=f"at weight version 3, want at most {bound}"):
        check(1.1 * limit, 1.1 * limit, engine=engine_in(sampler))


def test_what_16_bits_do_to_the_policy_is_allowed_to_its_sampler() -> None:
    asked: list[torch.dtype] = []

    def rounding(dtype: torch.dtype) -> float:
        asked.append(dtype)
        return 0.06

    check = WeightCheck(GRPOConfig(bf16=False), nn.Linear(1, 1), torch.device("cpu"))
    check(0.09, 1.0, engine=engine_in(torch.bfloat16), rounding=rounding)
    assert asked == []  # it costs two passes
    check(0.17, 3.0, engine=engine_in(torch.bfloat16), rounding=rounding)
    assert asked == [torch.bfloat16]
    for mean in (0.19, float("nan")):
        with pytest.raises(WeightSyncError, match=r"want at most 0\.1 in bfloat16"):
            check(mean, 3.0, engine=engine_in(torch.bfloat16), rounding=rounding)
    with pytest.raises(WeightSyncError, match="in float32"):
        check(0.01, 0.05, engine=engine_in(torch.float32), rounding=rounding)
    strict = WeightCheck(GRPOConfig(bf16=False, max_logprob_difference=0.1), nn.Linear(1, 1), torch.device("cpu"))
    with pytest.raises(WeightSyncError, match=r"want at most 0\.1"):
        strict(0.17, 3.0, engine=engine_in(torch.bfloat16), rounding=rounding)
    assert len(asked) == 3


AGREES, DIFFERS = (1e-6, 1e-5), (0.01, 0.5)


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([AGREES, AGREES, DIFFERS, DIFFERS], r"got a max difference of 0\.5 .* turn 3 differs, and .* fix: token ids"),
        ([DIFFERS, AGREES], "the vllm engine and .* the engine does not serve the trainer's weights"),
    ],
)
def test_the_first_turn_that_differs_is_named(turns, message) -> None:
    check = WeightCheck(GRPOConfig(bf16=False), nn.Linear(1, 1), torch.device("cpu"))
    check(*AGREES, turns=[AGREES] * 3, engine=engine_in(None))
    with pytest.raises(WeightSyncError, match=message):
        check(*DIFFERS, turns=turns, engine=engine_in(None))


def test_a_turn_that_differs_is_found_among_many_tokens_that_agree() -> None:
    check = WeightCheck(GRPOConfig(bf16=False), nn.Linear(1, 1), torch.device("cpu"))
    check(0.03, 2.0, turns=[(0.03, 0.1), (0.25, 2.0)], engine=engine_in(torch.bfloat16))  # few tokens may round so
    with pytest.raises(
        WeightSyncError, match=r"mean difference of 0\.35 .* want at most 0\.3 in bfloat16: turn 2 differs"
    ):
        check(0.03, 2.0, turns=[(0.03, 0.1), (0.35, 2.0)], engine=engine_in(torch.bfloat16))


def test_a_function_is_told_of_a_later_turn_where_its_first_one_agrees(caplog) -> None:
    function: Any = FunctionEngine(lambda prompts, trainer: {}, SimpleNamespace())
    check = WeightCheck(GRPOConfig(bf16=False), nn.Linear(1, 1), torch.device("cpu"))
    check(*DIFFERS, engine=function)
    check(*DIFFERS, turns=[DIFFERS, DIFFERS], engine=function)
    assert caplog.records == []  # it may sample with anything
    for _ in range(2):
        check(*DIFFERS, turns=[AGREES, DIFFERS], engine=function)
    (record,) = caplog.records
    assert "turn 2 differs" in record.getMessage()
    strict = WeightCheck(GRPOConfig(bf16=False, logprob_mismatch="fail"), nn.Linear(1, 1), torch.device("cpu"))
    with pytest.raises(WeightSyncError, match="turn 2 differs"):
        strict(*DIFFERS, turns=[AGREES, DIFFERS], engine=function)


def test_rounding_is_measured_once_for_all_turns_and_never_for_a_function() -> None:
    asked: list[torch.dtype] = []
    options: dict[str, Any] = {"rounding": lambda dtype: asked.append(dtype) or 0.2}
    check = WeightCheck(GRPOConfig(bf16=True), nn.Linear(1, 1), torch.device("cpu"))
    check(0.4, 2.0, turns=[(0.4, 2.0)] * 3, engine=engine_in(torch.bfloat16), **options)
    assert asked == [torch.bfloat16]
    function: Any = FunctionEngine(lambda prompts, trainer: {}, SimpleNamespace())
    check(0.4, 2.0, turns=[(0.4, 2.0)] * 3, engine=function, **options)
    assert len(asked) == 1


@pytest.mark.parametrize("stale", [False, True])
def test_a_confident_policy_is_sampled_in_16_bits_but_not_with_old_weights(
    make_trainer, served_engine, monkeypatch, stale
) -> None:
    """Logits of a few hundred, in which bf16 has steps of 1 or 2."""
    differences: list[float] = []

    class Half(served_engine):
        weight_dtype = torch.bfloat16

        def __init__(self, model: Any, tokenizer: Any) -> None:
            model.lm_head.weight.data.mul_(30.0)
            super().__init__(model, tokenizer)
            if stale:  # of another policy that is as sure: what a few steps learn is a matter of chance
                self.model.lm_head.weight.data.copy_(model.lm_head.weight.data.roll(1, 0))

        def logprobs(self, *given: Any) -> list[list[float]]:
            with torch.autocast("cpu", torch.bfloat16):
                return super().logprobs(*given)

        def load_weights(self, named_weights: Any, version: int) -> None:
            super().load_weights(self.model.state_dict() if stale else named_weights, version)

    trainer = make_trainer(engine=Half)
    check = WeightCheck.__call__

    def recorded(self: WeightCheck, mean: float, *given: Any, **named: Any) -> None:
        differences.append(mean)
        check(self, mean, *given, **named)

    monkeypatch.setattr(WeightCheck, "__call__", recorded)
    if stale:
        with pytest.raises(WeightSyncError, match="got a mean difference"):
            trainer.train()
    else:
        trainer.train()
        assert max(differences) > 0.1
