"""Predicted times: the arithmetic of the roofline, the bytes of an operation, and the readers of the file."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fused_grpo import fused_linear_grpo_loss
from fused_grpo.bench import predict
from fused_grpo.bench.heads.work import Work
from fused_grpo.bench.pages import MANY
from fused_grpo.bench.predictions import cuda_trace, predicted
from fused_grpo.bench.predictions.cuda_trace import Operation
from fused_grpo.bench.report import tables
from fused_grpo.kernels import softmax_weights

ROOT = Path(__file__).resolve().parent.parent.parent
MACHINE = replace(predict.H200, flops=100e12, bytes_per_s=1e12, instructions_per_s=1e13, launch_s=4e-6, tile_s=2e-6)
HOST = replace(MACHINE, host_torch_s=10e-6, host_triton_s=30e-6, host_backward_s=100e-6)


@pytest.mark.parametrize(
    ("operation", "microseconds"),
    [
        (Operation("mm", bytes=10**6, flops=10**10, dtype=torch.bfloat16), 100),
        (Operation("mm", bytes=2 * 10**8, flops=10**10, dtype=torch.bfloat16), 200),
        (Operation("_logprob_forward_kernel", bytes=0, flops=90 * 10**8, dtype=torch.bfloat16, triton=True), 100),
        (Operation("mul_", bytes=3 * 10**7), 30),
        (Operation("add", bytes=12), 4),
        (Operation("_softmax_weights_kernel", bytes=10**7, triton=True, tiles=38), 76),
        (Operation("_divergence_kernel", bytes=10**7, triton=True, tiles=3, instructions=2 * 10**8), 20),
    ],
)
def test_an_operation_takes_the_longest_of_five(operation, microseconds):
    assert predict.seconds_of(operation, MACHINE) == pytest.approx(microseconds * 1e-6)


def test_no_rate_is_made_up_for_another_dtype():
    with pytest.raises(ValueError, match=r"got a GEMM of torch.float32"):
        predict.seconds_of(Operation("mm", bytes=1, flops=1, dtype=torch.float32), MACHINE)


@pytest.mark.parametrize(
    ("waited", "backwards", "microseconds"),
    [
        ([], [], 10 + 200 + 4),  # the host is ahead of the device
        ([1], [], 10 + 200 + 30 + 4),
        ([2], [], 10 + 200 + 4),  # a wait at the end
        ([], [1], 10 + 200 + 4),
        ([1], [1], 10 + 200 + 100 + 30 + 4),
        ([0, 1], [0], 100 + 10 + 200 + 30 + 4),
    ],
)
def test_a_call_waits_for_its_host_and_its_host_for_the_device(waited, backwards, microseconds):
    operations = [Operation("mm", bytes=2 * 10**8), Operation("_scale_kernel", bytes=8, triton=True)]
    trace = cuda_trace.Trace(operations=operations, waited=waited, backwards=backwards)
    assert predict.seconds_of_call(trace, HOST) == pytest.approx(microseconds * 1e-6)


def test_with_few_tokens_a_call_takes_the_time_of_its_host():
    operations = [Operation("add", bytes=8)] * 50
    assert predict.seconds_of_call(cuda_trace.Trace(operations=operations), HOST) == pytest.approx(504e-6)
    assert predict.seconds_of_call(cuda_trace.Trace(operations=operations), MACHINE) < 2.5e-3


@pytest.mark.parametrize(("columns", "programs", "tiles"), [(4096, 64, 38), (1024, 64, 149), (1024, 64 * 149, 1)])
def test_a_program_walks_the_tiles_of_its_row(columns, programs, tiles):
    kernel = softmax_weights._softmax_weights_kernel
    trace = cuda_trace.Trace()
    logits = torch.empty(64, 151936, device="meta")
    trace.add_launch(kernel, (logits,), {"BLOCK_V": columns}, programs)
    assert trace.operations == [Operation(kernel.__name__, logits.nbytes, triton=True, tiles=tiles)]


def test_what_was_measured_is_beside_its_prediction():
    measured = {(row["plan"], row["D"], row["N"]): row for row in predicted.content()["measured"]}
    row = measured["fused-grpo: loss, trainable", 1024, 64]
    assert row["ms"] == 2.4  # of the interleaved rounds, not the 3.06 of the other stage
    assert row["predicted"] == predicted.predicted("fused-grpo: loss, trainable", 1024, 64, "H200")
    few = [row for row in measured.values() if row["N"] < MANY]
    assert len(few) >= 15
    assert all(abs(row["ms"] / row["predicted"] - 1) <= 0.25 for row in few)


class Bytes(TorchDispatchMode):
    """The bytes of each operation."""

    def __init__(self):
        super().__init__()
        self.moved = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.moved.append(cuda_trace.traffic(func, args, kwargs or {}, made))
        return made


def test_a_softmax_reads_its_rows_anew_for_each_sum():
    logits = torch.ones(8, 16, requires_grad=True)
    with Bytes() as seen:
        logits.log_softmax(-1).backward(A)
    assert [size for size in seen.moved if size > 512][:2] == [(3 + 1) * 512, (2 + 1 + 1) * 512]


A, ROW, OUT = torch.ones(8, 16), torch.ones(16), torch.ones(8, 8)


@pytest.mark.parametrize(
    ("call", "moved"),
    [
        (lambda: A + A.clone(), [2 * 512, 3 * 512]),
        (lambda: A.clone().mul_(ROW), [2 * 512, 2 * 512 + 64]),
        (lambda: torch.empty(8, 16).copy_(A)[0], [512, 2 * 512]),
        (lambda: torch.zeros_like(A), [512]),
        (lambda: torch.mm(A, A.t(), out=OUT), [2 * 512 + 256]),
        (lambda: torch.addmm(OUT, A, A.t()), [2 * 512 + 2 * 256]),
        (lambda: A + ROW[:1].expand(8, 16), [2 * 512 + 4]),
        (lambda: A[torch.tensor([1, 2])], [2 * 128]),
        (lambda: A.gather(1, torch.zeros(8, 1, dtype=torch.int64)), [64, 2 * 32]),
    ],
)
def test_bytes_are_those_that_are_read_and_written(call, moved):
    with Bytes() as seen:
        call()
    assert [size for size in seen.moved if size][-len(moved) :] == moved


def test_the_graph_is_walked_as_autograd_walks_it():
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(12, 8, requires_grad=True)
    given = {"advantages": torch.randn(2), "cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32)}

    def value():
        scaled = hidden * hidden.sum()  # two gradients meet
        logprobs = (scaled @ weight.t()).log_softmax(-1)[:, 3]
        return fused_linear_grpo_loss(scaled, weight, torch.arange(6), **given).loss + logprobs.square().sum()

    value().backward()
    wanted = [hidden.grad, weight.grad]
    hidden.grad = weight.grad = None
    cuda_trace.backward(value())
    for gradient, exact in zip((hidden.grad, weight.grad), wanted, strict=True):
        torch.testing.assert_close(gradient, exact)


def test_the_file_is_read_with_the_standard_library_alone():
    code = (
        "import importlib.util as u, json, sys; s = u.spec_from_file_location('predicted', sys.argv[1]); "
        "m = u.module_from_spec(s); s.loader.exec_module(m); assert 'torch' not in sys.modules; "
        "plan, machine = m.plan_of('fused-grpo', 'loss', 'trainable'), m.machine_of('NVIDIA H200'); "
        "print(json.dumps([m.predicted(plan, 4096, n, machine) for n in (8192, 3)]))"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(ROOT / "bench" / "predictions" / "predicted.py")]
    known_bytes, unknown = json.loads(subprocess.check_output(command))
    assert 38.7 < known_bytes < 60
    assert unknown is None


def test_a_work_is_predicted_only_as_it_was_traced():
    work = Work(kind="loss", head="Qwen3-8B", tokens=8192, sequences=16, dtype="bfloat16")
    seconds = predicted.seconds_of_work("fused-grpo", work.described(), "NVIDIA H200")
    assert seconds == predicted.predicted("fused-grpo: loss, trainable", 4096, 8192, "H200") / 1000
    for changed in ({"uneven": True}, {"idle": 0.5}, {"dtype": "float16"}, {"head": "Llama-3-8B"}, {"tokens": 8191}):
        assert predicted.seconds_of_work("fused-grpo", replace(work, **changed).described(), "NVIDIA H200") is None
    assert predicted.seconds_of_work("fused-grpo", work.described(), "cpu") is None


def test_a_table_of_a_gpu_compares_measurements_with_predictions(build):
    work = Work(kind="loss", head="Qwen3-8B", tokens=8192, sequences=16, dtype="bfloat16")
    twice = 2 * predicted.seconds_of_work("fused-grpo", work.described(), "NVIDIA H200")
    result = build.result([build.head("fused-grpo", work, seconds=twice), build.head("CCE", work)])
    assert "predicted" not in tables.render(result)
    result["machine_info"]["device"] = "NVIDIA H200"
    lines = [line.split(" | ") for line in tables.render(result).splitlines() if line.startswith("| ")]
    assert [line[-1] for line in lines] == ["x predicted |", "---: |", "2.00 |", "- |"]


def test_where_memory_runs_out_there_is_no_time():
    entry = predicted.entry("full logits: loss, trainable", 4096, 8192, "H200")
    assert entry["ms"] > predicted.predicted("fused-grpo: loss, trainable", 4096, 8192, "H200")
    assert entry["peak"] > 12 * 8192 * 151936  # logits in fp32, their softmax and its gradient
