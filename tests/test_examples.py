"""The examples, run as a reader would run them, and the page about one's own loop against full logits and autograd.

Started as a script, this file is one of the two processes that train as that page says.
"""

import ast
import importlib.util
import json
import re
import sys
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OWN_LOOP, PAGE = ROOT / "examples" / "own_loop.py", ROOT / "docs" / "integrations" / "own-loop.md"


def parametrized(paths: list[Path]) -> Any:
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.name)


@pytest.fixture(scope="module")
def ran(fork_server, tmp_path_factory):
    """What an example has printed, and the folder where it ran; each runs once."""

    @cache
    def ran(path: Path, *arguments: str) -> tuple[str, Path]:
        folder = tmp_path_factory.mktemp(path.stem)
        env = {"TRITON_INTERPRET": "0"}
        return fork_server.run(path, *arguments, cwd=folder, env=env, stage="libraries", timeout=300), folder

    return ran


def needs(package: str) -> Any:
    is_there = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not is_there, reason=f"{package} is not installed (fused-grpo[{package}])")


MARKS = {
    "environment.py": pytest.mark.full,  # it takes half a minute: the next but one runs in its place
    "textarena_wordle.py": needs("textarena"),
    "openenv_server.py": needs("openenv"),
    "verifiers_taskset.py": needs("verifiers"),
}
# An example, the folder of its run, the name of its reward, and its tool.
OTHER_PROJECTS = [
    ("textarena_wordle.py", "textarena", "Wordle-v0", "act"),
    ("openenv_server.py", "openenv", "OpenEnv", "step"),
    ("verifiers_taskset.py", "verifiers", "Sums", None),
]


@pytest.mark.parametrize("path", [pytest.param(one, marks=MARKS.get(one.name, ()), id=one.name) for one in EXAMPLES])
def test_an_example_runs_alone_and_leaves_nothing_unannounced(ran, path):
    printed, folder = ran(path)
    assert printed.strip()
    announced = ast.get_docstring(ast.parse(path.read_text()))
    assert [file.name for file in folder.iterdir() if file.name not in announced] == []


@pytest.mark.parametrize(
    ("name", "run", "reward", "tool"),
    [pytest.param(*case, marks=MARKS[case[0]], id=case[0]) for case in OTHER_PROJECTS],
)
def test_what_another_project_made_is_played_and_scored(ran, name, run, reward, tool):
    printed, folder = ran(ROOT / "examples" / name)
    assert len(re.search(r"^reward by step: ([\d. ]+)$", printed, re.MULTILINE)[1].split()) == 10
    completions = [json.loads(line) for line in (folder / "runs" / run / "rollouts.jsonl").read_text().splitlines()]
    assert {column for one in completions for column in one["rewards"]} == {reward}
    assert len({one["reward"] for one in completions}) > 1
    calls = [call for one in completions for call in one.get("tool_calls", ())]
    assert {call["name"] for call in calls} == ({tool} if tool else set())
    assert any(not call["failed"] for call in calls) is (tool is not None)  # a few may be written wrongly


@pytest.mark.learning
def test_students_learn_from_rewards_and_from_a_teacher(ran, learning_seed, learned):
    printed, folder = ran(ROOT / "examples" / "distill.py", *[str(learning_seed)] * bool(learning_seed))
    curves = {name: re.search(rf"^{name} +([\d. ]+)$", printed, re.MULTILINE)[1] for name in ("rewards", "teacher")}
    for (name, curve), least in zip(curves.items(), (0.15, 0.3), strict=True):
        start, *_, end = (float(value) for value in curve.split())
        assert start < 0.25
        learned(f"examples/distill.py, {name}: gain of accuracy", measured=end - start, least=least)
    for name in curves:
        report = (folder / "runs" / f"distill-{name}" / "report.html").read_text()
        assert ("divergence from the teacher" in report) is (name == "teacher")
        assert "held-out reward" in report


