"""What can be known at the start is said at the start: before a reward is called, and before anything is written."""

import copy
import json
import math
import os
import shutil
from collections import namedtuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from fused_grpo.errors import FusedGRPOError, RewardError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.cli.main import main
from fused_grpo.trainer.collect.start_checks import make_rewards
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.models.loading import positions

ROWS = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(4)]
CHAT = [{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}]
SMALL = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4, "use_vllm": False}

SERVED = {"use_vllm": True, "vllm_mode": "server"}


def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    raise AssertionError("a reward was called")


@pytest.fixture
def folder(make_model, tokenizer, tmp_path: Path) -> Path:
    """A model as it is saved."""
    make_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def start(folder: Path, tmp_path: Path):
    """Makes a trainer and begins to train."""

    def run(model: Any = None, rewards: Any = reward, rows: Any = ROWS, **options: Any) -> GRPOTrainer:
        names = ("eval_dataset", "callbacks", "teacher_model", "processing_class", "peft_config")
        names += ("reward_processing_classes",)
        arguments = {name: options.pop(name) for name in names if name in options}
        args = GRPOConfig(str(tmp_path / "run"), **{**SMALL, "max_steps": 4, **options})
        return GRPOTrainer(folder if model is None else model, rewards, args, rows, **arguments)

    return run


def refused(make: Any, message: str, out: Path) -> None:
    """The constructor says it, and no output directory is left."""
    before = sorted(out.rglob("*"))
    with pytest.raises(FusedGRPOError, match=message) as caught:
        make()
    assert "want" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert sorted(out.rglob("*")) == before


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def of_shards(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    named = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    write(folder / "model.safetensors.index.json", json.dumps({"weight_map": named}))


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def generation(folder: Path, **options: Any) -> None:
    write(folder / "generation_config.json", json.dumps({"eos_token_id": 1, **options}))


Change = namedtuple("Change", "change message")
FOLDERS = {
    "no config": Change(lambda f: (f / "config.json").unlink(), "a folder without config.json"),
    "bad config": Change(lambda f: write(f / "config.json", "{"), "whose config cannot be loaded: .*JSON"),
    "adapter": Change(lambda f: (f / "config.json").rename(f / "adapter_config.json"), "an adapter .*is_trainable"),
    "no weights": Change(lambda f: (f / "model.safetensors").unlink(), "a folder without weights"),
    "a shard too few": Change(of_shards, r"without model-00002-of-00002\.safetensors, which .*index\.json names"),
    "a pointer": Change(lambda f: write(f / "model.safetensors", "version https://git-lfs"), "whose model.safetensors"),
    "a pipe": Change(
        lambda f: os.mkfifo(f / "chat_template.jinja"), "with chat_template.jinja, which is no regular file"
    ),
    "a device": Change(
        lambda f: (f / "vocab.json").symlink_to("/dev/zero"), "with vocab.json, which is no regular file"
    ),
    "a link to nothing": Change(lambda f: (f / "a.bin").symlink_to("gone"), "with a.bin, which is no regular file"),
    "no tokenizer": Change(without_tokenizer, "tokenizer.*(without a vocabulary|cannot be loaded)"),
    "temperature": Change(partial(generation, temperature=0.6), "generation_config of .* could not be saved .*do_samp"),
    "top_p": Change(partial(generation, top_p=0.9), "generation_config of .* could not be saved"),
    "beams": Change(partial(generation, early_stopping=True, num_beams=1), "generation_config of .*could not be saved"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_model_folder_that_cannot_be_loaded_is_refused_in_one_line(folder, start, tmp_path, name):
    FOLDERS[name].change(folder)
    refused(start, FOLDERS[name].message, tmp_path)
    if name not in ("no config", "temperature"):  # the rest takes seconds
        return
    command = ["train", "--dry-run", "--model", str(folder), "--output-dir", str(tmp_path / "run"), "--max-steps", "1"]
    write(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, ROWS)))
    with pytest.raises(SystemExit, match=FOLDERS[name].message):
        main([*command, "--dataset", str(tmp_path / "rows.jsonl"), "--reward-funcs", "format"])


BROKEN = ["[" * 20_000 + "]" * 20_000, "{", "null", "[]", "5"]
# Of a config: (changes, message).
FIELDS = [
    ({"hidden_size": -1}, "negative dimension"),
    ({"num_attention_heads": 0}, "(modulo|division) by zero"),
    ({"vocab_size": 10**12}, "want about 1.02 PB"),
    ({"pad_token_id": 10**6}, "Padding_idx"),
    ({"model_type": "typo"}, "model type `typo`"),
    ({"quantization_config": {"bits": 4}}, "quant_method"),
]


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "an.index.json"]
)
def test_a_model_file_that_holds_something_else_is_refused_in_one_line(folder, start, tmp_path, name):
    wrong_types = '{"weight_map": {"a": [1]}, "model_type": [1], "added_tokens": 5, "eos_token_id": "x"}'
    for text in BROKEN if name == "tokenizer_config.json" else [*BROKEN, wrong_types]:
        write(folder / name, text)
        # transformers takes a generation_config that is no JSON for none.
        if (name, text) != ("generation_config.json", "{"):
            refused(start, r"(cannot be loaded: .*; want|eos_token_id='x' .* want) .*; fix: ", tmp_path)


