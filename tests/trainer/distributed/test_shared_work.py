"""Ranks share evaluations and weight syncs: each row once, the figures of one process, never two models in memory."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from transformers import Qwen2Config, Qwen2ForCausalLM

SCRIPT = Path(__file__).parents[1] / "shared_work_run.py"
FSDP2 = Path(__file__).parents[3] / "trainer/recipes/accelerate/fsdp2.yaml"
SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[str, Qwen2ForCausalLM]:
    folder = tmp_path_factory.mktemp("model")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, **heads))
    model.save_pretrained(folder)
    return str(folder), model


@pytest.fixture(scope="module")
def launched(fork_server, tmp_path_factory, model) -> dict[str, list[dict[str, Any]]]:
    """What each rank saw: of one process, and of two with FSDP2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.environ", {})
        config = ["--config_file", str(FSDP2), "--mixed_precision", "no", "script.py"]
        arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(config))
        fsdp2 = prepare_multi_gpu_env(arguments)
    by_name = {}
    for name, processes, env in (("one", 1, {}), ("two", 2, fsdp2)):
        out = tmp_path_factory.mktemp(name)
        fork_server.run(SCRIPT, model[0], out, processes=processes, env=env)
        by_name[name] = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(processes)]
    return by_name


@pytest.mark.parametrize("name", ["uneven", "sampled", "one row", "stream", "by name"])
def test_each_row_is_scored_once_with_the_figures_of_one_process(launched, name):
    (one,), two = ([rank["evaluations"][name] for rank in launched[kind]] for kind in ("one", "two"))
    for rank in two:
        assert rank["result"] == pytest.approx(one["result"], rel=1e-6, nan_ok=True)
    assert one["result"].keys() >= {"eval_low_reward" if name == "by name" else "eval_reward"}
    for kind in ("prompts", "scored"):
        assert Counter(map(str, two[0][kind] + two[1][kind])) == Counter(map(str, one[kind])), kind
    rows = len(one["prompts"])
    assert [len(rank["prompts"]) for rank in two] == ([2, 3] if name == "by name" else [rows // 2, rows - rows // 2])


def test_fsdp2_never_has_two_full_models_in_one_process(launched, model):
    size = sum(weight.nbytes for weight in model[1].parameters())
    largest = max(weight.nbytes for weight in model[1].parameters())
    for rank in launched["two"]:
        assert rank["parameters"] * 4 == size // 2
        # The policy's shards and the reference's are half a model each.
        assert size <= rank["sync"]["bytes"] <= size + 2 * largest
        assert size < rank["starting"] < 2 * size


def test_fsdp2_has_rank_0_read_the_model_and_send_it_in_the_engines_dtype(launched, model):
    (one,), (first, second) = launched["one"], launched["two"]
    assert first["weights"] == pytest.approx(one["weights"])
    assert first["sync"]["given"] == one["sync"]["given"] != {}
    assert second["sync"]["given"] == {}
    for name, weight in model[1].state_dict().items():
        dtype = torch.bfloat16 if weight.ndim > 1 else torch.float32
        sent = first["sync"]["given"][name]
        assert sent == [str(dtype), list(weight.shape), weight.to(dtype).double().sum().item()]


def test_a_rank_that_fails_in_sending_does_not_leave_the_other_in_a_gather(launched):
    assert [rank["failed"]["error"] for rank in launched["two"]] == ["no room for it", "PeerError"]
