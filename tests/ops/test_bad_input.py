"""Every mistake gets its own error: what was got, what is wanted, how to fix it."""

import math

import numpy
import pytest
import torch

from fused_grpo import (
    FusedGRPOError,
    GRPOLossConfig,
    fused_linear_divergence,
    fused_linear_grpo_loss,
    grpo_loss,
    linear_logprobs,
)
from fused_grpo.errors import InputError, UnavailableError, UnsupportedError
from fused_grpo.passes import choice

pytestmark = pytest.mark.cpu_only(
    reason="checks on the host are the same on any device; of values, on a GPU, tests/gpu has those that end a process"
)


def good(**changes):
    arguments = {
        "hidden": torch.randn(6, 4),
        "weight": torch.randn(9, 4),
        "targets": torch.arange(6),
        "advantages": torch.ones(2),
        "cu_seqlens": torch.tensor([0, 3, 6], dtype=torch.int32),
    }
    return {**arguments, **changes}


def of_inference_mode(*shape):
    with torch.inference_mode():
        return torch.zeros(shape)


HEAD = [
    ({"targets": torch.tensor([0, 1, 2, 9, 4, 5])}, r"target 9 at \[3\]; want 0 <= target < V=9"),
    ({"targets": torch.tensor([0, -1, 2, 3, 4, 5])}, r"target -1 at \[1\]"),
    ({"targets": torch.arange(5)}, r"targets \(5,\), want \(6,\)"),
    ({"targets": torch.arange(6).int()}, r"torch.int32, want torch.int64; fix: targets.long\(\)"),
    ({"hidden": torch.randn(6, 5)}, r"hidden \(6, 5\) and weight \(9, 4\)"),
    ({"weight": torch.randn(4, 9)}, r"fix: pass weight.t\(\)"),
    ({"weight": torch.randn(9)}, r"want \[V, D\]"),
    ({"weight": torch.randn(0, 4)}, r"weight \(0, 4\), want at least one token and one"),
    ({"hidden": torch.randn(6, 0), "weight": torch.randn(9, 0)}, r"weight \(9, 0\), want at least one token"),
    ({"hidden": torch.ones(6, 4).long()}, "hidden of dtype torch.int64"),
    ({"bias": torch.randn(8)}, r"bias \(8,\)"),
    ({"temperature": 0.0}, "temperature=0.0, want a finite number > 0"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"temperature": torch.zeros(6)}, "a temperature of 0.0, want finite numbers > 0"),
    ({"temperature": torch.zeros(1).expand(6)}, "a temperature of 0.0, want finite numbers > 0"),
    ({"hidden": torch.ones(1, 4), "targets": torch.zeros(1).long(), "temperature": torch.zeros(1).expand(1)}, "of 0.0"),
    ({"temperature": torch.ones(5)}, r"temperature \(5,\)"),
    ({"softcap": -1.0}, "softcap=-1.0"),
    ({"logit_scale": float("inf")}, "logit_scale=inf"),
    ({"hidden": torch.randn(6, 4, device="meta")}, "hidden on meta, weight on cpu"),
    ({"impl": "cuda"}, "impl='cuda', want 'auto'"),
    ({"hidden": [[1.0]]}, "hidden of type list, want a torch.Tensor"),
    ({"weight": torch.randn(9, 4).to_sparse()}, r"weight as a nested, quantized or sparse .* fix: .*to_dense"),
    ({"temperature": torch.tensor(0.5)}, r"temperature \(\) torch.float32"),
    ({"temperature": 1e-320}, "temperature=1e-320, want a finite number > 0"),
    ({"logit_scale": "1"}, "logit_scale='1', want a finite number"),
    ({"ignore_index": None}, "ignore_index=None, want a whole number"),
    ({"process_group": object()}, "type object, want a torch.distributed.ProcessGroup; fix: .*get_group"),
    *[({name: True}, f"got {name}=True, want") for name in ("temperature", "logit_scale", "softcap", "ignore_index")],
]
LOSS = [
    ({"advantages": torch.ones(3)}, r"advantages \(3,\), want \[B\] = \(2,\)"),
    ({"advantages": torch.ones(2).long()}, "advantages of dtype torch.int64"),
    ({"mask": torch.ones(5)}, r"mask \(5,\), want \(6,\)"),
    ({"old_logprobs": torch.zeros(7)}, r"old_logprobs \(7,\)"),
    ({"cu_seqlens": torch.tensor([0, 3, 5], dtype=torch.int32)}, "from 0 to 5, want ascending from 0 to N=6"),
    ({"cu_seqlens": torch.tensor([0, 7, 6], dtype=torch.int32)}, "want ascending"),
    ({"cu_seqlens": torch.tensor([0.0, 6.0])}, r"want \[B\+1\] int32"),
    ({"cu_seqlens": None}, r"without cu_seqlens; want padded \[B, T\]"),
    ({"num_tokens": 0}, "num_tokens=0, want a finite number > 0"),
    ({"num_tokens": torch.tensor(-3.0)}, "num_tokens=-3.0, want a finite number > 0"),
    ({"num_tokens": torch.tensor(3.0, requires_grad=True)}, r"requires_grad=True, want .*; fix: \.detach\(\)"),
    ({"entropy_threshold": torch.tensor(3.0, requires_grad=True)}, r"got entropy_threshold .*requires_grad=True"),
    ({"mask": torch.ones(6, dtype=torch.complex64)}, r"mask of dtype torch\.complex64, want a real one"),
    ({"config": GRPOLossConfig(beta=0.1)}, "beta=0.1 without ref_logprobs"),
    ({"chunk_bytes": 0}, "chunk_bytes=0"),
    ({"chunk_bytes": 0.5}, "chunk_bytes=0.5, want a whole number"),
    ({"config": {"beta": 0.1}}, "config of type dict, want a GRPOLossConfig"),
    ({"old_logprobs": torch.zeros(6).long()}, "old_logprobs of dtype torch.int64"),
    ({"entropy_threshold": float("nan")}, "entropy_threshold=nan"),
    ({"num_tokens": torch.ones((), device="meta")}, "num_tokens on meta and tokens on cpu"),
    ({"score": None}, "score=None"),
    ({"score": "some"}, "score='some', want 'all' or 'needed'"),
    ({"weight_main_grad": torch.zeros(9, 5)}, r"want \(9, 4\) torch.float32 on cpu"),
    ({"weight_main_grad": torch.zeros(9, 4).half()}, "torch.float16"),
    ({"weight_main_grad": torch.zeros(9, 4).requires_grad_()}, "a plain tensor"),
    ({"weight_main_grad": torch.zeros(4).expand(9, 4)}, "is expanded .* a plain tensor"),
    ({"weight_main_grad": of_inference_mode(9, 4)}, "of inference_mode; fix: a plain tensor"),
    ({"sampling_topk_ids": numpy.zeros((6, 2), dtype=int)}, "leave the sampler's tokens out"),
    ({"entropy": "no"}, "entropy='no', want True or False"),
    *[({name: True}, f"got {name}=True, want") for name in ("num_tokens", "entropy_threshold", "chunk_bytes")],
]


