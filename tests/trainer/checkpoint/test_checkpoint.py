"""Checkpoints are complete or absent, damage is named, and no file of the user is ever removed."""

import errno
import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.checkpoint.checkpoint import fsync, read_json, save_checkpoint, verify_checkpoint
from fused_grpo.trainer.checkpoint.output_dir import prepare_output_dir
from fused_grpo.trainer.logging.run_log import RunLog


def tiny_model(*, tied: bool = False, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="w1", pad_token="w2")


def save(directory: Path, *, step: int = 1, **options: Any) -> Path:
    state = {"step": step}
    return save_checkpoint(
        directory, model=tiny_model(seed=step), tokenizer=tiny_tokenizer(), trainer_state=state, **options
    )


def everything(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(tmp_path / "run" / "checkpoint-1")


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_what_was_saved_and_computes_the_same(tmp_path: Path, tied: bool) -> None:
    model, ids = tiny_model(tied=tied), torch.arange(8)[None]
    save_checkpoint(tmp_path / "c", model=model, tokenizer=tiny_tokenizer(), trainer_state={})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "c", dtype=torch.float32)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "c").eos_token == "w1"


def test_a_state_dict_is_saved_in_place_of_the_models_own_weights(tmp_path: Path) -> None:
    trained, ids = tiny_model(seed=5), torch.arange(8)[None]
    save(tmp_path / "c", state_dict=trained.state_dict())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "c", dtype=torch.float32)
    assert torch.equal(loaded(ids).logits, trained(ids).logits)


def test_a_checkpoint_has_no_pickle_and_all_of_it_is_in_the_manifest(checkpoint: Path) -> None:
    names = set(everything(checkpoint))
    assert {Path(name).suffix for name in names} <= {".json", ".safetensors", ".jinja"}
    assert set(json.loads((checkpoint / "manifest.json").read_text())["files"]) == names - {"manifest.json"}


@pytest.mark.parametrize("number", [None, errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_who_may_read_one_file_of_a_checkpoint_may_read_all(tmp_path: Path, monkeypatch, number) -> None:
    def fail(path: Path, mode: int) -> None:
        raise OSError(number, os.strerror(number))

    if number is not None:  # a shared folder without such rights, where it is saved all the same
        monkeypatch.setattr(Path, "chmod", fail)
    directory = save(tmp_path / "checkpoint-1")
    assert number or len({(directory / name).stat().st_mode for name in everything(directory)}) == 1


def test_the_trainer_state_is_saved_as_json(tmp_path: Path) -> None:
    state = {"step": 7, "best": 0.1 + 0.2, "seen": [1, 2], "nested": {"a": None}}
    save_checkpoint(tmp_path / "c", model=tiny_model(), tokenizer=tiny_tokenizer(), trainer_state=state)
    assert json.loads((tmp_path / "c" / "trainer_state.json").read_text()) == state


def test_a_log_too_long_to_be_read_is_saved_from_its_newest_entries_on(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("fused_grpo.trainer.checkpoint.checkpoint._MAX_JSON", 2000)
    monkeypatch.setattr("fused_grpo.trainer.checkpoint.checkpoint._LONG_JSON", 0)
    log = [{"step": step, "reward": step / 7} for step in range(100)]
    for place in ("c", "d"):
        state = {"global_step": 99, "log_history": log}
        save_checkpoint(tmp_path / place, model=tiny_model(), tokenizer=tiny_tokenizer(), trainer_state=state)
    saved = read_json(tmp_path / "c" / "trainer_state.json", 2000)
    kept = saved["log_history"]
    assert saved["global_step"] == 99
    assert 20 < len(kept) < 100
    assert kept == log[-len(kept) :]
    assert caplog.text.count("newest entries alone") == 1


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "trainer_state.json"])
def test_damage_names_the_file_and_what_happened_to_it(checkpoint: Path, name: str) -> None:
    path = checkpoint / name
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises(CheckpointError, match=f"{name} is changed"):
        verify_checkpoint(checkpoint)
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"{name} is truncated"):
        verify_checkpoint(checkpoint)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        verify_checkpoint(checkpoint)
    path.write_bytes(content)
    verify_checkpoint(checkpoint)


