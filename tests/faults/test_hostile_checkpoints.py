"""Damaged and manipulated checkpoints: each is refused with a CheckpointError, and nothing in one is ever run.

With a manifest that fits, what is refused is what this run could not have saved. What it could have saved, such as
another value of a weight, is another checkpoint; another option is said.
"""

import json
import os
import pickle
import random
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.checkpoint import resume
from fused_grpo.trainer.checkpoint.checkpoint import MANIFEST_FILE, find_checkpoint, write_manifest
from fused_grpo.trainer.checkpoint.resume import restore, training_state

RUN = Path(__file__).parents[1] / "trainer" / "resume_run.py"
FIELDS = ("step", "run", "optimizer", "scheduler", "collector", "entropy", "skipped", "eval_before", "buffers")
FIELDS += ("options", "unlogged", "tensors")
PICKLES = (
    "pytorch_model.bin",
    "optimizer.pt",
    "state.PKL",
    "scheduler.pth",
    "more/rng_state.pickle",
    "x.ckpt",
    "a.npy",
)


@pytest.fixture(scope="module")
def checkpoint(fork_server, tmp_path_factory):
    """In the middle of a buffer of rollouts, so that it holds all there is."""
    output_dir = tmp_path_factory.mktemp("complete") / "run"
    fork_server.run(RUN, output_dir, "transformers", "fresh", "nowhere", 0)
    return output_dir / "checkpoint-9"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """Of the same run."""
    return runpy.run_path(str(RUN))["make_trainer"](str(tmp_path_factory.mktemp("loads") / "run"))


@pytest.fixture
def copy(checkpoint, tmp_path):
    """Makes copies of the checkpoint, of links; `replace` gives a file a content of its own."""

    def copy(name="copy"):
        directory = tmp_path / name / "checkpoint-9"
        shutil.copytree(checkpoint, directory, copy_function=os.link)
        return directory

    return copy


def replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def damage(directory: Path, draw: random.Random) -> None:
    """What disks, interrupted copies and people do to files."""
    path = draw.choice(sorted(directory.iterdir()))
    content = bytearray(path.read_bytes())
    match draw.randrange(7):
        case 0:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        case 1:
            del content[draw.randrange(len(content)) :]
        case 2:
            content += draw.randbytes(draw.randint(1, 100))
        case 3:
            return path.unlink()
        case 4:
            path.unlink()
            return path.mkdir()
        case 5:
            path.unlink()
            return path.symlink_to("/etc/passwd")
        case 6:
            start = draw.randrange(len(content))
            content[start : start + 64] = bytes(len(content[start : start + 64]))
            content += b"\0"  # where it was zeros before
    return replace(path, bytes(content))


def test_a_damaged_checkpoint_is_refused(copy, portion):
    count = portion(1700)
    for number in range(count):
        directory = copy(str(number))
        damage(directory, random.Random(number))
        with pytest.raises(CheckpointError, match=r"(?s)^got .*fix: "):
            find_checkpoint(directory.parent, directory)
        shutil.rmtree(directory.parent)


@pytest.mark.parametrize("value", [None, "x", [1], 0.5])
def test_a_field_of_another_type_is_refused_and_named(trainer, copy, value):
    for name in FIELDS:
        directory = copy(name)
        state = json.loads((directory / "training.json").read_bytes())
        del state[name]
        if value is not None:  # null is a value of `eval_before`
            state[name] = value
        replace(directory / "training.json", json.dumps(state).encode())
        (directory / MANIFEST_FILE).unlink()
        write_manifest(directory)
        with pytest.raises(CheckpointError, match=rf"training\.json does not fit this run .*{name}.*fix: "):
            restore(find_checkpoint(directory.parent, directory), trainer.learner, trainer.collector)


def resign(directory: Path) -> Path:
    """Write a manifest that fits what is there now."""
    (directory / MANIFEST_FILE).unlink(missing_ok=True)
    write_manifest(directory)
    return find_checkpoint(directory.parent, directory)


@pytest.fixture
def outcome(trainer, checkpoint, monkeypatch):
    """Resumes: "refused", "said" (that an option differs), or the state that the run has then, but for its logs."""
    said: list[str] = []
    monkeypatch.setattr(resume._log, "warning", lambda text, path, lines: said.append(lines))

    def restored(directory):
        trainer.learner.restart()
        said.clear()
        try:
            resumed = restore(directory, trainer.learner, trainer.collector)
        except CheckpointError:
            return "refused"
        if normal and said != normal[0]:
            return "said"
        normal[:] = [list(said)]
        state = training_state(trainer.learner, trainer.collector, resumed.buffer, wait=True)
        for buffer in state.numbers["buffers"].values():
            del buffer["metrics"]
        del state.numbers["collector"]["num_tokens"]
        tensors = {
            f"{file} {name}": value.tolist() for file, named in state.tensors.items() for name, value in named.items()
        }
        return state.numbers, tensors, resumed.state.epoch

    normal: list[list[str]] = []  # what is said of the checkpoint as it was saved
    clean = restored(checkpoint)
    return lambda directory: "unaffected" if (end := restored(directory)) == clean else end


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.just(10**12)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
FREE = ("metrics", "num_tokens", "eval_before", "eval_after", "unlogged", "_last_lr")  # which are of logs alone


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value in a JSON document, of long lists the first ones."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    return [at] * bool(at) + [way for key, one in inside for way in places(one, (*at, key))]


