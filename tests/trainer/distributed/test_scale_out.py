"""Two processes make the update that one makes of the same rollouts, under DDP and FSDP2, and go on after a restart.

All runs of a kind of launch share its processes: starting those takes longer than the runs.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file
from transformers import Qwen2ForCausalLM

# Seconds, what depends on the place of a token in a batch (rounding), and the engine's name.
OF_PROCESSES = r"time|per_second|bit_equal|recomputed_fraction|rollout_engine"
SCRIPT = Path(__file__).parents[1] / "scale_out_run.py"
RECIPES = Path(__file__).parents[3] / "trainer/recipes/accelerate"
TIED = {"tie_word_embeddings": True}
FOLLOWS = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "num_iterations": 2}
COVARIANCE = {"kl_cov_ratio": 0.2, "num_iterations": 2, "advantage_estimator": "reinforce_plus_plus"}
COVARIANCE |= {"scale_rewards": "group"}
BASELINE = {"advantage_estimator": "optimal_token_baseline", "scale_rewards": "group"}
BASELINE |= {"variance_report": True}
LIKELY = {"score_centering": "topk", "score_centering_topk": 5}
EXPERTS = {"experts": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}}
REPLAYED = {"router_replay": True, "logprob_mismatch": "warn", "router_aux_loss_coef": 0.0}  # that depends on the cut
WIDER = {"teacher": {"hidden_size": 48}}
DISTILLED = {"distillation_coef": 0.5, "distillation_kind": "jsd"}
# With a large epsilon, as below; from the first step on it is trained, and so is its head.
ADAPTED = {"lora": {"r": 4, "target_modules": ["q_proj", "down_proj", "lm_head"], "init_lora_weights": False}}
ADAPTED_OPTIONS = {"beta": 0.1, "learning_rate": 1e-3, "adam_epsilon": 1e-4, "num_iterations": 2}
TWO_STEPS = {"generation_batch_size": 32, "num_iterations": 2}
HALF = {"half_equal": True, "num_iterations": 2, "mask_truncated_completions": True, "data_seed": 5}

# Of each run: the model, options, and micro-batches of a step as (size, number) in one process and in each of two.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int], tuple[int, int]]] = {
    "dapo": ({}, {}, (32, 1), (4, 4)),
    "grpo, evaluated": ({}, {"loss_type": "grpo", "eval_rows": 5, "num_generations_eval": 4}, (32, 1), (4, 4)),
    "a second step on old log-probs": ({}, {"num_iterations": 2}, (32, 1), (8, 2)),
    "by tokens, tied, a reference that follows": (TIED, {"max_tokens_per_micro_batch": 24, **FOLLOWS}, (32, 1), (8, 2)),
    "one process without work": ({}, {"mask_truncated_completions": True}, (32, 1), (1, 16)),
    "half of the groups equal": ({}, HALF, (16, 1), (1, 8)),
    "three groups over both": (
        {},
        {"num_iterations": 2, "scale_rewards": "group", "rollout_failure": "drop"},
        (12, 1),
        (3, 2),
    ),
    "three groups over both, against greedy completions": (
        {},
        {"advantage_estimator": "remax", "scale_rewards": "group", "rollout_failure": "drop"},
        (12, 1),
        (3, 2),
    ),
    "two steps of a generation": ({}, {**TWO_STEPS, "scale_rewards": "group"}, (16, 1), (8, 1)),
    "two steps, half of the groups equal": ({}, {**TWO_STEPS, "half_equal": True, "data_seed": 5}, (16, 1), (4, 2)),
    "a static graph": ({}, {"ddp_static_graph": True}, (32, 1), (8, 2)),
    "against the best baseline of each place": ({}, BASELINE, (32, 1), (8, 2)),
    "within the kept tokens": ({}, {"top_p": 0.9, "sampling_support": "require", **FOLLOWS}, (32, 1), (8, 2)),
    "centered on the kept tokens": ({}, {"top_p": 0.9, "score_centering": "kept", **FOLLOWS}, (32, 1), (8, 2)),
    "centered on likely tokens": ({}, {**LIKELY, "mask_truncated_completions": True}, (32, 1), (1, 16)),
    "only tokens of high entropy": ({}, {"top_entropy_quantile": 0.47}, (32, 1), (8, 2)),
    "from a wider teacher": (WIDER, DISTILLED, (32, 1), (8, 2)),
    "from the reference, tied": (
        {**TIED, "teacher": "self"},
        # With a large epsilon: gradients that are rounding are not to be steps.
        {**DISTILLED, "learning_rate": 1e-3, "adam_epsilon": 1e-4, "num_iterations": 2},
        (32, 1),
        (8, 2),
    ),
    "tokens of large covariance": ({}, COVARIANCE, (32, 1), (8, 2)),
    "to the sampler's experts": (EXPERTS, {**REPLAYED, **FOLLOWS}, (32, 1), (8, 2)),
    "an adapter": (ADAPTED, ADAPTED_OPTIONS, (32, 1), (8, 2)),
}
# Two optimizer steps of each generated batch, twice; a step has parts of groups, and a group is on both processes.
RESUMED = {"per_device_train_batch_size": 3, "steps_per_generation": 2, "lr_scheduler_type": "constant", **FOLLOWS}
WHOLE = ("whole", TIED, {**RESUMED, "max_steps": 6})
CUT = ("cut", TIED, {**RESUMED, "max_steps": 5, "save_steps": 3})
ADAPTER = {"per_device_train_batch_size": 3, "steps_per_generation": 2, "lr_scheduler_type": "constant"}
ADAPTER |= {**ADAPTED_OPTIONS, "save_steps": 3, "optim": "adagrad"}  # which has a state before its first step
SHARDED_ADAPTER = (
    ("whole adapter", ADAPTED, {**ADAPTER, "max_steps": 4, "save_strategy": "no"}),
    ("cut adapter", ADAPTED, {**ADAPTER, "max_steps": 3}),
)
STOPPED = ("stopped", {}, {"rank_that_stops": 1, "save_strategy": "no"})
MIXED = {"per_device_train_batch_size": 16, "bf16": True, "num_iterations": 2, "max_steps": 2}
BF16 = ("bf16", WIDER, {**MIXED, **DISTILLED})


@pytest.fixture(scope="module")
def launch(fork_server, tmp_path_factory):
    """Run entries (name, model, options) one after the other in the same processes; what each process saw of each."""

    def launch(entries, *, env: dict[str, str] | None, root: Path | None = None) -> dict[str, list[dict[str, Any]]]:
        root, processes = root or tmp_path_factory.mktemp("runs"), 1 if env is None else 2
        plan = [{"out": str(root / name), "model": model, "options": options} for name, model, options in entries]
        (root / "plan.json").write_text(json.dumps(plan))
        fork_server.run(SCRIPT, root / "plan.json", processes=processes, env=env or {}, timeout=400)
        files = {entry["out"]: [f"{entry['out']}/rank-{rank}.pt" for rank in range(processes)] for entry in plan}
        return {Path(out).name: [torch.load(file, weights_only=True) for file in paths] for out, paths in files.items()}

    return launch


@pytest.fixture(scope="module", params=["DDP", "FSDP2"])
def wrapper(request) -> dict[str, str]:
    """What `accelerate launch` puts into the environment of two processes."""
    if request.param == "DDP":
        return {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.environ", {})
        config = ["--config_file", str(RECIPES / "fsdp2.yaml"), "--mixed_precision", "no"]
        config += ["--fsdp_activation_checkpointing", "true", "script.py"]  # the same as the trainer's own
        arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(config))
        return prepare_multi_gpu_env(arguments)


def entries(processes: int) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """`RUNS`, on one process or two."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    return [
        (name, model, {**options, **dict(zip(names, cuts[processes - 1], strict=True))})
        for name, (model, options, *cuts) in RUNS.items()
    ]