@pytest.mark.parametrize("manifest", ["", "[]", '{"format": "other", "files": {}}', '{"files": {}}'])
def test_a_manifest_that_is_not_ours_is_an_error_and_not_a_pass(checkpoint: Path, manifest: str) -> None:
    (checkpoint / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        verify_checkpoint(checkpoint)


@pytest.mark.parametrize("failing", ["first rename", "second rename", "model", "tokenizer"])
def test_a_failed_save_leaves_the_earlier_checkpoint_and_nothing_partial(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    before, calls, rename = everything(checkpoint), [], os.rename

    def fail(*args: Any, **_: Any) -> None:
        calls.append(args)
        if failing == "second rename" and len(calls) != 2:
            return rename(*args)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    savers = {"model": LlamaForCausalLM, "tokenizer": PreTrainedTokenizerFast}
    if failing in savers:
        monkeypatch.setattr(savers[failing], "save_pretrained", fail)
    else:
        monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(CheckpointError, match=f"No space left .* the newest complete checkpoint is {checkpoint};"):
        save(checkpoint, step=2)
    assert everything(checkpoint) == before
    assert [path.name for path in checkpoint.parent.iterdir()] == ["checkpoint-1"]


def test_a_kill_between_two_renames_is_named_and_the_next_save_recovers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, before = os.rename, everything(checkpoint)
    renamed: list[str] = []

    def killed_after_one(source: Path, target: Path) -> None:
        if renamed:
            raise KeyboardInterrupt
        renamed.append(str(target))
        rename(source, target)

    monkeypatch.setattr(os, "rename", killed_after_one)
    with pytest.raises(KeyboardInterrupt):
        save(checkpoint, step=2)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"rename \.checkpoint-1\.previous to checkpoint-1"):
        verify_checkpoint(checkpoint)
    with pytest.raises(AttributeError):
        save_checkpoint(checkpoint, model=None, tokenizer=None, trainer_state={})  # type: ignore[arg-type]
    assert everything(checkpoint) == before
    save(checkpoint, step=3)
    verify_checkpoint(checkpoint)
    assert [path.name for path in checkpoint.parent.iterdir()] == ["checkpoint-1"]


def test_a_half_written_save_is_no_checkpoint_and_the_next_removes_it(checkpoint: Path) -> None:
    partial = checkpoint.with_name(".checkpoint-2.partial")
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        verify_checkpoint(partial)
    save(checkpoint.with_name("checkpoint-2"))
    assert not partial.exists()


def test_an_earlier_checkpoint_is_replaced(checkpoint: Path) -> None:
    save(checkpoint, step=2)
    verify_checkpoint(checkpoint)
    assert json.loads((checkpoint / "trainer_state.json").read_text()) == {"step": 2}
    assert [path.name for path in checkpoint.parent.iterdir()] == ["checkpoint-1"]


def test_a_directory_with_files_of_the_user_is_never_replaced(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"files that no checkpoint wrote \(notes\.txt\)"):
        save(checkpoint, step=2)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"chapter\.txt"):
        save(tmp_path / "thesis")
    assert (checkpoint / "notes.txt").read_text() == (tmp_path / "thesis" / "chapter.txt").read_text() == "mine"
    verify_checkpoint(checkpoint)


def write_run(directory: Path) -> Path:
    log = RunLog(directory)
    log.log_config({})
    log.log_metrics({"step": 1})
    (directory / "report.html").write_text("report")
    save(directory / "checkpoint-1")
    return directory


def test_leftovers_of_killed_runs_go_but_not_a_checkpoints_only_copy(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path / "run")
    before = everything(run)
    for name in (".checkpoint-9.partial", ".final.partial", ".checkpoint-1.previous"):
        (run / name).mkdir()
        (run / name / "model.safetensors").write_bytes(b"half")
    (run / "checkpoint-3").mkdir()
    kept = {".checkpoint-7.previous/model.safetensors": b"complete", ".notes.partial": b"mine"}
    for name, content in kept.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(content)
    prepare_output_dir(run, resume=True)
    assert everything(run) == before | kept
    assert not (run / "checkpoint-3").exists()


def test_overwriting_removes_the_run_and_nothing_else(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    files = {"config.json": b"{}", "notes.md": b"n", "checkpoint-1/mine.txt": b"m", "weights/manifest.json": b"{}"}
    for name, content in files.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(content)
    prepare_output_dir(run, overwrite=True)
    assert everything(run) == files


def test_what_a_killed_removal_has_left_is_removed_by_the_next(tmp_path: Path, monkeypatch) -> None:
    run, unlink = write_run(tmp_path / "run"), Path.unlink
    for removed in range(len(everything(run))):
        copy, calls = tmp_path / str(removed), iter([True] * removed)

        def killed(path: Path, *args: Any, calls: Any = calls, **options: Any) -> None:
            if not next(calls, False):
                raise KeyboardInterrupt
            unlink(path, *args, **options)

        shutil.copytree(run, copy)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", killed)
            with pytest.raises(KeyboardInterrupt):
                prepare_output_dir(copy, overwrite=True)
        prepare_output_dir(copy, overwrite=True, is_saved=lambda step: True)
        assert everything(copy) == {}, removed


def test_overwriting_does_not_remove_the_model_that_the_run_starts_from(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    before = everything(run)
    with pytest.raises(CheckpointError, match="that would be removed; want the model to stay where it is"):
        prepare_output_dir(run, overwrite=True, keep={str(run / "checkpoint-1")})
    assert everything(run) == before
    prepare_output_dir(run, overwrite=True, keep={"Qwen/Qwen2.5-0.5B"})
    assert everything(run) == {}


def test_overwriting_does_not_follow_links_to_checkpoints_elsewhere(checkpoint: Path, tmp_path: Path) -> None:
    run, before = write_run(tmp_path / "other"), everything(checkpoint)
    (run / "best").symlink_to(checkpoint)
    prepare_output_dir(run, overwrite=True)
    assert everything(checkpoint) == before


def test_a_manifest_cannot_make_overwriting_reach_outside(tmp_path: Path) -> None:
    run, outside = write_run(tmp_path / "run"), tmp_path / "outside.txt"
    outside.write_text("mine")
    path = run / "checkpoint-1" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["../../outside.txt"] = {"size": 4, "sha256": ""}
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="names files outside"):
        verify_checkpoint(run / "checkpoint-1")
    prepare_output_dir(run, overwrite=True)
    assert outside.read_text() == "mine"


def test_a_directory_with_other_files_may_hold_a_run_and_a_file_may_not(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("n")
    prepare_output_dir(tmp_path)
    prepare_output_dir(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(CheckpointError, match=r"notes\.md is a file"):
        prepare_output_dir(tmp_path / "notes.md")


@pytest.mark.parametrize(
    ("is_folder", "number", "is_raised"),
    [(True, errno.EINVAL, False), (True, errno.EIO, True), (False, errno.EINVAL, True)],
)
def test_a_folder_that_no_system_can_wait_for_is_no_failed_save(tmp_path, monkeypatch, is_folder, number, is_raised):
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=os.strerror(number)) if is_raised else nullcontext():
        fsync(tmp_path if is_folder else tmp_path / "file")