@pytest.mark.parametrize("name", ["scheduler", "skipped", "collector", "entropy", "step"])
def test_a_number_or_flag_near_the_true_one_is_refused_or_changes_nothing(outcome, copy, name):
    """Which a draw from all values seldom is. A count of calls may be another: groups are sampled again."""
    whole = json.loads((copy("whole") / "training.json").read_bytes())
    changed = list[tuple[Any, ...]]()
    for way in (way for way in places(whole) if way[0] == name and not set(way) & {*FREE, "generate_calls"}):
        directory = copy("-".join(map(str, way)))
        content = json.loads((directory / "training.json").read_bytes())
        node = content
        for key in way[:-1]:
            node = node[key]
        true = node[way[-1]]
        if not isinstance(true, bool | int | float):
            continue
        for value in [not true] if isinstance(true, bool) else {0, true + 1, abs(true - 1), true * 2} - {true}:
            node[way[-1]] = value
            replace(directory / "training.json", json.dumps(content).encode())
            if outcome(resign(directory)) not in ("refused", "said", "unaffected"):
                changed.append((*way, value))
    assert changed == []


SLOW = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SLOW
@given(data=st.data(), name=st.sampled_from(["training.json"] * 4 + ["trainer_state.json"]))
def test_a_changed_field_is_refused_or_said_or_changes_nothing(outcome, copy, tmp_path, data, name):
    directory = copy(f"json-{len(os.listdir(tmp_path))}")
    content = json.loads((directory / name).read_bytes())
    top = data.draw(st.sampled_from(sorted(content)))
    way = data.draw(st.sampled_from([way for way in places(content) if way[0] == top]))
    node = content
    for key in way[:-1]:
        node = node[key]
    match data.draw(st.sampled_from(["change", "change", "change", "remove", "rename"])):
        case "change":
            node[way[-1]] = data.draw(JSON)
        case "remove":
            del node[way[-1]]
        case "rename" if isinstance(node, dict):
            node[f"{way[-1]} "] = node.pop(way[-1])
    replace(directory / name, json.dumps(content).encode())
    end = outcome(resign(directory))
    assert end in ("refused", "said", "unaffected") or set(way) & {*FREE, "generate_calls"}, (way, node)


@pytest.mark.parametrize("calls", [0, 10**12, -1, 2.0])
def test_a_count_of_calls_that_no_run_has_is_refused(outcome, copy, calls):
    """Any call draws a prompt."""
    directory = copy()
    content = json.loads((directory / "training.json").read_bytes())
    content["collector"]["generate_calls"] = calls
    replace(directory / "training.json", json.dumps(content).encode())
    assert outcome(resign(directory)) == "refused"


def test_a_pace_that_this_run_does_not_go_by_is_not_taken_over(outcome, copy):
    directory = copy()
    content = json.loads((directory / "training.json").read_bytes())
    content["collector"]["pace"] = [10**12, 5]
    replace(directory / "training.json", json.dumps(content).encode())
    assert outcome(resign(directory)) == "unaffected"


def test_a_name_that_this_run_does_not_save_reaches_none_of_its_objects(outcome, copy):
    """The scheduler of PyTorch, for one, takes any name for an attribute of its functions."""
    saved = json.loads((copy("saved") / "training.json").read_bytes())
    ways = [way for way in [(), *places(saved)] if not set(way) & set(FREE)]
    for number, way in enumerate(way for way in ways if isinstance(at(saved, way), dict)):
        directory, content = copy(str(number)), json.loads(json.dumps(saved))
        at(content, way)["unknown"] = [1]
        replace(directory / "training.json", json.dumps(content).encode())
        assert outcome(resign(directory)) in ("refused", "unaffected"), way


def at(value: Any, way: tuple[Any, ...]) -> Any:
    for key in way:
        value = value[key]
    return value


FORMS = {
    "shorter": lambda tensor: tensor.flatten()[: max(0, tensor.numel() - 1)].clone(),
    "another shape": lambda tensor: tensor[None].clone(),
    "another dtype": lambda tensor: tensor.to(torch.float16 if tensor.dtype != torch.float16 else torch.int32),
    "NaN": lambda tensor: torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else tensor[None].clone(),
    "too large": lambda tensor: tensor[None].clone() if tensor.is_floating_point() else torch.full_like(tensor, -1),
}
TENSOR_FILES = ("optimizer.safetensors", "process-0.safetensors", "model.safetensors")


