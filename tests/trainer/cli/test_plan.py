"""`fused-grpo plan`: sizes from a config, the table of splits, and what it says of the best one."""

import re
import shlex
from pathlib import Path

import pytest
from transformers import DeepseekV3Config, Gemma4TextConfig, MambaConfig, Qwen2Config, Qwen3MoeConfig

from fused_grpo.errors import DataError, InputError, UnsupportedError
from fused_grpo.trainer.cli.main import main
from fused_grpo.trainer.cli.plan import plan, size_of
from fused_grpo.trainer.models.memory_estimate import shape_of

SIZES = ["--model-params=7.6e9", "--layers=28", "--hidden-size=3584", "--heads=28", "--kv-heads=4"]
SIZES += ["--vocab-size=152064"]


def steps_of(text: str) -> list[float]:
    """The seconds of each line of the table."""
    lines = text[text.index("tokens/s") :].split("\n\n")[0].splitlines()[1:]
    return [float(line.split()[-2].replace(",", "")) for line in lines]


def test_it_prints_the_splits_from_the_fastest_on_and_the_bottleneck(capsys):
    main(["plan", *SIZES, "--gpus", "8", "--completion-length", "500"])
    said = capsys.readouterr().out
    assert said.startswith("7.6B parameters; 8 x h100\nbatch: 64 prompts x 16 completions of 500 tokens, at most 4,096")
    steps = steps_of(said)
    assert len(steps) == 5
    assert steps == sorted(steps)
    assert re.search(rf"bottleneck: rollouts, \d\d% of the step; instead of {steps[0]:,.1f} s:", said)
    assert re.findall(r"^  (--\S+(?: \d+)?) ", said, re.MULTILINE) == [
        "--gpus 16",
        "--generate_ahead 1",
        "--no-gradient-checkpointing",
    ]
    assert all(len(line) <= 100 for line in said.splitlines())


def test_the_example_of_the_page_is_what_the_command_prints():
    page = (Path(__file__).resolve().parents[3] / "docs/planning.md").read_text()
    command, printed = re.search(r"```bash\nfused-grpo plan (.*?)```\n\n```text\n(.*?)\n```", page, re.DOTALL).groups()
    assert plan(shlex.split(command.replace("\\\n", " "))) == printed


def test_what_would_change_it_is_what_the_changed_command_says():
    said = plan([*SIZES, "--gpus", "8"])
    for change in ("--gpus 16", "--generate_ahead 1", "--no-gradient-checkpointing"):
        changed = plan([*SIZES, "--gpus", "8", *change.split()])
        assert re.search(rf"{change} +([\d.,]+) s", said)[1] == f"{steps_of(changed)[0]:,.1f}"


def test_servers_and_the_trainers_process_are_told_apart():
    said = plan([*SIZES, "--gpus", "8"])
    assert "8 sample and train in turn" in said
    assert "in turn" not in plan([*SIZES, "--gpus", "8", "--generate_ahead", "1"])
    assert re.search(r"\d x TP \d sample, \d train", said)


def test_each_option_of_a_run_changes_the_answer():
    before = plan([*SIZES, "--gpus", "8"])
    for option in (
        *("--gpu=a100", "--prompts=32", "--num-generations=8", "--prompt-length=4000", "--completion-length=900"),
        *("--max-completion-length=8000", "--generate_ahead=1", "--no-gradient-checkpointing", "--log-prob-passes=1"),
        *("--no-share-prompts", "--reward-seconds=9", "--tool-seconds=9", "--sync-bandwidth=1e9", "--mfu=0.2"),
        *("--gpu-memory-utilization=0.25", "--bandwidth=0.9", "--decode=0.9", "--host=0.01", "--sequence=1e-4"),
        *("--all-reduce=1e-3", "--kv-heads=28", "--active-params=2e9", "--heads=100"),
    ):
        assert plan([*SIZES, "--gpus", "8", option]) != before, option
    prefetched = [*SIZES, "--gpus", "8", "--generate_ahead", "1"]
    assert plan([*prefetched, "--in-flight"]) != plan(prefetched)


def test_the_sizes_of_a_mixture_of_experts_are_read_from_its_config(tmp_path):
    Qwen3MoeConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=100,
        intermediate_size=96, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, tie_word_embeddings=False,
    ).save_pretrained(tmp_path)  # fmt: skip
    size = size_of(str(tmp_path))
    experts = 2 * 8 * 3 * 64 * 48
    rest = 2 * 100 * 64 + 2 * (64 * 32 * (4 + 2 + 2 + 4) + 2 * 32 + 2 * 64 + 8 * 64) + 64
    assert (size.model_params, size.active_params) == (rest + experts, rest + experts / 4)
    assert (size.layers, size.heads, size.kv_heads, size.head_dim, size.vocab_size) == (2, 4, 2, 32, 100)
    assert size_of(str(tmp_path / "config.json")) == size
    assert "of them for a token" in plan(["--model", str(tmp_path), "--gpus", "2"])


def test_a_dense_tied_model_has_no_inactive_parameters(tmp_path):
    Qwen2Config(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=True).save_pretrained(
        tmp_path
    )
    size = size_of(str(tmp_path))
    assert (size.active_params, size.tie_word_embeddings, size.head_dim) == (None, True, 16)
    by_hand = plan(["--model", str(tmp_path), "--gpus", "4", "--model-params", "9e9", "--layers", "40"])
    assert by_hand.startswith("9B parameters; 4 x h100")


def test_of_latent_attention_the_latents_are_cached(tmp_path):
    """DeepSeek-V3, whose cache has 512 + 64 numbers of a token and layer."""
    DeepseekV3Config().save_pretrained(tmp_path)
    size = size_of(str(tmp_path))
    assert size.token_bytes == 61 * 576 * 2
    assert (size.heads, size.head_dim) == (128, 128)
    assert size.model_params == pytest.approx(671e9, rel=0.001)
    assert size.active_params == pytest.approx(37.5e9, rel=0.01)


def test_a_model_that_is_not_there_and_gpus_that_are_too_few_are_errors(tmp_path, capsys):
    with pytest.raises(DataError, match="want a folder with a model in it"):
        size_of(str(tmp_path / "none"))
    with pytest.raises(InputError, match="fix: more GPUs, or LoRA"):
        plan([*SIZES, "--gpus", "1"])
    with pytest.raises(SystemExit):
        plan(["--gpus", "8"])
    assert "--model-params" in capsys.readouterr().err


def test_layers_of_several_widths_are_counted_each(tmp_path):
    """Gemma 4's layers with global attention have wider heads."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    types = ["sliding_attention", "full_attention"] * 2
    vocabulary = {"vocab_size": 64, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
    heads = {"head_dim": 16, "global_head_dim": 48, "num_kv_shared_layers": 0}
    config = Gemma4TextConfig(num_hidden_layers=4, layer_types=types, **sizes, **vocabulary, **heads)
    config.save_pretrained(tmp_path)
    size = size_of(str(tmp_path))
    assert (size.head_dim, size.kv_heads * size.head_dim) == ((16 + 48) // 2, (16 + 48) // 2)
    assert shape_of(config).kv_width == 32


def test_a_model_without_attention_is_refused_by_its_type(tmp_path):
    MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"got .*, a mamba without attention heads, want .*; fix: "):
        size_of(str(tmp_path))
