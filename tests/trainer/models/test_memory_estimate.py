"""The estimate of a run's memory on a CPU is what the run takes."""

import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "memory_run.py"
BATCH = {"per_device_train_batch_size": 32, "num_generations": 4, "max_completion_length": 8, "share_prompts": False}


@pytest.mark.parametrize(
    ("options", "at_least"),
    [
        ({"gradient_checkpointing": False, "use_vllm": False}, 0.8e9),
        ({"gradient_checkpointing": True, "use_vllm": False}, 0.25e9),
        pytest.param({"gradient_checkpointing": False, "use_vllm": True}, 1.4e9, marks=pytest.mark.engine),
    ],
    ids=["activations kept", "recomputed", "beside vLLM"],
)
def test_a_run_takes_what_its_banner_says(fork_server, tmp_path, options, at_least) -> None:
    out = tmp_path / "run.json"
    fork_server.run(SCRIPT, out, json.dumps(BATCH | options), timeout=400)
    held, said, peak = (json.loads(out.read_text())[name] for name in ("held", "said", "peak"))
    # What the process held before is measured, and no estimate. What the C library keeps free differs between runs: the
    # ratio was 1.00 to 1.19 in six of them. It is 0.7 without vLLM's terms, and 0.4 without activations.
    assert peak - held > at_least
    assert 0.8 < (said - held) / (peak - held) < 1.4