@pytest.mark.parametrize(("changes", "message"), FIELDS)
def test_a_config_that_no_model_can_have_is_refused_in_one_line(folder, start, tmp_path, changes, message):
    config = folder / "config.json"
    write(config, json.dumps(json.loads(config.read_text()) | changes))
    refused(start, message, tmp_path)


@pytest.mark.parametrize("name", ["a/b/c", "me/my model", "me/-sums", "x" * 97, "me/sums.git", "me/a--b"])
def test_a_name_that_no_repository_can_have_is_refused_before_the_upload(start, tmp_path, monkeypatch, name):
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    message = "as the name on the hub, want .*; fix: hub_model_id"
    refused(lambda: start(push_to_hub=True, hub_model_id=name), message, tmp_path)


def test_an_upload_without_the_hub_is_refused_before_the_run(start, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_mine")  # and HF_HUB_OFFLINE is set
    refused(lambda: start(push_to_hub=True), "got push_to_hub with HF_HUB_OFFLINE set", tmp_path)


def test_a_dry_run_says_it_of_eval_sets_and_rewards_too(folder, tmp_path):
    write(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, ROWS)))
    write(tmp_path / "held_out.jsonl", json.dumps({"prompt": "1="}))
    write(tmp_path / "mine.py", "def score(completions, answer, **columns): return [0.0] * len(completions)\n")
    command = ["train", "--dry-run", "--model", str(folder), "--output-dir", str(tmp_path / "run")]
    command += ["--dataset", str(tmp_path / "rows.jsonl"), "--eval-dataset", str(tmp_path / "held_out.jsonl")]
    with pytest.raises(SystemExit, match=r"wants 'answer', .*\(eval_dataset\)"):
        main([*command, "--reward-funcs", f"{tmp_path / 'mine.py'}:score"])
    with pytest.raises(SystemExit, match=r"got reward_funcs '\./typo', a path that does not exist"):
        main([*command, "--reward-funcs", "format", "./typo"])


@pytest.mark.parametrize("names", [["length=3", "of/it"], ["of/it", "length=3"], ["of/it", "of/it"], ["of/it"]])
def test_a_dry_run_has_a_weight_for_each_reward_model_and_loads_none(names):
    args = GRPOConfig(reward_weights=[1.0, 0.5][: len(names)])
    start = SimpleNamespace(args=args, reward_funcs=names, reward_processing_classes=None, accelerator=None)
    rewards = make_rewards(start, [])
    assert rewards.weights.tolist() == args.reward_weights
    assert [name.partition("_")[0] for name in rewards.names] == [name[-2:].replace("=3", "length") for name in names]