@pytest.fixture(scope="module")
def alone(launch):
    """Each run in one process; once, where runs differ in nothing but how their steps are cut."""
    names = {json.dumps(rest): (name, *rest) for name, *rest in entries(1)}
    kept = ("kept", {}, {**HALF, "per_device_train_batch_size": 16, "skip_zero_advantages": False})
    results = launch([*names.values(), kept], env=None)
    return {name: results[names[json.dumps(rest)][0]][0] for name, *rest in entries(1)} | {"kept": results["kept"][0]}


@pytest.fixture(scope="module")
def shared(launch, wrapper, tmp_path_factory):
    """Each run in two processes, and those of the other tests."""
    root = tmp_path_factory.mktemp("shared")
    return root, launch(
        [*entries(2), WHOLE, CUT, *(SHARDED_ADAPTER if wrapper else ()), BF16, STOPPED], env=wrapper, root=root
    )


def test_what_a_callback_of_one_rank_decides_holds_on_all(shared):
    root, results = shared
    assert [rank["metrics"]["step"] for rank in results["stopped"]] == [1, 1]
    assert (root / "stopped" / "run" / "checkpoint-1").is_dir()


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_equal_one(alone, shared, name):
    one, two = alone[name], shared[1][name][0]
    for kind in ("parameters", "reference"):
        assert one[kind].keys() == two[kind].keys()
        for key, tensor in one[kind].items():
            torch.testing.assert_close(two[kind][key], tensor, rtol=0, atol=1e-6)
    assert len(one["history"]) == len(two["history"]) > 3
    for first, second in zip(one["history"], two["history"], strict=True):
        assert first.keys() == second.keys()
        # A process logs of its part of a group before it knows that the reward of another one, from the second step on,
        # failed for the rest. Where the engine fails, no function is given a part.
        skipped = OF_PROCESSES + "|odd" * ("rollout_failure" in RUNS[name][1] and first["step"] > 1)
        for key in (key for key in first if not re.search(skipped, key)):
            assert second[key] == pytest.approx(first[key], abs=1e-5, nan_ok=True), f"{key} of step {first['step']}"