@pytest.mark.parametrize(("change", "message"), HEAD)
def test_linear_logprobs_names_what_is_wrong(change, message):
    arguments = good(**change)
    del arguments["advantages"], arguments["cu_seqlens"]
    with pytest.raises(InputError, match=message):
        linear_logprobs(**arguments)


@pytest.mark.parametrize(("change", "message"), HEAD + LOSS)
def test_the_fused_loss_names_what_is_wrong_and_leaves_no_gradient(change, message):
    arguments = good(**change)
    arguments["weight"].requires_grad_()
    with pytest.raises(InputError, match=message):
        fused_linear_grpo_loss(**arguments)
    assert arguments["weight"].grad is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "ppo"}, "'ppo', want one of 'grpo', 'bnpo'"),
        ({"importance_sampling_level": "batch"}, "'batch', want one of 'token', 'sequence'"),
        ({"kl_estimator": "k4"}, "kl_estimator='k4'"),
        ({"sampling_correction": "clip"}, "sampling_correction='clip'"),
        ({"epsilon": -0.1}, "epsilon=-0.1, want a finite value >= 0"),
        ({"epsilon": "0.2"}, "epsilon='0.2', want float"),
        ({"beta": True}, "beta=True, want float"),
        ({"epsilon_high": 2**70}, "epsilon_high=1180591620717411303424, want float or None"),
        ({"epsilon": math.inf}, "epsilon=inf"),
        ({"epsilon_high": -1.0}, "epsilon_high=-1.0"),
        ({"beta": float("nan")}, "beta=nan"),
        ({"entropy_coef": -0.1}, "entropy_coef=-0.1"),
        ({"delta": 0.0}, "delta=0.0, want a finite value > 0"),
        ({"top_entropy_quantile": 0.0}, r"top_entropy_quantile=0.0, want a share in \(0, 1\]"),
        ({"off_policy_mask_threshold": float("nan")}, "off_policy_mask_threshold=nan"),
        ({"sampling_clip_min": 4.0}, "sampling_clip_min=4.0 above 3.0"),
        ({"loss_type": "dr_grpo"}, "fix: pass the constant it divides by"),
        ({"loss_type": "sapo", "delta": 2.0}, "which has no unclipped branch to bound"),
        ({"loss_type": "vespo", "sampling_correction": "sequence_mask"}, "whose weight is of the sequence already"),
        ({"loss_type": "dppo_tv", "sampling_correction": "sequence_mask"}, "whose ratio is to the sampler already"),
        ({"loss_type": "ipo", "importance_sampling_level": "sequence"}, "from the sampler is of a token"),
        ({"loss_type": "dppo_kl", "importance_sampling_level": "sequence"}, "from the sampler is of a token"),
        ({"loss_type": "dro"}, "got loss_type='dro' with log_ratio_penalty=0, want the weight of its quadratic term"),
        ({"loss_type": "dro", "delta": 2.0, "log_ratio_penalty": 0.1}, "no unclipped branch to bound"),
        ({"log_ratio_penalty": -1.0}, "log_ratio_penalty=-1.0, want a finite value >= 0"),
        ({"sampling_correction": "icepop", "sampling_clip_max": 2.0}, "sampling_clip_max=2.0 with 'icepop'"),
        ({"sequence_rejection": "k4"}, "sequence_rejection='k4'"),
        ({"sequence_rejection": "k3"}, "want a statistic and a bound of it"),
        ({"sequence_rejection_max": 0.1}, "want a statistic and a bound of it"),
        ({"sequence_rejection": "k3", "sequence_rejection_max": math.nan}, "sequence_rejection_max=nan, want numbers"),
        ({"clip_cov_lb": 2.0, "clip_cov_ub": 1.0}, "clip_cov_ub=1.0, want numbers, the first no larger"),
        ({"clip_cov_ratio": 0.1, "kl_cov_ratio": 0.1}, "want one of them"),
        ({"kl_cov_ratio": 1.5}, r"kl_cov_ratio=1.5, want a share in \[0, 1\]"),
        ({"kl_cov_coef": -1.0}, "kl_cov_coef=-1.0"),
    ],
)
def test_a_config_that_cannot_be_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        GRPOLossConfig(**options)