@pytest.mark.full
@pytest.mark.learning
def test_a_game_of_several_turns_is_learned(ran, learning_seed, learned):
    printed, folder = ran(ROOT / "examples" / "environment.py", *[str(learning_seed)] * bool(learning_seed))
    shares = [float(share) for share in re.search(r"^numbers found: ([\d. ]+)$", printed, re.MULTILINE)[1].split()]
    assert len(shares) == 12
    learned("examples/environment.py: gain of games won, five steps", measured=shares[-1] - shares[0], least=0.1)
    assert "higher" in (folder / "runs" / "environment" / "report.html").read_text()


def test_a_game_of_several_turns_is_played(monkeypatch, tmp_path, capsys):
    example = module_of(ROOT / "examples" / "environment.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(example.RUN, "max_steps", 5)
    monkeypatch.setattr(example, "GAMES", 64)  # enough to know how a call is written
    example.main()
    won = float(re.search(r"^numbers found: ([\d.]+)$", capsys.readouterr().out, re.MULTILINE)[1])
    assert abs(won - (1 - (3 / 4) ** 3)) < 0.1  # three guesses at random: 960 games, so 6 standard deviations
    report = (tmp_path / "runs" / "environment" / "report.html").read_text()
    assert all(answer in report for answer in ("right", "higher", "lower"))


@parametrized(EXAMPLES)
def test_an_example_is_short_and_built_from_public_things(path):
    assert len(path.read_text().splitlines()) <= 80
    for name in imports(path):
        assert name.split(".")[0] not in ("tests", "conftest")
        assert not (name.startswith("fused_grpo.") and any(part.startswith("_") for part in name.split("."))), name


def test_the_own_loop_needs_the_ops_and_nothing_else():
    roots = {name.split(".")[0] for name in imports(OWN_LOOP)}
    assert roots - sys.stdlib_module_names == {"torch", "transformers", "fused_grpo"}
    assert [name for name in imports(OWN_LOOP) if name.startswith("fused_grpo.trainer")] == []


def imports(path: Path) -> list[str]:
    """Every module, and every name taken from one, as `module.name`."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def own_loop() -> ModuleType:
    return module_of(OWN_LOOP)


@pytest.mark.learning
def test_the_own_loop_learns(own_loop, capsys, learning_seed, learned):
    rewards = own_loop.main(steps=30, seed=learning_seed)
    assert len(rewards) == 30
    assert f"reward {rewards[20]:.2f}" in capsys.readouterr().out
    gain = (sum(rewards[-3:]) - sum(rewards[:3])) / 3
    learned("examples/own_loop.py: gain of reward, three steps", measured=gain, least=0.25)


def record(own_loop: ModuleType, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], list[tuple[dict, Any]]]:
    """Of every generate call, the log-probs of its tokens; of every call of the loss, its arguments and its output."""
    sampled, losses = [], []
    from_config, loss = own_loop.AutoModelForCausalLM.from_config, own_loop.fused_linear_grpo_loss

    def recording_model(config) -> PreTrainedModel:
        model = from_config(config)
        generate = model.generate

        def recording_generate(*inputs, **options) -> Tensor:
            output = generate(*inputs, **options, output_logits=True, return_dict_in_generate=True)
            logprobs = torch.stack(output.logits, 1).log_softmax(-1)
            sampled.append(logprobs.gather(-1, output.sequences[:, -logprobs.shape[1] :, None])[..., 0])
            return output.sequences

        model.generate = recording_generate
        return model

    def recording_loss(hidden, weight, targets, **inputs) -> Any:
        losses.append((inputs, loss(hidden, weight, targets, **inputs)))
        return losses[-1][1]

    monkeypatch.setattr(own_loop.AutoModelForCausalLM, "from_config", recording_model)
    monkeypatch.setattr(own_loop, "fused_linear_grpo_loss", recording_loss)
    return sampled, losses


def test_the_own_loop_generates_once_and_compares_with_the_sampling_policy(own_loop, monkeypatch):
    sampled, losses = record(own_loop, monkeypatch)
    own_loop.main(steps=3)
    assert (len(sampled), len(losses)) == (3, 24)
    for step, logprobs in enumerate(sampled):
        first, second = losses[8 * step : 8 * step + 4], losses[8 * step + 4 : 8 * step + 8]
        mask = torch.cat([inputs["mask"] for inputs, _ in first])
        actual = torch.cat([output.logprobs for _, output in first])
        torch.testing.assert_close(actual[mask], logprobs[mask], rtol=0, atol=1e-5)
        assert {int(inputs["num_tokens"]) for inputs, _ in first + second} == {int(mask.sum())}
        for (before, output), (after, moved) in zip(first, second, strict=True):
            assert before["old_logprobs"] is None
            assert after["old_logprobs"] is output.logprobs
            assert not torch.equal(moved.logprobs, output.logprobs)


def test_the_own_loop_rewards_the_right_prefix(own_loop):
    answers = {(6, (7, 8, 9, 10)): 1.0, (6, (7, 8, 9)): 0.75, (6, (7, 8, 9, 9, 10)): 0.6, (6, (8, 8, 9, 10)): 0.0}
    answers |= {(9, (10,)): 1.0, (9, (9, 10)): 0.0, (0, ()): 0.0}
    for (digit, written), expected in answers.items():
        assert own_loop.reward(digit, list(written)) == pytest.approx(expected), (digit, written)


# The page. B sequences of P prompt tokens, padded on the left, and at most T of a completion.
B, P, T, V = 8, 5, 6, 23
OLD_WEIGHTS, NEW_WEIGHTS = 0, 1


def page_model(seed: int = OLD_WEIGHTS) -> PreTrainedModel:
    """Of a family that scales its logits."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    options = {"tie_word_embeddings": False, "logit_scale": 2.0, "pad_token_id": None, "bos_token_id": None}
    config = transformers.CohereConfig(vocab_size=V, eos_token_id=None, **shape, **options)
    return transformers.AutoModelForCausalLM.from_config(config)


def page_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(1, P + 1, (B, 1), generator=generator)
    mask = torch.arange(T) < torch.randint(1, T + 1, (B, 1), generator=generator)
    attention_mask = torch.cat([torch.arange(P) >= P - prompts, torch.ones_like(mask)], 1).long()
    ids = torch.randint(0, V, (B, P + T), generator=generator)
    advantages = torch.randn(B, generator=generator)
    return {"ids": ids, "attention_mask": attention_mask, "mask": mask, "advantages": advantages}


def page(*blocks: int, **names: Any) -> dict[str, Any]:
    """What the page's Python blocks define, run in order with `names` at hand."""
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(snippets) == 3
    for block in blocks:
        exec(compile(snippets[block], f"{PAGE.name}, block {block}", "exec"), names)
    return names


def textbook_logprobs(model: PreTrainedModel, batch: dict[str, Tensor]) -> list[Tensor]:
    """One tensor per completion, from full logits of it alone: no padding on either side."""
    logprobs = []
    for ids, attended, mask in zip(batch["ids"], batch["attention_mask"], batch["mask"], strict=True):
        tokens = torch.cat([ids[:P][attended[:P] == 1], ids[P:][mask]])
        logits = model(tokens[None]).logits[0, -1 - mask.sum() : -1]
        logprobs.append(logits.log_softmax(-1).gather(1, tokens[-mask.sum() :, None])[:, 0])
    return logprobs


def textbook_gradients(model: PreTrainedModel, batch: dict[str, Tensor], old: list[Tensor]) -> dict[str, Tensor]:
    ratios = [torch.exp(new - before) for new, before in zip(textbook_logprobs(model, batch), old, strict=True)]
    pairs = list(zip(ratios, batch["advantages"], strict=True))
    loss = -torch.cat([torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A) for ratio, A in pairs]).mean()
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


