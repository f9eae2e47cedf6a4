"""TRL's trainers with our ops: the numbers are TRL's, whatever the options, and TRL is as it was afterwards."""

import importlib.metadata
import itertools
import json

import pytest
import torch
import trl_loss
import trl_runs
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from fused_grpo.config import LEVELS, TRL_LOSS_TYPES
from fused_grpo.errors import InputError, UnavailableError
from fused_grpo.integrations import speculative

pytestmark = pytest.mark.grid

pytest.importorskip("trl", reason="TRL is not installed")
GRID = [(x, level, option) for x in TRL_LOSS_TYPES for level in LEVELS for option in trl_loss.OPTIONS]
GRID = [case for case in GRID if trl_loss.goes_with(case[0], case[2])]


@pytest.fixture
def calls(monkeypatch, ours) -> dict[str, int]:
    """How often gradients were speculative, and how often they were recomputed."""
    counts = {"speculative": 0, "recomputed": 0}

    def counted(name, function):
        def wrapper(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(ours, "speculative_logprobs", counted("speculative", ours.speculative_logprobs))
    monkeypatch.setattr(speculative, "_from_scratch", counted("recomputed", speculative._from_scratch))
    return counts


@pytest.fixture
def on_tensors(monkeypatch, ours) -> None:
    """Have `trl_loss` ask TRL's op for its log-probs, as TRL's models do, of a trainer that has all options."""
    plain = trl_loss.stand_in

    def log_probs(model, input_ids, attention_mask, logits_to_keep, **_):
        on = attention_mask[:, -logits_to_keep:] != 0
        rows, targets = model[0][on], input_ids[:, -logits_to_keep:][on]
        arguments = (rows, model[1], None, targets, 1.0, 32768, None, 1.0, ("log_probs", "entropy"))
        fields = ours.trl_utils._ChunkedLogProbFunction.apply(*arguments)[:2]
        return *(x.new_zeros(on.shape).masked_scatter(on, x) for x in fields), None

    def stand_in(trainer_class, config, accumulation_steps):
        trainer = plain(trainer_class, config, accumulation_steps)
        trainer.vllm_importance_sampling_mode = config.sampling_correction
        trainer.vllm_importance_sampling_clip_max = config.sampling_clip_max
        trainer.vllm_importance_sampling_clip_min = config.sampling_clip_min
        trainer._get_per_token_logps_and_entropies = log_probs
        return trainer

    monkeypatch.setattr(trl_loss, "stand_in", stand_in)


@pytest.mark.usefixtures("on_tensors")
@pytest.mark.parametrize(("loss_type", "level", "option"), GRID)
def test_every_option_is_speculated(ours, calls, loss_type, level, option):
    """Loss, gradients and metrics of TRL's own `_compute_loss`; no gradient had to be recomputed."""
    config, batch = trl_loss.config_of(loss_type, level, option), trl_loss.make_batch(option, torch.float32)
    trl_result = trl_loss.of_trl(ours.GRPOTrainer, batch, config, accumulation_steps=2)
    with ours.patched():
        our_result = trl_loss.of_trl(ours.GRPOTrainer, batch, config, accumulation_steps=2)
    for name in ("loss", "hidden", "weight"):
        expected = getattr(trl_result, name)
        assert (getattr(our_result, name) - expected).norm() <= 1e-5 * expected.norm(), name
    assert our_result.metrics == pytest.approx(trl_result.metrics, rel=1e-5, abs=1e-7)
    assert calls == {"speculative": 1, "recomputed": 0}


class Multiplied(TorchDispatchMode):
    """Multiplications of all matrix products inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            one, other = args[-2:]
            self.count += one.shape[0] * one.shape[1] * other.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("on_tensors")
def test_fp16_is_not_speculated(ours, calls, caplog):
    """A gradient that is rounded before it is scaled may be lost, and our op does not know the scale."""
    config, batch = trl_loss.config_of("dapo", "token", "nothing"), trl_loss.make_batch("nothing", torch.float16)
    ours._announce.cache_clear()
    with ours.patched(), caplog.at_level("INFO", "fused_grpo"):
        trl_loss.of_trl(ours.GRPOTrainer, batch, config)
    assert calls == {"speculative": 0, "recomputed": 0}
    assert "fp16 would lose" in caplog.text


@pytest.mark.filterwarnings("ignore")
def test_the_budget_reaches_the_op(ours, monkeypatch):
    budgets, speculative_logprobs = set(), ours.speculative_logprobs

    def noted(*args, chunk_bytes, **kwargs):
        budgets.add(chunk_bytes)
        return speculative_logprobs(*args, chunk_bytes=chunk_bytes, **kwargs)

    monkeypatch.setattr(ours, "speculative_logprobs", noted)
    with ours.patched(chunk_bytes=4096):
        trl_runs.run(ours.GRPOTrainer, max_steps=1)
    trl_runs.run(type("Tight", (ours.FusedGRPOTrainer,), {"chunk_bytes": 8192}), max_steps=1)
    assert budgets == {4096, 8192}


@pytest.mark.parametrize("chunk_bytes", [0, -1, 1.5, "4096"])
def test_a_budget_that_cannot_be_is_refused_at_once(ours, chunk_bytes):
    with (
        pytest.raises(InputError, match=f"got chunk_bytes={chunk_bytes!r}, want"),
        ours.patched(chunk_bytes=chunk_bytes),
    ):
        pass


@pytest.mark.usefixtures("on_tensors")
@pytest.mark.parametrize(("idle", "products"), [(0, 3), (2, 2)])
def test_the_head_costs_three_products_and_fewer_without_an_advantage(ours, idle, products):
    """TRL's op: four, whatever the advantages."""
    config, batch = trl_loss.config_of("dapo", "token", "on policy"), trl_loss.make_batch("on policy", torch.float32)
    mask = torch.ones_like(batch.completion_mask)
    batch = batch._replace(advantages=batch.advantages.index_fill(0, torch.arange(idle), 0.0), completion_mask=mask)
    unit = mask.numel() * trl_loss.D * trl_loss.V
    with Multiplied() as trl_products:
        trl_loss.of_trl(ours.GRPOTrainer, batch, config)
    with ours.patched(), Multiplied() as our_products:
        trl_loss.of_trl(ours.GRPOTrainer, batch, config)
    assert trl_products.count == 4 * unit
    assert our_products.count == products * unit


def compare(one: tuple, other: tuple, tolerance: float = 1e-5) -> None:
    """Parameters and everything that was logged."""
    for name, expected in one[0].items():
        torch.testing.assert_close(other[0][name], expected, rtol=0, atol=tolerance, msg=name)
    assert [line.keys() for line in other[1]] == [line.keys() for line in one[1]]
    for entry, expected_entry in zip(other[1], one[1], strict=True):
        # Absolutely where a number is a difference of larger ones, as an on-policy loss is.
        assert entry == pytest.approx(expected_entry, rel=tolerance, abs=1e-6)


def options_of(loss_type: str, beta: float) -> dict:
    return {"loss_type": loss_type, "beta": beta, "epsilon_high": 5.0 if loss_type == "cispo" else 0.28}


@pytest.mark.filterwarnings("ignore")  # of TRL's, about what is experimental
@pytest.mark.parametrize(
    ("loss_type", "beta"),
    [("dapo", 0.0), *((x, 0.04) for x in ("grpo", "cispo"))]
    + [pytest.param(x, 0.0, marks=pytest.mark.full) for x in TRL_LOSS_TYPES if x != "dapo"]
    + [pytest.param(x, 0.04, marks=pytest.mark.full) for x in ("dapo", "bnpo", "dr_grpo", "luspo", "sapo", "vespo")],
)
def test_five_steps_are_trls(ours, calls, loss_type, beta):
    options = options_of(loss_type, beta)
    trl_run = trl_runs.run(ours.GRPOTrainer, **options)
    with ours.patched():
        compare(trl_run, trl_runs.run(ours.GRPOTrainer, **options))
    assert calls == {"speculative": 10, "recomputed": 0}
    compare(trl_run, trl_runs.run(ours.FusedGRPOTrainer, **options))
    assert calls == {"speculative": 20, "recomputed": 0}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        {"importance_sampling_level": "sequence", "loss_type": "grpo", "gradient_checkpointing": True},
        {"top_entropy_quantile": 0.3, "entropy_coef": 0.01},
        {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 4.0},
        {"mask_truncated_completions": True, "off_policy_mask_threshold": 0.01, "cast_lm_head_to_fp32": True},
        {"temperature": 0.7, "delta": 1.5, "use_bias_correction_kl": False, "beta": 0.04},
        {"steps_per_generation": 4, "scale_rewards": "none"},
    ],
    ids=lambda options: " ".join(options),
)
def test_other_options_are_trls(ours, calls, options):
    with ours.patched():
        patched_run = trl_runs.run(ours.GRPOTrainer, **options)
    compare(trl_runs.run(ours.GRPOTrainer, **options), patched_run)
    assert calls == {"speculative": 10, "recomputed": 0}


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_is_trained_as_by_trl(ours, calls):
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    trl_run = trl_runs.run(ours.GRPOTrainer, peft_config=adapter, beta=0.04)
    compare(trl_run, trl_runs.run(ours.FusedGRPOTrainer, peft_config=adapter, beta=0.04))
    assert calls == {"speculative": 10, "recomputed": 0}


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_with_another_loss_keeps_it(ours, calls, caplog):
    """What it computes is not what its options say, and its gradient is its own all the same."""

    class Other(ours.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            inputs = {**inputs, "advantages": inputs["advantages"].abs()}
            return super()._compute_loss(model, inputs)

    with ours.patched(), caplog.at_level("INFO", "fused_grpo"):
        patched_run = trl_runs.run(Other)
        assert calls["recomputed"] == 0  # the batch that its parent is given is the one that is speculative
        late = trl_runs.run(late_of(ours.FusedGRPOTrainer))
    compare(trl_runs.run(Other), patched_run)
    assert calls["recomputed"] == 10
    assert "not the speculative one" in caplog.text
    compare(trl_runs.run(late_of(ours.GRPOTrainer)), late)


def late_of(trainer_class: type) -> type:
    """A trainer whose log-probs count more the later they come."""

    class Late(trainer_class):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            logps, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return logps * torch.linspace(0.5, 1.5, logps.shape[1]), *others

    return Late


def test_a_quantile_of_several_processes_is_left_to_trl(ours, caplog, monkeypatch):
    config, batch = trl_loss.config_of("dapo", "token", "high entropy"), trl_loss.make_batch()
    trainer = trl_loss.stand_in(ours.GRPOTrainer, config, 1)
    trainer.accelerator.num_processes = 2
    ours._announce.cache_clear()
    with caplog.at_level("INFO", "fused_grpo"):
        for _ in range(3):
            assert ours.speculated_loss(trainer, {"advantages": batch.advantages}) is None
    assert len(caplog.records) == 1
    assert "top_entropy_quantile" in caplog.text


ASKED = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
ASKED_FOR = [("log_probs", *fields) for count in range(5) for fields in itertools.combinations(ASKED, count)]


@pytest.mark.parametrize("outputs", [*ASKED_FOR, None], ids=str)
def test_the_op_is_trls(ours, outputs):
    """All fields, those that are None, and gradients: softcap, scale, bias and temperature as TRL passes them."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*shape, generator=generator) for shape in ((40, 8), (11, 8), (11,))]
    leaves[0][1:4, :], leaves[1][3], leaves[2][3] = 30.0, leaves[1][7], leaves[2][7]  # certain tokens; two tie
    hidden, weight, bias = (x.requires_grad_() for x in leaves)
    arguments = (hidden, weight, bias, torch.arange(40) % 11, 0.7, 4, 3.0, 0.5)
    arguments += () if outputs is None else (outputs,)
    results = []
    for context in (ours._our_ops, torch.enable_grad):
        with context():
            fields = ours.trl_utils._ChunkedLogProbFunction.apply(*arguments)
        loss = sum((x * torch.linspace(-1, 1, 40)).sum() for x in fields if x is not None and x.requires_grad)
        results.append([*fields, *torch.autograd.grad(loss, (hidden, weight, bias))])
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.requires_grad == other.requires_grad
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_fields_of_ties_and_labels_that_do_not_count_are_trls(ours, softcap):
    """Through `add_fused_lm_head`, which has zeros where a label is -100; of equal logits only the first is on top."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(trl_runs.saved_model(20.0))
    model.config.final_logit_softcapping = softcap
    # The same bits from any GEMM, in whatever order it sums: of one product that is not 0.
    model.lm_head.weight.data[10:] = torch.eye(1, model.config.hidden_size) * 4.0
    ids = torch.randint(2, trl_runs.V, (4, 12), generator=torch.Generator().manual_seed(1))
    ours.trl_utils.add_fused_lm_head(model, 0.8, outputs=("log_probs", *ASKED))
    with torch.no_grad():
        labels = ids.masked_fill(torch.arange(12) % 5 == 2, -100)
        labels[:2, 1:] = model(ids[:2, :-1]).logits.argmax(-1)
        trl_fields = model(ids, labels=labels, fused_lm_head=True)
        with ours.patched():
            our_fields = model(ids, labels=labels, fused_lm_head=True)
    assert 0 < trl_fields.is_top1.sum() < trl_fields.is_top1.numel()
    assert (labels[:2, 1:] == 10).any()  # the first of equal ones
    assert our_fields.keys() == trl_fields.keys()
    for name, expected in trl_fields.items():
        torch.testing.assert_close(our_fields[name], expected, rtol=1e-5, atol=3e-6, msg=name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "options", "asks_for"),
    [
        ("SFT", {}, ("is_top1",)),
        ("DPO", {}, ("mean_logit", "is_top1")),
        ("DPO", {"use_weighting": True}, ("sum_squared_probs", "mean_logit", "is_top1")),
        ("KTO", {}, ("mean_logit",)),
    ],
    ids=str,
)
def test_other_trainers_take_their_fields_from_ours(ours, monkeypatch, name, options, asks_for):
    asked, op = set(), ours.linear_logprobs_and_entropy

    def noted(*tensors, outputs, **keywords):
        asked.add(outputs)
        return op(*tensors, outputs=outputs, **keywords)

    trl_run = trl_runs.run_offline(name, **options)
    monkeypatch.setattr(ours, "linear_logprobs_and_entropy", noted)
    with ours.patched():
        compare(trl_run, trl_runs.run_offline(name, **options))
    assert asked == {asks_for}