@pytest.mark.parametrize("options", [{"entropy_coef": 0.1}, {"top_entropy_quantile": 0.5}])
def test_a_loss_of_entropies_wants_them(options):
    with pytest.raises(InputError, match="fix: pass entropy, which linear_logprobs_and_entropy gives"):
        grpo_loss(torch.zeros(2, 3), advantages=torch.ones(2), config=GRPOLossConfig(**options))


def test_triton_without_a_gpu_says_why(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnavailableError, match="it needs a GPU and the tensors are on 'cpu'; fix: impl='auto'"):
        fused_linear_grpo_loss(**good(impl="triton"))


def test_bf16_in_the_interpreter_as_it_is_released_is_refused_not_garbled(monkeypatch):
    from triton.runtime.interpreter import InterpreterBuilder

    mended = InterpreterBuilder.create_dot  # tests/imported/bf16_interpreter.py
    monkeypatch.setattr(InterpreterBuilder, "create_dot", mended.__wrapped__)
    arguments = good(impl="triton")
    arguments |= {name: arguments[name].bfloat16() for name in ("hidden", "weight")}
    with pytest.raises(UnavailableError, match="no bf16 arithmetic"):
        fused_linear_grpo_loss(**arguments)


def test_the_reference_adds_to_no_main_gradient():
    with pytest.raises(UnsupportedError, match="autograd's"):
        fused_linear_grpo_loss(**good(impl="reference", weight_main_grad=torch.zeros(9, 4)))


def test_grpo_loss_checks_its_own_input():
    with pytest.raises(InputError, match=r"logprobs of dtype torch\.int64"):
        grpo_loss(torch.ones(2, 3).long(), advantages=torch.ones(2))
    with pytest.raises(InputError, match="entropy"):
        grpo_loss(torch.ones(2, 3), advantages=torch.ones(2), entropy=torch.ones(2))


def test_errors_are_also_the_standard_ones():
    assert issubclass(InputError, ValueError)
    assert issubclass(InputError, FusedGRPOError)
    assert issubclass(UnsupportedError, NotImplementedError)
    assert issubclass(UnavailableError, RuntimeError)