def test_a_process_without_work_meets_the_other(shared):
    first, second = shared[1]["one process without work"]
    pairs = [(a["tokens"], b["tokens"]) for a, b in zip(first["seen"], second["seen"], strict=True)]
    assert any(min(pair) == 0 < max(pair) for pair in pairs), pairs


def test_two_processes_skip_completions_without_an_advantage_alike(alone, shared):
    kept, ranks = alone["kept"], shared[1]["half of the groups equal"]
    for key, tensor in kept["parameters"].items():
        torch.testing.assert_close(ranks[0]["parameters"][key], tensor, rtol=0, atol=1e-6)
    seen = [[part["tokens"] for part in rank["seen"]] for rank in ranks]
    assert sum(map(sum, seen)) < 0.8 * sum(part["tokens"] for part in kept["seen"])
    assert any(min(pair) == 0 < max(pair) for pair in zip(*seen, strict=True)), seen
    # Micro-batches of one sequence: 3 are left, twice, and then 2. Each process has half of them, rounded up.
    assert [len(counts) for counts in seen] == [2 + 2 + 1] * 2
    assert ranks[0]["metrics"]["completion_tokens"] == kept["metrics"]["completion_tokens"]


def test_two_processes_resume_where_they_stopped(launch, wrapper, shared):
    root, results = shared
    cuts = [CUT, *(SHARDED_ADAPTER[1:] if wrapper else ())]
    resumed = launch(
        [
            (*one, {**options, "max_steps": options["max_steps"] + 1, "resume_from_checkpoint": True})
            for *one, options in cuts
        ],
        env=wrapper,
        root=root,
    )
    for cut, _, _ in cuts:
        for kind in ("parameters", "reference"):
            for key, tensor in results[cut.replace("cut", "whole")][0][kind].items():
                assert torch.equal(resumed[cut][0][kind][key], tensor), f"{kind} {key}"


def test_fsdp_shards_the_weights_and_gathers_the_head_for_the_loss(alone, shared, wrapper):
    for name in RUNS:
        total = alone[name]["mine"]
        for rank in shared[1][name]:
            assert rank["mine"] == (total // 2 if wrapper else total)
            assert rank["groups"] == (3 if wrapper else 0)  # two layers and the rest
            assert all(seen["plain"] and seen["head"] == [14, 32] for seen in rank["seen"])


def test_mixed_precision_leaves_the_inputs_of_the_loss_unrounded(shared, wrapper):
    seen = [batch for rank in shared[1]["bf16"] for batch in rank["seen"]]
    for name in ("advantages", "sampling_logprobs", "old_logprobs"):
        values = torch.cat([batch[name] for batch in seen if batch[name] is not None])
        assert values.dtype == torch.float32
        assert (values != values.bfloat16()).any(), name
    assert {batch["head_dtype"] for batch in seen} == {"torch.bfloat16" if wrapper else "torch.float32"}
    assert {batch["loss_dtype"] for batch in seen} == {"torch.float32"}


def test_a_checkpoint_of_sharded_weights_loads_as_any_other(shared):
    root, results = shared
    name = "by tokens, tied, a reference that follows"
    loaded = Qwen2ForCausalLM.from_pretrained(root / name / "run" / "final")
    assert "lm_head.weight" not in load_file(root / name / "run" / "final" / "model.safetensors")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    own = loaded.state_dict()
    assert own.keys() - results[name][0]["parameters"].keys() == {"lm_head.weight"}
    for key, value in results[name][0]["parameters"].items():
        assert torch.equal(own[key], value), key


def test_an_adapter_is_gathered_alone_or_merged_and_saved(alone, shared, wrapper):
    root, results = shared
    one, ranks = alone["an adapter"], results["an adapter"]
    saved = load_file(root / "an adapter" / "run" / "final" / "adapter_model.safetensors")
    adapter_size, base_size = (sum(map(torch.numel, one[name].values())) for name in ("adapter", "merged"))
    for rank in ranks:
        for kind in ("merged", "adapter"):
            assert rank[kind].keys() == one[kind].keys()
            for key, tensor in one[kind].items():
                torch.testing.assert_close(rank[kind][key], tensor, rtol=0, atol=1e-6)
        assert rank["adapter_gathered"] == (adapter_size if wrapper else 0)
        assert rank["merged_gathered"] == (base_size + adapter_size if wrapper else 0)
        assert saved.keys() == rank["adapter"].keys()
        assert all(torch.equal(saved[key], tensor) for key, tensor in rank["adapter"].items())
