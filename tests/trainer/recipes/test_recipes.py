"""The packaged recipes: each is parsed, divides, and is dry-run with a small model in place of the hub's."""

import json

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from fused_grpo.trainer.cli.main import main
from fused_grpo.trainer.cli.options import RECIPES, parse_train_options
from fused_grpo.trainer.cli.train import in_format, load_prompts
from fused_grpo.trainer.recipes import arithmetic
from fused_grpo.trainer.rewards import Rewards

NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}="


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import Qwen2ForCausalLM

    path, tokenizer = tmp_path_factory.mktemp("model"), arithmetic.build_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    config = arithmetic.build_model_config(tokenizer)
    config.max_position_embeddings = 4096  # a recipe's completions are longer than the demo's
    Qwen2ForCausalLM(config).save_pretrained(path)
    rows = [{"question": "3+4", "answer": f"3 + 4 = 7\n#### {number}"} for number in range(64)]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_all_kinds_of_run_have_a_recipe():
    gsm8k = ["gsm8k", "gsm8k-1gpu", "gsm8k-distill", "gsm8k-lora", "gsm8k-multi-gpu", "gsm8k-server"]
    assert set(NAMES) == {"demo", "calculator", "smollm2", *gsm8k}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_dry_run(name, model, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fused_grpo.trainer.collect.start_checks.check_installed", lambda: None)
    data = str(model / "rows.jsonl")
    small = [] if name in ("demo", "calculator") else ["--model", str(model)]
    small += ["--dataset", data, "--eval-dataset", data] if name.startswith("gsm8k") else []
    small += ["--teacher-model", str(model)] if name == "gsm8k-distill" else []
    if name == "smollm2":
        pytest.importorskip("reasoning_gym")
    main(["train", "--config", name, "--dry-run", *small])
    shown = capsys.readouterr().out
    assert "optimizer step" in shown
    assert "weights, fp32" in shown
    assert list(tmp_path.iterdir()) == []


def test_several_gpus_make_the_same_update_as_one():
    one, several = (parse_train_options(["--config", name]) for name in ("gsm8k-1gpu", "gsm8k-multi-gpu"))
    assert one.prompts_per_process(1) == several.prompts_per_process(8) * 8 == 32
    assert one.loss_config() == several.loss_config()


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_accelerate_takes_its_configurations(name):
    path = RECIPES / "accelerate" / f"{name}.yaml"
    config = load_config_from_file(str(path))
    assert config.num_processes == 8
    written = yaml.safe_load(path.read_text())
    assert str(config.distributed_type.value) == written["distributed_type"]


def test_prompts_of_gsm8k_are_conversations_beside_their_solution(model):
    options = parse_train_options(["--config", "gsm8k", "--model", str(model), "--dataset", str(model / "rows.jsonl")])
    row = in_format(load_prompts(options, held_out=False), options, tokenizer=None)[0]
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["prompt"][1]["content"] == "3+4"
    assert Rewards(options.reward_funcs).functions[0](completions=["#### 0"], **{"answer": [row["answer"]]}) == [1.0]