@pytest.mark.parametrize("interpreted", ["0", "1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_auto_says_once_which_path_it_took(caplog, monkeypatch, dtype, interpreted):
    """On a CPU the reason is the CPU, whatever else Triton lacks."""
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    choice.announce.cache_clear()
    inputs = good()
    inputs |= {name: inputs[name].detach().to(dtype) for name in ("hidden", "weight")}
    with caplog.at_level("INFO", logger="fused_grpo"):
        for _ in range(2):
            fused_linear_grpo_loss(**inputs)
    assert [record.getMessage() for record in caplog.records] == [
        "impl='auto' runs the torch path on cpu (it needs a GPU and the tensors are on 'cpu')"
    ]


DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)
HEAD_OF_ALL = {"hidden": torch.randn(2, 3, 4), "weight": torch.randn(9, 4), "bias": torch.randn(9)}
HEAD_OF_ALL |= {"targets": torch.arange(6).view(2, 3), "temperature": torch.ones(2, 3)}
OF_TOKENS = {name: -torch.rand(2, 3) for name in ("old_logprobs", "ref_logprobs", "sampling_logprobs")}
OF_TOKENS |= {
    "advantages": torch.tensor([1.0, -1.0]),
    "mask": torch.ones(2, 3),
    "covariance_selected": torch.ones(2, 3),
}
OF_TOKENS |= {name: torch.tensor(2.0) for name in ("entropy_threshold", "num_tokens", "num_entropy_tokens")}
SAMPLER = {
    "sampling_topk_ids": torch.arange(6).view(1, 3, 2).repeat(2, 1, 1),
    "sampling_topk_logprobs": -torch.ones(2, 3, 2),
}
CONFIG = GRPOLossConfig(beta=0.1, kl_cov_ratio=0.5, top_entropy_quantile=0.5, entropy_coef=0.1)
CENTRED = GRPOLossConfig(beta=0.1, kl_cov_ratio=0.5, score_centering="topk")
KEPT = torch.arange(9).repeat(6), 9 * torch.arange(7)
PAIR = {"mask": torch.ones(2, 3), "num_tokens": torch.tensor(2.0), "temperature": torch.ones(2, 3)}
PAIR |= {f"{who}_{x}": HEAD_OF_ALL[x].clone() for who in ("student", "teacher") for x in ("hidden", "weight", "bias")}
EVERY_ARGUMENT = {
    "log-probs": (linear_logprobs, HEAD_OF_ALL),
    "of several": (
        lambda targets, **head: linear_logprobs(targets=targets[..., None].repeat(1, 1, 2), **head),
        HEAD_OF_ALL,
    ),
    "of a support": (
        lambda token_ids, offsets, **head: linear_logprobs(**head, support=(token_ids, offsets)),
        HEAD_OF_ALL | {"token_ids": KEPT[0], "offsets": KEPT[1]},
    ),
    "fused": (lambda **all_of: fused_linear_grpo_loss(**all_of, config=CONFIG).loss, HEAD_OF_ALL | OF_TOKENS),
    "centred": (
        lambda **all_of: fused_linear_grpo_loss(**all_of, config=CENTRED).loss,
        HEAD_OF_ALL | OF_TOKENS | SAMPLER,
    ),
    "loss": (
        lambda **all_of: grpo_loss(**all_of, config=CONFIG).loss,
        OF_TOKENS | {"logprobs": -torch.rand(2, 3), "entropy": torch.rand(2, 3)},
    ),
    "divergence": (lambda **pair: fused_linear_divergence(**pair).loss, PAIR),
}


@pytest.mark.filterwarnings("ignore:.* support is experimental", "ignore::RuntimeWarning")
@pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=pytest.mark.full)])
@pytest.mark.parametrize("call", EVERY_ARGUMENT)
def test_any_dtype_of_any_argument_is_taken_or_refused_by_name(call, impl):
    function, arguments = EVERY_ARGUMENT[call]
    refused = list[str]()
    for name, tensor in arguments.items():
        for dtype in DTYPES:
            try:
                cast = tensor.to(dtype)
            except (RuntimeError, NotImplementedError):  # torch has no such cast
                continue
            leaves = {x: v.clone().requires_grad_() for x, v in (arguments | {name: cast}).items() if is_leaf(x, v)}
            try:
                result = function(**arguments | {name: cast} | leaves, impl=impl)
            except FusedGRPOError as error:
                refused.append(str(error))
                continue
            result.sum().backward()
            wide = "hidden" in name or name == "logprobs"
            assert result.dtype == (torch.float64 if wide and dtype == torch.float64 else torch.float32), (name, dtype)
    assert all("got " in text for text in refused)


def is_leaf(name, tensor):
    return tensor.is_floating_point() and name.removeprefix("student_") in ("hidden", "weight", "bias", "logprobs")