@SLOW
@given(data=st.data(), name=st.sampled_from(TENSOR_FILES))
def test_a_changed_tensor_is_refused(outcome, copy, tmp_path, data, name):
    directory = copy(f"tensors-{len(os.listdir(tmp_path))}")
    tensors = load_file(directory / name)
    which = data.draw(st.sampled_from(sorted(key for key, tensor in tensors.items() if tensor.numel())))
    fault = data.draw(st.sampled_from(["removed", "renamed", *FORMS]))
    tensor = tensors.pop(which)
    if fault in FORMS:
        # Of masks and of what no function scored, these are values like others.
        free = tensor.dtype == torch.bool or (
            fault == "NaN" and which.endswith((".reward", "sampling_logprobs.values"))
        )
        tensors[which] = tensor[None].clone() if free else FORMS[fault](tensor)
    elif fault == "renamed":
        tensors[f"{which}."] = tensor
    replace(directory / name, save(tensors, metadata={"format": "pt"}))
    assert outcome(resign(directory)) == "refused", (which, fault)


@pytest.mark.parametrize("value", [-1, 10**6])
@pytest.mark.parametrize("name", ["finish_reason", "weight_version"])
def test_a_number_of_a_sample_that_no_run_leaves_is_refused(outcome, copy, name, value):
    file = copy() / "process-0.safetensors"
    tensors = load_file(file)
    tensors[f"buffer.1.{name}"].fill_(value)
    replace(file, save(tensors, metadata={"format": "pt"}))
    assert outcome(resign(file.parent)) == "refused"


@pytest.mark.parametrize("name", ["optimizer.safetensors", "process-0.safetensors", "model.safetensors"])
@pytest.mark.parametrize("is_old", [False, True])
def test_a_file_that_is_missing_is_refused_with_a_manifest_that_fits(outcome, copy, name, is_old):
    directory = copy()
    if is_old:  # of a version that did not save the names of the tensors
        content = json.loads((directory / "training.json").read_bytes())
        replace(directory / "training.json", json.dumps({k: v for k, v in content.items() if k != "tensors"}).encode())
    (directory / name).unlink()
    assert outcome(resign(directory)) == "refused"


def many_names(path):
    names = b",".join(b'"%d": {}' % n for n in range(1_000_000))
    path.write_bytes(b'{"format": "fused-grpo checkpoint 5", "files": {%s}}' % names)


HOSTILE_FILES = {
    "a pipe": lambda path: os.mkfifo(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a directory": lambda path: path.mkdir(),
    "a loop": lambda path: path.symlink_to(path.name),
    "a gigabyte": lambda path: (path.touch(), os.truncate(path, 1 << 30)),
    "deep JSON": lambda path: path.write_text("[" * 200_000),
    "a million names": many_names,
}


@pytest.mark.parametrize("make", HOSTILE_FILES.values(), ids=HOSTILE_FILES)
def test_a_file_that_would_hang_or_fill_the_memory_is_refused_at_once(copy, trainer, make, time_limit):
    for name in (MANIFEST_FILE, "training.json", "trainer_state.json", "optimizer.safetensors", "model.safetensors"):
        directory = copy(name)
        (directory / name).unlink()
        make(directory / name)
        with time_limit(20), pytest.raises(CheckpointError, match=r"^got "):
            find_checkpoint(directory.parent, directory)
        if name != MANIFEST_FILE:  # with sums that fit, or after they were compared
            with time_limit(20), pytest.raises(CheckpointError, match=r"^got "):
                restore(directory, trainer.learner, trainer.collector)


def test_a_file_that_is_one_large_hole_is_refused_at_once(copy, time_limit):
    directory = copy()
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").touch()
    os.truncate(directory / "model.safetensors", 1 << 42)
    manifest = json.loads((directory / MANIFEST_FILE).read_bytes())
    manifest["files"]["model.safetensors"]["size"] = 1 << 42
    replace(directory / MANIFEST_FILE, json.dumps(manifest).encode())
    with time_limit(5), pytest.raises(CheckpointError, match="more than the disk"):
        find_checkpoint(directory.parent, directory)


class Payload:
    """Makes a file where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {shlex.quote(str(self.canary))}",))


def test_a_payload_is_refused_by_its_name_and_never_runs(copy, tmp_path, time_limit):
    canary = tmp_path / "it ran"
    with time_limit(20):
        for name in PICKLES:
            for in_manifest in (False, True):
                directory = copy(f"{name} {in_manifest}".replace("/", "-"))
                (directory / name).parent.mkdir(exist_ok=True)
                (directory / name).write_bytes(pickle.dumps(Payload(canary)))
                if in_manifest:
                    (directory / MANIFEST_FILE).unlink()
                    write_manifest(directory)
                with pytest.raises(CheckpointError, match=f"whose {name} is of a format that can run code"):
                    find_checkpoint(directory.parent, directory)
    assert not canary.exists()


def test_the_payload_runs_where_it_is_unpickled(tmp_path):
    (tmp_path / "optimizer.pt").write_bytes(pickle.dumps(Payload(tmp_path / "it ran")))
    subprocess.run([sys.executable, "-m", "pickle", tmp_path / "optimizer.pt"], capture_output=True)
    assert (tmp_path / "it ran").exists()
