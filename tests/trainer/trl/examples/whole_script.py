"""What scripts around a trainer do, from their log level and an interrupted run's checkpoint to the model card."""

import logging
import os

import datasets
import transformers
import trl
from datasets import load_dataset
from transformers import AutoTokenizer, set_seed
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

model_args = trl.ModelConfig(model_name_or_path="Qwen/Qwen2.5-0.5B-Instruct", dtype="float32")
training_args = GRPOConfig(
    output_dir="whole",
    learning_rate=1e-4,
    per_device_train_batch_size=3,
    num_generations=3,
    max_completion_length=8,
    use_vllm=False,
    report_to="none",
    do_eval=True,
    per_device_eval_batch_size=3,
    eval_strategy="epoch",
)

set_seed(training_args.seed)
log_level = training_args.get_process_log_level()
logging.getLogger(__name__).setLevel(log_level)
datasets.utils.logging.set_verbosity(log_level)
transformers.utils.logging.set_verbosity(log_level)
logging.getLogger(__name__).warning(
    "rank %s, device %s, %s GPUs, 16 bits %s, mode %s",
    training_args.local_rank,
    training_args.device,
    training_args.n_gpu,
    training_args.fp16,
    training_args.parallel_mode,
)

last_checkpoint = None
if os.path.isdir(training_args.output_dir):
    last_checkpoint = get_last_checkpoint(training_args.output_dir)

tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
with training_args.main_process_first(desc="reading the data"):
    dataset = {split: load_dataset("trl-lib/tldr", split=split) for split in ("train", "test")}

# Options that follow from others.
training_args.model_init_kwargs = {"revision": model_args.model_revision, "dtype": model_args.dtype}
training_args.gradient_checkpointing_kwargs = {"use_reentrant": False}
training_args.set_training(learning_rate=1e-3, batch_size=3, max_steps=2)
training_args.set_save(strategy="steps", steps=1, total_limit=1)


def brevity(completions, **kwargs):
    return [-float(len(completion)) for completion in completions]


trainer = GRPOTrainer(
    model=model_args.model_name_or_path,
    reward_funcs=[brevity],
    args=training_args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"] if training_args.eval_strategy != "no" else None,
    peft_config=trl.get_peft_config(model_args),
    processing_class=tokenizer,
)
trainer.add_callback(trl.LogCompletionsCallback(trainer, num_prompts=1, freq=1))
result = trainer.train(resume_from_checkpoint=last_checkpoint)
global_step, training_loss, metrics = result
assert (global_step, result[1], result.training_loss) == (2, training_loss, training_loss)
metrics["train_samples"] = min(len(dataset["train"]), trainer.num_examples(trainer.get_train_dataloader()))
trainer.log_metrics("train", metrics)
trainer.save_metrics("train", metrics)
trainer.save_state()

if trainer.is_deepspeed_enabled or trainer.deepspeed:
    raise NotImplementedError
if trainer.is_fsdp_enabled:
    trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
assert trainer.model_wrapped is trainer.accelerator.unwrap_model(trainer.model)
assert len(trainer.get_learning_rates()) == len(trainer.get_optimizer_group()) == len(trainer.optimizer.param_groups)
trainer.model.generation_config.eos_token_id = tokenizer.eos_token_id
trainer.save_model(training_args.output_dir)
training_args.distributed_state.wait_for_everyone()
card = {"dataset_name": "trl-lib/tldr", "tags": ["whole-script"]}
if trainer.accelerator.is_main_process:
    trainer.create_model_card(**card)
    trainer.model.config.use_cache = True
    trainer.model.config.save_pretrained(training_args.output_dir)

if training_args.do_eval:
    metrics = trainer.evaluate()
    metrics["eval_samples"] = len(dataset["test"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)

assert {"README.md", "all_results.json", "config.json", "model.safetensors"} <= set(os.listdir("whole"))
assert training_args.learning_rate == 1e-3