def test_a_function_that_returns_a_generator_loses_no_row(folder, tmp_path):
    write(tmp_path / "mine.py", f"def rows(split): yield from [dict(row, question='1=') for row in {ROWS}]\n")
    command = ["train", "--dry-run", "--model", str(folder), "--output-dir", str(tmp_path / "run"), "--max-steps", "1"]
    command += ["--dataset", f"{tmp_path / 'mine.py'}:rows", "--prompt-column", "question", "--reward-funcs", "format"]
    with pytest.raises(SystemExit, match=r"got a generator as train_dataset: .*which can start again"):
        main(command)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "./typo"}, r"got model './typo', a path that does not exist"),
        ({"model": "/no/such/model"}, "a path that does not exist"),
        ({"model": "a/b/c"}, "a path that does not exist"),
        ({"model": "somebody/typo"}, r"got model 'somebody/typo', whose config cannot be loaded"),
        ({"model": __file__}, "which is a file"),
        ({"model": 5}, "got a int as model"),
        ({"model": torch.nn.Linear(2, 2)}, "got a Linear as model"),
        ({"teacher_model": "./typo", "distillation_coef": 1.0}, "got teacher_model './typo', a path that does not ex"),
        ({"rewards": "rewards.py"}, r"got reward function 'rewards\.py', a file.*fix: rewards\.py:"),
        ({"rewards": [reward, "./typo"]}, r"got reward_funcs './typo', a path that does not exist"),
        ({"rewards": "acuracy"}, "did you mean accuracy"),
        ({"callbacks": [print]}, "got <built-in function print> among the callbacks"),
        ({"push_to_hub": True}, "got push_to_hub without a login"),
        ({"lr_scheduler_kwargs": {"cycles": 2}}, r"got lr_scheduler_type='linear' with .*argument 'cycles'"),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1.0}}, "got lr_scheduler_type='polyn"),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": "1e-9"}},
            r"fix: 1\.0e-09 \(YAML takes",
        ),
        ({"report_to": "nobodys"}, "got report_to='nobodys'"),
        ({"resume_from_checkpoint": "nowhere"}, r"manifest\.json is missing"),
        ({"resume_from_checkpoint": True}, "no complete checkpoint"),
        ({"output_dir_is": "file"}, "run is a file"),
        ({**SERVED, "vllm_server_base_url": "here"}, "got a server URL without scheme"),
        ({"eval_dataset": []}, "got an empty eval_dataset"),
        ({"max_completion_length": 40000}, "want room for a prompt"),
        ({"generation_kwargs": {"stop_strings": "."}}, "got generation_kwargs with stop_strings, want .*transformers"),
        ({"generation_kwargs": {"stop_token_ids": "1"}}, "got stop_token_ids='1'"),
        ({"generation_kwargs": {"num_beams": 2}, **SERVED}, "got generation_kwargs with num_beams, want .*server"),
        ({"vllm_structured_outputs_regex": "a+"}, r"got structured_outputs_regex='a\+' for the transformers engine"),
    ],
)
def test_what_names_nothing_that_exists_is_refused(start, tmp_path, monkeypatch, options, message):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    if options.pop("output_dir_is", None):
        write(tmp_path / "run", "")
    refused(lambda: start(**options), message, tmp_path)


KINDS = [list, Dataset.from_list, lambda rows: Dataset.from_list(rows).to_iterable_dataset()]
OF_NO_USE = [
    ([{"prompt": "1="}], r"wants 'answer', .*\(eval_dataset\['hard'\]\)"),
    (CHAT, r"prompts of eval_dataset\['hard'\] and a tokenizer without a chat template"),
    ([{"prompt": "<extra>1", "answer": ""}], r"got token \d+ .* row 0 of eval_dataset\['hard'\]"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "message"), OF_NO_USE)