def assert_gradients(model: PreTrainedModel, expected: dict[str, Tensor]) -> None:
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-2
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "activation checkpointing"])
def test_the_pages_two_iterations_are_those_of_the_textbook(checkpointed):
    names, batch, before, model = page(0, 1), page_batch(), page_model(), page_model(NEW_WEIGHTS)
    old = names["backward"](names["PolicyLoss"](before), batch, size=3)
    expected = [x.detach() for x in textbook_logprobs(before, batch)]
    torch.testing.assert_close(old[batch["mask"]], torch.cat(expected), rtol=0, atol=1e-5)
    assert_gradients(before, textbook_gradients(before, batch, expected))
    if checkpointed:
        model.gradient_checkpointing_enable()
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    names["backward"](names["PolicyLoss"](model.train()), {**batch, "old_logprobs": old}, size=3)
    assert len(calls) == 3 * (1 + checkpointed)
    model.gradient_checkpointing_disable()
    assert_gradients(model, textbook_gradients(model, batch, expected))


@pytest.mark.parametrize("family", ["GPT2", "OPT"])  # of which one needs the positions, the other the mask
def test_the_pages_hidden_states_do_not_see_the_padding(family):
    torch.manual_seed(0)
    options = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16}
    config = getattr(transformers, f"{family}Config")(**options, max_position_embeddings=P + T, word_embed_proj_dim=16)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    names, batch = page(0), page_batch()
    with torch.no_grad():
        inputs = names["head_inputs"](model, batch["ids"], batch["attention_mask"], T)
        actual, expected = names["linear_logprobs"](**inputs), torch.cat(textbook_logprobs(model, batch))
    torch.testing.assert_close(actual[batch["mask"]], expected, rtol=1e-5, atol=1e-4)


