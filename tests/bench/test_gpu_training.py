"""The measurements of whole trainers on a GPU, as a dry run on a CPU."""

import json
import weakref
from types import SimpleNamespace

import gpu_first
import pytest
import torch

from fused_grpo.bench.gpu import training

pytest.importorskip("trl", reason="TRL is not installed")


@pytest.mark.parametrize(
    ("part", "figures"),
    [
        (
            "phase",
            {f"training phase: {name}{what}" for name in training.makers() for what in ("", ", peak")}
            | {"training phase: ours over TRL"},
        ),
        ("longest", {f"longest completion: {name}" for name in (training.OURS, training.TRL)}),
        ("published", {"training phase"}),
    ],
)
def test_a_part_measures_every_trainer(part, figures, capsys):
    training.main([part, "--tiny"])
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    lines = {line["figure"]: line for line in map(json.loads, said)}
    assert figures <= lines.keys()
    for name in figures:
        assert lines[name]["value"] > 0
        assert lines[name]["shape"]["longest" if part != "longest" else "model"]


def test_the_first_step_of_a_trainer_is_not_timed(monkeypatch):
    stepped: list[str] = []

    def made(name: str):
        return lambda problem: SimpleNamespace(step=lambda: stepped.append(name))

    names = (training.OURS, training.TRL, training.FUSED)
    monkeypatch.setattr(training, "makers", lambda: {name: made(name) for name in names})
    figures = list(training.compared("tiny", training.SMALL, rounds=2))
    assert stepped == [*names, *names, *names[1:], names[0]]
    assert [sum(figure.figure.startswith(what) for figure in figures) for what in ("made", "a step")] == [3, 6]
    ratios = [figure.promised for figure in figures if figure.figure == f"training phase: ours over {training.TRL}"]
    assert ratios == [training.PROMISED] * 2


def test_bounds_of_the_longest_completion_get_closer(monkeypatch):
    """Of trainers that fit 40,000 and 11,000 tokens: doubled, then bisected, alternately."""
    asked: list[int] = []

    def succeeds(make, problem, room):
        asked.append(problem.longest)
        return problem.longest < (40_000 if make.func is training.training_step.ours else 11_000)

    monkeypatch.setattr(training, "succeeds", succeeds)
    last = {figure.figure.partition(": ")[2]: figure.value for figure in training.longest(tiny=False)}
    assert asked[:6] == [8192, 8192, 16384, 16384, 32768, 11585]
    assert len(asked) <= 14
    for name, exact in ((training.OURS, 40_000), (training.TRL, 11_000)):
        assert last[name] < exact <= last[f"{name}, less than"] <= 1.05 * last[name] + 1
    assert last["ours over TRL, at least"] == last[training.OURS] / last[f"{training.TRL}, less than"]


@pytest.mark.parametrize("fits", [True, False])
def test_without_time_there_are_bounds_of_the_first_try(fits, monkeypatch):
    clock = iter(range(0, 10**6, 50))
    monkeypatch.setattr(training.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(training, "succeeds", lambda make, problem, room: fits)
    bounds = [(figure.figure, figure.value) for figure in training.longest(tiny=False)]
    suffix = "" if fits else ", less than"
    assert bounds == [(f"longest completion: {name}{suffix}", 8192) for name in (training.OURS, training.TRL)]


def test_a_step_that_needs_more_room_does_not_fit_and_leaves_nothing(monkeypatch):
    models = []

    def make(problem):
        step = training.makers()[training.OURS](problem)
        models.append(weakref.ref(step.model))
        return step

    assert training.succeeds(make, training.SMALL, training.TINY_ROOM)
    assert not training.succeeds(make, training.SMALL, 2**20)
    assert [model() for model in models] == [None, None]


def test_trainers_that_do_not_fit_are_said_and_the_next_problem_follows(monkeypatch):
    def compared(name, problem, *, rounds):
        if "1.7B" in name:
            raise torch.OutOfMemoryError
        yield training.figure_of(name, 1.0, "x", None)

    monkeypatch.setattr(training, "compared", compared)
    first, second = training.phase(tiny=False)
    assert (first.figure, second.value) == ("Qwen3-0.6B", None)
    assert second.note == "absent: out of memory with three trainers at a time"


def test_published_sizes_have_the_tokens_that_were_published():
    counts = [sum(sample.num_own for sample in problem.batch()) for _, problem, _ in training.PUBLISHED]
    for count, wanted in zip(counts, [16384, 65536] * 2, strict=True):
        assert abs(count / wanted - 1) < 0.1


def test_trainers_are_a_run_of_their_own(tmp_path):
    trainers = [stage for stage in gpu_first.stages(tmp_path, tiny=True) if stage.group == "trainers"]
    assert {stage.name for stage in trainers} == training.PARTS.keys()
    assert all(stage.command[1:] == ("-m", "fused_grpo.bench.gpu.training", stage.name, "--tiny") for stage in trainers)
    assert sum(stage.seconds for stage in trainers) <= 570  # in one command of ten minutes