def test_an_eval_set_that_no_evaluation_could_use_is_named(start, tokenizer, tmp_path, kind, rows, message):
    tokenizer.add_tokens(["<extra>"])
    sets = {"easy": ROWS, "hard": kind(rows)}
    refused(lambda: start(eval_dataset=sets, eval_strategy="epoch", processing_class=tokenizer), message, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_for_evaluate_is_named_before_another_is_completed(start, tokenizer, tmp_path, kind):
    tokenizer.add_tokens(["<extra>"])
    trainer = start(processing_class=tokenizer)  # its reward may not be called
    for rows, message in OF_NO_USE:
        refused(lambda rows=rows: trainer.evaluate({"easy": ROWS, "hard": kind(rows)}), message, tmp_path)


def test_a_prompt_that_the_template_refuses_is_named_wherever_it_is(start, tokenizer, tmp_path):
    tokenizer.chat_template = "{{ messages[0].content if messages[0].role == 'user' else raise_exception('odd') }}"
    rows = [{"prompt": [{"role": "user", "content": "1"}], "answer": ""}] * 1500
    rows[1234] = {"prompt": [{"role": "odd", "content": "1"}], "answer": ""}
    refused(lambda: start(rows=rows, processing_class=tokenizer), "odd .* of row 1234 of train_dataset", tmp_path)


def test_tokens_without_a_row_in_the_embedding_are_named(make_model, start, tokenizer, tmp_path):
    model, resized = make_model(), make_model()
    tokenizer.add_tokens(["<extra>"])
    rows = [*ROWS, {"prompt": "1<extra>", "answer": ""}]
    message = r"got token \d+ \('<extra>'\) in the prompt of row 4 of train_dataset.*resize_token_embeddings"
    refused(lambda: start(model, rows=rows, processing_class=tokenizer), message, tmp_path)
    tokenizer.pad_token = "<extra>"
    message = r"got token \d+ \('<extra>'\) in the tokenizer's pad_token, want ids below.*resize_token_embeddings"
    refused(lambda: start(model, processing_class=tokenizer), message, tmp_path)
    resized.resize_token_embeddings(len(tokenizer))
    assert start(resized, rows=rows, processing_class=tokenizer).max_steps == 4


@pytest.mark.parametrize("kind", [list, Dataset.from_list])
@pytest.mark.parametrize("size", [61, 1_000_000])
def test_a_prompt_beyond_the_models_positions_is_left_out_or_an_error(start, tokenizer, caplog, tmp_path, kind, size):
    warn_once.cache_clear()
    shape = {"vocab_size": len(tokenizer), "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    make = partial(start, GPT2LMHeadModel(GPT2Config(**shape)), processing_class=tokenizer)
    rows = [*ROWS, {"prompt": "1" * size, "answer": ""}]
    trainer = make(rows=kind(rows))
    assert len(trainer.dataset) == 4
    assert "got 1 of 5 prompts of train_dataset with more than 60 tokens (the model's positions" in caplog.text
    got = f"got {size if size < 100 else 'too many'} tokens for the prompt of row 4 of train_dataset"
    refused(lambda: make(rows=kind(rows), long_prompts="fail"), got, tmp_path)
    refused(lambda: make(rows=kind(rows[4:])), "got 1 of 1 prompts", tmp_path)


@pytest.mark.parametrize(
    ("rope", "wanted"),
    [
        ({"rope_type": "default"}, 1024),
        ({"rope_type": "linear", "factor": 4.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
    ],
)
def test_positions_are_those_of_the_scaled_embedding(rope, wanted):
    config = LlamaConfig(max_position_embeddings=1024, rope_parameters={"rope_theta": 10000.0, **rope})
    assert positions(config) == wanted


@pytest.mark.parametrize("name", ["final/model.gguf", "final/eval_results.json", "final/deep/er/notes"])
def test_files_of_others_where_the_model_is_going_to_be_are_named(start, tmp_path, name):
    write(tmp_path / "run" / name, "mine")
    refused(start, f"no checkpoint wrote .{name.partition('/')[2]}", tmp_path)


@pytest.mark.parametrize(("step", "is_met"), [(2, True), (4, True), (3, False), (6, False)])
def test_files_in_a_later_checkpoints_place_are_named_before_a_step(make_trainer, tmp_path, step, is_met):
    make_trainer(max_steps=4, save_steps=1, overwrite_output_dir=False).train()
    run = tmp_path / "run"
    for later in (2, 3, 4):
        shutil.rmtree(run / f"checkpoint-{later}")
    write(run / f"checkpoint-{step}" / "model.safetensors", "of an interrupted copy")
    trainer = make_trainer(max_steps=4, save_steps=2, overwrite_output_dir=False)
    if not is_met:
        assert trainer.train(resume_from_checkpoint=run / "checkpoint-1").steps == 4
        return
    refused(lambda: trainer.train(resume_from_checkpoint=run / "checkpoint-1"), r"no manifest\.json, as an interr", run)


def test_a_disk_without_room_for_the_model_and_a_checkpoint_is_named(start, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 100_000))
    refused(start, "free at .*, want about .* for the final model and checkpoints", tmp_path)
    assert start(save_strategy="no", max_steps=1).max_steps == 1


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, 10),
        ({"save_steps": 4}, 3),
        ({"save_steps": 0.3}, 4),
        ({"save_total_limit": 4}, 5),
        ({"save_strategy": "epoch"}, 5),
        ({"save_total_limit": 1}, None),
        ({"save_only_model": True}, None),
        ({"save_strategy": "no"}, None),
    ],
)
def test_a_disk_that_fills_before_the_last_checkpoint_is_named(start, monkeypatch, caplog, options, kept):
    """It has room for the final model and for two whole checkpoints, or for six without the optimizer's state."""
    warn_once.cache_clear()
    defaults = {"save_strategy": "steps", "save_steps": 1, "max_steps": 10}
    weights = start(max_steps=10).start.shape.trained * 4
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, int(7.5 * weights)))
    begun = start(**defaults | options | ({"save_total_limit": 5} if "save_only_model" in options else {}))
    said = [line for line in caplog.messages if "more checkpoints" in line]
    if kept is None:
        assert not said
    else:
        kept = math.ceil(begun.start.epochs.at(10)) if options.get("save_strategy") == "epoch" else kept
        assert "room for 2 more checkpoints, want about" in said[0]
        assert f" the {kept} that this run" in said[0]


