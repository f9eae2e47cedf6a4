"""Weights on their way to an engine: the layout of a checkpoint, their dtype, and no more of them than one layer."""

from types import SimpleNamespace

import torch
from live_bytes import LiveBytes
from transformers.core_model_loading import Chunk, WeightConverter, revert_weight_conversion

from fused_grpo.trainer.engines.weight_files import Tie
from fused_grpo.trainer.models.adapters import checkpoint_weights
from fused_grpo.trainer.models.weight_stream import WeightStream


def test_what_a_checkpoint_has_in_one_is_joined_a_layer_at_a_time(make_model):
    """A checkpoint with a fused gate_up_proj, which transformers cuts in two when it loads it."""
    model = make_model(hidden_size=64, num_hidden_layers=6)
    halves = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    model._weight_conversions = [WeightConverter("mlp.gate_up_proj.weight", halves, [Chunk(dim=0)])]
    expected = revert_weight_conversion(model, model.state_dict())
    fused = expected["model.layers.5.mlp.gate_up_proj.weight"]
    with LiveBytes(model.parameters()) as live:
        stream = checkpoint_weights(model)
        assert {name: meta.shape for name, meta in stream.shapes.items()} == {n: w.shape for n, w in expected.items()}
        for name in list(stream.shapes):
            assert torch.equal(next(stream)[1], expected.pop(name)), name
    assert not expected
    assert fused.nbytes <= live.most < 2 * fused.nbytes


def test_matrices_are_cast_where_smaller_but_not_those_that_stay_fp32(make_model):
    model = make_model()
    model._keep_in_fp32_modules_strict = {"gate_proj"}
    stream = checkpoint_weights(model, torch.bfloat16)
    declared = {name: meta.dtype for name, meta in stream.shapes.items()}
    dtypes = {name: weight.dtype for name, weight in stream}
    assert dtypes == declared
    stays = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert stays == {name for name, weight in model.state_dict().items() if weight.ndim == 1 or "gate_proj" in name}
    assert {weight.dtype for _, weight in checkpoint_weights(model.bfloat16(), torch.float32)} == {torch.bfloat16}


def test_what_an_engine_leaves_is_read_where_others_gather_too():
    weights = [(str(number), torch.zeros(1)) for number in range(3)]
    for gathered, rest in ((True, 0), (False, 2)):
        stream = WeightStream(dict(weights), weights, is_gathered=gathered)
        changed = Tie("embedding", "head").undo(stream)
        next(changed)
        changed.finish()
        assert len(list(stream)) == rest


def test_buckets_add_up_each_size_once():
    class Size(int):
        additions = 0

        def __radd__(self, other):
            Size.additions += 1
            return int(self) + other

    shapes = {f"w{number}": SimpleNamespace(nbytes=Size(4)) for number in range(300)}
    assert list(WeightStream(shapes, ()).buckets()) == [[4] * 300]
    assert Size.additions == 300
