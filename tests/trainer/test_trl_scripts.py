"""Scripts written for TRL run with one line changed: the one that imports `GRPOConfig` and `GRPOTrainer`."""

import dataclasses
import json
import runpy
from pathlib import Path

import pytest
from trl_differences import DIFFERENT

from fused_grpo.errors import UnsupportedError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.config.trl_fields import MISSING

trl = pytest.importorskip("trl", reason="TRL is not installed")
IMPORT = "from trl import GRPOConfig, GRPOTrainer"

SCRIPT = """
import asyncio

from datasets import Dataset, IterableDataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
dataset = Dataset.from_list(rows)
chats = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})


def digits(completions, answer, **kwargs):
    return [sum(letter.isdigit() for letter in text) / (len(text) + 1) for text in completions]


def short(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **kwargs):
    log_metric("mean_ids", sum(map(len, completion_ids)) / len(completion_ids))
    log_extra("step", [trainer_state.global_step] * len(prompts))
    return [None if len(ids) > 5 else -float(len(ids)) for ids in completion_ids]


async def slow(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [float(len(set(text))) for text in completions]


def of_chat(completions, **kwargs):
    return [float(len(messages[0]["content"])) for messages in completions]


args = GRPOConfig(
    output_dir=output_dir,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=6,
    max_steps=2,
    learning_rate=1e-3,
    use_vllm=False,
    bf16=False,
    report_to="none",
    @OPTIONS@
)
trainer = GRPOTrainer(model=model_path, args=args, @ARGUMENTS@)
trainer.train()
trainer.save_model(output_dir)
"""

PLAIN = "reward_funcs=digits, train_dataset=dataset"
OPTIONS = {
    "as it comes": ("", PLAIN),
    "GRPO with KL and several iterations": (
        'loss_type="grpo", beta=0.04, num_iterations=2, scale_rewards=False',
        PLAIN,
    ),
    "Dr. GRPO, clipped twice, truncated masked": (
        'loss_type="dr_grpo", epsilon_high=0.28, delta=1.5, mask_truncated_completions=True, scale_rewards="none"',
        PLAIN,
    ),
    "CISPO, sampled with options": ('loss_type="cispo", epsilon_high=5.0, temperature=0.9, top_p=0.95, top_k=8', PLAIN),
    "GSPO": ('importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4, steps_per_generation=4', PLAIN),
    "SAPO, the schedule, accumulation": (
        'loss_type="sapo", gradient_accumulation_steps=2, lr_scheduler_type="cosine", warmup_steps=1, weight_decay=0.1',
        PLAIN,
    ),
    "several rewards": (
        'reward_weights=[1.0, 0.5, 2.0], multi_objective_aggregation="normalize_then_sum", scale_rewards="batch"',
        "reward_funcs=[digits, short, slow], train_dataset=dataset",
    ),
    "conversations": ("gradient_checkpointing=True", "reward_funcs=of_chat, train_dataset=chats"),
    "a stream": (
        "shuffle_dataset=False",
        "reward_funcs=digits, train_dataset=IterableDataset.from_generator(lambda: iter(rows))",
    ),
    "an eval set and checkpoints": (
        'eval_strategy="steps", eval_steps=1, num_generations_eval=2, save_steps=1, save_total_limit=1',
        "reward_funcs=digits, train_dataset=dataset, eval_dataset=dataset.select(range(2))",
    ),
    "LoRA": ("beta=0.01", f"{PLAIN}, peft_config=LoraConfig(r=4, target_modules=['q_proj', 'v_proj'])"),
    "entropy": ('top_entropy_quantile=0.5, entropy_coef=0.01, log_completions=True, run_name="entropy"', PLAIN),
    "sync of the reference": (
        "beta=0.04, sync_ref_model=True, ref_model_sync_steps=1, disable_dropout=True, seed=7, use_liger_kernel=False",
        PLAIN,
    ),
}


@pytest.fixture
def model_path(make_model, tokenizer, tmp_path) -> str:
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    make_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def script_with(options: str, arguments: str) -> str:
    return SCRIPT.replace("@OPTIONS@", options).replace("@ARGUMENTS@", arguments)


def run(script: str, directory: Path, model_path: str) -> GRPOTrainer:
    path = directory / "script.py"
    path.write_text(script)
    names = {"output_dir": str(directory / "run"), "model_path": model_path}
    return runpy.run_path(str(path), init_globals=names)["trainer"]


@pytest.mark.parametrize(("options", "arguments"), OPTIONS.values(), ids=OPTIONS)
def test_a_script_for_trl_runs_with_one_line_changed(tmp_path, model_path, options, arguments):
    script = script_with(options, arguments)
    changed = script.replace(IMPORT, IMPORT.replace("trl", "fused_grpo.trainer"))
    assert sum(a != b for a, b in zip(script.splitlines(), changed.splitlines(), strict=True)) == 1
    trainer = run(changed, tmp_path, model_path)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert trainer.state.global_step == 2
    assert any(line["grad_norm"] > 0 for line in steps) or "mask_truncated" in options  # which may leave nothing
    assert list((tmp_path / "run").glob("*model.safetensors"))


@pytest.mark.parametrize(("options", "arguments"), OPTIONS.values(), ids=OPTIONS)
def test_the_options_are_ones_that_trl_takes(tmp_path, options, arguments):
    fixed = "num_generations=4, per_device_train_batch_size=4, use_cpu=True"
    script = f"from trl import GRPOConfig\nGRPOConfig('x', {fixed}, {options})"
    (tmp_path / "script.py").write_text(script)
    runpy.run_path(str(tmp_path / "script.py"))


@pytest.mark.filterwarnings("ignore")  # of TRL's, about versions
def test_the_script_is_one_that_trl_runs_too(tmp_path, model_path):
    options, arguments = OPTIONS["several rewards"]
    run(script_with(options + ", use_cpu=True", arguments), tmp_path, model_path)
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_every_field_of_trl_is_here_or_has_a_reason():
    trl_fields = {field.name: field for field in dataclasses.fields(trl.GRPOConfig)}
    ours = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    assert trl_fields.keys() <= ours.keys()
    for name, field in trl_fields.items():
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default
        if name in MISSING:
            assert MISSING[name].default == default, name
        elif name not in DIFFERENT:
            own_field = ours[name]
            assert (
                own_field.default_factory() if own_field.default is dataclasses.MISSING else own_field.default
            ) == default, name


def test_a_field_that_is_missing_is_refused_unless_it_asks_for_nothing():
    GRPOConfig(fp16=False, dataloader_num_workers=0)
    with pytest.raises(UnsupportedError, match=r"got fp16=True, a field of TRL's .*: bf16 or fp32"):
        GRPOConfig(fp16=True)


def test_a_quantization_config_for_a_loaded_model_changes_nothing(make_model, tokenizer, caplog, tmp_path):
    args = GRPOConfig(str(tmp_path), num_generations=4, per_device_train_batch_size=4, use_vllm=False)
    given = {"processing_class": tokenizer, "train_dataset": [{"prompt": "1"}], "quantization_config": object()}
    GRPOTrainer(make_model(), lambda completions, **columns: [], args, **given)
    assert "['quantization_config'] with a Qwen2ForCausalLM, which is loaded already" in caplog.text