@pytest.mark.parametrize("part", ["config", "generation_config"])
def test_a_module_whose_configuration_cannot_be_saved_is_refused(make_model, tokenizer, start, tmp_path, part):
    model = make_model()
    if part == "config":
        model.config.temperature = 0.5
    else:
        model.generation_config = GenerationConfig(temperature=0.5)
    refused(lambda: start(model, processing_class=tokenizer), f"the {part} of Qwen2ForCausalLM", tmp_path)


def test_processes_that_a_launcher_has_not_started_are_missed(start, tmp_path, monkeypatch):
    """What `accelerate launch --cpu --num_processes 2` sets."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    assert start().max_steps == 4
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    refused(start, "got one process from an accelerate launch .* fix: torchrun --nproc_per_node", tmp_path)


def test_processes_with_the_state_of_the_one_that_launched_them_are_found(start, tmp_path, monkeypatch):
    """A fork inherits it: each would train by itself."""
    assert GRPOConfig(use_cpu=True).device.type == "cpu"
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(start, r"got 1 process\(es\) where WORLD_SIZE=2, want as many; fix: whatever makes Accelerate's", tmp_path)


def test_a_map_style_dataset_is_as_long_as_it_says(start):
    class Endless(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> dict[str, str]:
            return {"prompt": f"{index % 10}+1=", "answer": ""}

    trainer = start(rows=Endless(), eval_dataset=Endless(), max_steps=-1, num_train_epochs=2)
    assert (trainer.sampler.num_prompts, trainer.max_steps, trainer.start.limit.longest) == (6, 12, 4)


def test_a_stream_shows_its_first_prompt(start, tokenizer, tmp_path):
    stream = IterableDataset.from_generator(lambda: iter(CHAT))
    refused(lambda: start(rows=stream), "prompts of train_dataset and a tokenizer without a chat template", tmp_path)


def without_template(model: Any, tokenizer: Any) -> Any:
    tokenizer.chat_template = None
    return model, "ValueError: Cannot use chat template"


def with_padding_of_its_own(model: Any, tokenizer: Any) -> Any:
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    return model, "IndexError"


def with_another_vocabulary(model: Any, tokenizer: Any) -> Any:
    model.resize_token_embeddings(3)
    return model, "IndexError"


def without_a_head(model: Any, tokenizer: Any) -> Any:
    return model.model, "AttributeError: .*logits"


def of_language(model: Any, tokenizer: Any) -> Any:
    return AutoModelForCausalLM.from_config(model.config), "want a finite float"


def of_two_labels(model: Any, tokenizer: Any) -> Any:
    model.score = torch.nn.Linear(model.config.hidden_size, 2)
    return model, "want a finite float"


CHANGES = [without_template, with_padding_of_its_own, with_another_vocabulary, without_a_head, of_language]


@pytest.mark.parametrize("failure", ["fail", "retry"])
@pytest.mark.parametrize("change", [*CHANGES, of_two_labels])
def test_a_reward_model_that_can_score_nothing_is_named(make_model, start, tokenizer, tmp_path, change, failure):
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = Qwen2Config(**make_model().config.to_dict())
    config.num_labels = 1
    judge, its = Qwen2ForSequenceClassification(config), copy.deepcopy(tokenizer)
    options = {"rows": CHAT, "processing_class": tokenizer, "reward_processing_classes": its, "reward_failure": failure}
    assert start(rewards=judge, **options).max_steps == 4
    judge, message = change(judge, its)
    with pytest.raises(RewardError, match=f"(?s)reward function 'Qwen2.*{message}"):
        start(rewards=judge, **options)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_that_would_load_as_another_one_is_said_at_the_start(start, make_model, tokenizer, caplog, adapted):
    warn_once.cache_clear()
    model = make_model()
    model.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    config = LoraConfig(target_modules=["q_proj"]) if adapted else None  # of which the base is not saved
    start(model, processing_class=tokenizer, peft_config=config)
    assert ("whose lm_head.bias are not those of its config" in caplog.text) is not adapted