def interrupted(all_replaced: bool) -> None:
    assert all_replaced
    raise RuntimeError("in the middle")


@pytest.mark.filterwarnings("ignore")
def test_trl_is_as_it_was(ours):
    before = trl_runs.run(ours.GRPOTrainer)
    names = [(ours.trl_utils, "_ChunkedLogProbFunction"), (ours.trl_utils, "_use_triton")]
    names += [(ours.GRPOTrainer, "_compute_loss")]
    things = [getattr(owner, name) for owner, name in names]
    with pytest.raises(RuntimeError, match="in the middle"), ours.patched(), ours.patched():
        interrupted(all(getattr(owner, name) is not x for (owner, name), x in zip(names, things, strict=True)))
    assert [getattr(owner, name) for owner, name in names] == things
    trl_runs.run(ours.FusedGRPOTrainer, max_steps=1)
    assert [getattr(owner, name) for owner, name in names] == things
    after = trl_runs.run(ours.GRPOTrainer)
    assert after[1] == before[1]
    for name, value in before[0].items():
        assert torch.equal(after[0][name], value), name


@pytest.mark.parametrize("version", [None, "1.15.2", "1.17.0"])
def test_another_trl_is_refused(monkeypatch, version):
    from fused_grpo.integrations._peers import check_version

    def installed(package):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    with pytest.raises(UnavailableError, match=rf"got (no trl|trl {version}), want .*fix: pip install 'trl~=1.16.0'"):
        check_version("trl", "~=1.16.0")


