"""A row that cannot be used is named by its number: at the start where that is cheap, else when a step meets it."""

import json
from pathlib import Path

import pytest

from fused_grpo.errors import DataError
from fused_grpo.trainer.data.datasets import check_dataset

SCRIPT = Path(__file__).with_name("loop_run.py")
SOUND = {"prompt": [{"role": "user", "content": "1+1="}]}

ROWS = {
    "has no prompt": ({"question": "1+1="}, r"columns \['question'\] in row 1"),
    "has a prompt of another type": ({"prompt": 7}, "got 7 as the prompt of row 1"),
    "has a nested prompt": ({"prompt": [[{"role": "user", "content": "x" * 1000}]]}, r"x{20}.* as the prompt of row 1"),
    "has a message without a role": ({"prompt": [{"content": "1+1="}]}, "the prompt of row 1.*'role'"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_refused_before_anything_is_loaded(time_limit, name):
    row, message = ROWS[name]
    with time_limit(10), pytest.raises(DataError, match=message) as refused:
        check_dataset([SOUND, row], name="train_dataset")
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("policy", ["fail", "drop"])
def test_a_prompt_that_is_too_long_ends_the_run_early_or_is_left_out(fork_server, time_limit, tmp_path, policy):
    lengths = {"vllm_max_model_length": 24, "max_completion_length": 8}
    options = {"shuffle_dataset": False, "long_prompts": policy, **lengths}
    with time_limit(120):
        process = fork_server.start(SCRIPT, tmp_path, "row", 0, json.dumps(options))
        assert process.wait() == (policy == "fail")
    if policy == "fail":
        error = "got 20 tokens for the prompt of row 3 of train_dataset ('1+1=1+1=1+1=1+1=1+1='), want 16 at most"
        assert error in process.output.splitlines()[-1]
        assert not (tmp_path / "run").exists()
        return
    assert process.output.count("got 1 of 100 prompts of train_dataset with more than 16 tokens") == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows[::4]] == ["0+0=", "0+1=", "0+2=", "0+4=", "0+5=", "0+6="]