def test_the_pages_lora_trains_the_adapter_against_the_base(monkeypatch):
    import peft

    moved = partial(peft.LoraConfig, init_lora_weights=False)  # as if it had learnt something
    monkeypatch.setattr(peft, "LoraConfig", moved)
    model, batch = page_model(), page_batch()
    base_logprobs = torch.cat(textbook_logprobs(model, batch)).detach()
    actual = page(0, 1, 2, model=model, batch=batch)["ref_logprobs"][batch["mask"]]
    torch.testing.assert_close(actual, base_logprobs, rtol=0, atol=1e-5)
    assert (torch.cat(textbook_logprobs(model, batch)) - base_logprobs).abs().max() > 1e-2
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(trained) == 2 * 2 * 7  # A and B of every linear layer
    assert all("lora_" in name for name in trained)


def test_two_processes_of_the_page_make_the_gradients_of_one(fork_server, tmp_path):
    for process in [fork_server.start(__file__, tmp_path, rank) for rank in (0, 1)]:
        assert process.wait(timeout=200) == 0, process.output
    model, batch = page_model(), page_batch()
    expected = textbook_gradients(model, batch, [x.detach() for x in textbook_logprobs(model, batch)])
    for name, gradient in torch.load(tmp_path / "gradients.pt", weights_only=True).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def one_of_two(folder: Path, rank: int) -> None:
    """Half of the batch, in two micro-batches; process 0 saves the gradients."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    names, model = page(0, 1), page_model()
    policy = torch.nn.parallel.DistributedDataParallel(names["PolicyLoss"](model))
    half = {name: tensor[4 * rank : 4 * rank + 4] for name, tensor in page_batch().items()}
    names["backward"](policy, half, size=2, processes=2)
    if rank == 0:
        torch.save({name: parameter.grad for name, parameter in model.named_parameters()}, folder / "gradients.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_the_list_of_examples_has_each_of_them_once():
    listed = re.findall(r"\]\(([\w.]+\.py)\)", (ROOT / "examples" / "README.md").read_text())
    assert sorted(listed) == [path.name for path in EXAMPLES]


if __name__ == "__main__":
    one_of_two(Path(sys.argv[1]), int(sys.argv[2]))