@pytest.mark.parametrize(("version", "wanted"), [("5.25.0.dev0", ">=5.3"), ("1.16.1.dev0", "~=1.16.0")])
def test_a_version_of_a_clone_is_one_of_those(monkeypatch, version, wanted):
    """Whatever packaging is installed: 25 took it for none of them."""
    from fused_grpo.integrations._peers import check_version

    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    check_version("any", wanted)


def test_two_processes_equal_one(fork_server, tmp_path):
    """Of the subclass: DDP reduces every gradient, whether a mean is over tokens or over sequences."""
    runs = {loss_type: {"loss_type": loss_type, "beta": 0.04} for loss_type in ("dapo", "grpo")}
    for processes, name in ((1, "one"), (2, "two")):
        share = {"per_device_train_batch_size": 8 // processes, "model": trl_runs.saved_model()}
        each = {loss_type: {**options, **share} for loss_type, options in runs.items()}
        (tmp_path / name).mkdir()
        for rank in fork_server.start_ranks(trl_runs.__file__, tmp_path / name, json.dumps(each), processes=processes):
            assert rank.wait(timeout=400) == 0, rank.output
    for loss_type in runs:
        alone, shared = (load_file(tmp_path / name / f"{loss_type}.safetensors") for name in ("one", "two"))
        for name, value in alone.items():
            torch.testing.assert_close(shared[name], value, rtol=0, atol=1e-5, msg=name)
        one, two = (json.loads((tmp_path / name / f"{loss_type}.json").read_text()) for name in ("one", "two"))
        assert [line["loss"] for line in two[:5]] == pytest.approx([line["loss"] for line in one[:5]], abs=1e-5)
