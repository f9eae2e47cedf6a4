"""A server with another model is refused before it gets weights. What vLLM prints is compared with real models."""

import copy
import functools
import re
import time

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

from fused_grpo.errors import InputError, WeightSyncError
from fused_grpo.trainer.engines.server.server_engine import VLLMServerEngine
from fused_grpo.trainer.engines.server.server_info import ModelFacts
from fused_grpo.trainer.models.adapters import checkpoint_weights

URL = "http://127.0.0.1:8000"
LINE = "(apply_rotary_emb): ApplyRotaryEmb(is_neox_style=True, enable_fp32_compute=False)"


def printed(
    vocabulary=44, hidden=64, inner=128, layers=2, heads=2, groups=1, *, workers=1, kind="Qwen2", bias=True, norms=()
) -> str:
    """A model as vLLM 0.32 prints it on one of its workers."""
    size = hidden // heads
    parallel = f"tp_size={workers}"
    embedding = f"(num_embeddings={vocabulary}, num_embeddings_per_partition=64, embedding_dim={hidden}, "
    embedding += f"org_vocab_size={vocabulary}, num_embeddings_padded=64, {parallel})"
    own = "".join(f"          ({name}): RMSNorm(hidden_size={size}, eps=1e-06)\n" for name in norms)
    per_worker = f"num_heads={heads // workers}, num_kv_heads={max(1, groups // workers)}"
    return f"""{kind}ForCausalLM()(
  (model): {kind}Model()(
    (embed_tokens): VocabParallelEmbedding{embedding}
    (layers): ModuleList()(
      (0-{layers - 1}): {layers} x {kind}DecoderLayer()(
        (self_attn): {kind}Attention()(
          (qkv_proj): QKVParallelLinear(in_features={hidden}, output_features=128, bias={bias}, {parallel})
          (o_proj): RowParallelLinear(in_features={hidden // workers}, output_features={hidden}, bias=False, {parallel})
{own}          (rotary_emb): RotaryEmbedding(head_size={size}, rotary_dim={size}, base=10000.0)(
            {LINE}
          )
          (attn): Attention(head_size={size}, {per_worker}, scale=0.17, backend=CPUAttentionBackendImpl)
        )
        (mlp): {kind}MLP()(
          (gate_up_proj): MergedColumnParallelLinear(in_features={hidden}, output_features=256, bias=False, {parallel})
          (down_proj): RowParallelLinear(in_features={inner // workers}, output_features=64, bias=False, {parallel})
        )
        (input_layernorm): RMSNorm(hidden_size={hidden}, eps=1e-06)
        (post_attention_layernorm): RMSNorm(hidden_size={hidden}, eps=1e-06)
      )
    )
    (norm): RMSNorm(hidden_size={hidden}, eps=1e-06)
  )
  (lm_head): ParallelLMHead{embedding}
  (logits_processor): LogitsProcessor(vocab_size={vocabulary}, org_vocab_size={vocabulary}, scale=1.0)
)"""


@functools.cache
def model(kind: str = "Qwen2", **sizes: int) -> transformers.PreTrainedModel:
    names = {"vocabulary": "vocab_size", "hidden": "hidden_size", "inner": "intermediate_size"}
    names |= {"layers": "num_hidden_layers", "heads": "num_attention_heads", "groups": "num_key_value_heads"}
    default = {"vocabulary": 44, "hidden": 64, "inner": 128, "layers": 2, "heads": 2, "groups": 1}
    config = {names[name]: size for name, size in (default | sizes).items()}
    if kind == "Qwen3":
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    with torch.device("meta"):
        return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**config))


SIZES = {"vocabulary": [44, 45], "hidden": [64, 128], "layers": [1, 2, 3], "inner": [128, 192], "heads": [2, 4]}
SIZES |= {"groups": [1, 2]}


@settings(derandomize=True, max_examples=40, deadline=None, database=None)
@given(data=st.data(), workers=st.sampled_from([1, 2]))
def test_a_model_is_accepted_only_where_all_sizes_are_the_same(data, workers) -> None:
    here = {name: data.draw(st.sampled_from(values)) for name, values in SIZES.items()}
    other = data.draw(st.sampled_from([name for name in SIZES if workers == 1 or name != "groups"]))
    there = here | {other: data.draw(st.sampled_from([size for size in SIZES[other] if size != here[other]]))}
    facts = ModelFacts(model(**here))
    facts.check(URL, printed(**here, workers=workers))
    with pytest.raises(InputError, match=rf"got a server at {URL} whose Qwen2ForCausalLM has .*, not .*, want .*fix:"):
        facts.check(URL, printed(**there, workers=workers))


@pytest.mark.parametrize(
    ("kind", "served", "message"),
    [
        ("Llama", {}, "has other biases, want the LlamaForCausalLM"),
        ("Qwen3", {"bias": False}, r"has other norms \(k_norm, q_norm\), want the Qwen3ForCausalLM"),
        ("Qwen2", {"kind": "Qwen3", "bias": False, "norms": ["q_norm", "k_norm"]}, "Qwen3ForCausalLM has other norms"),
    ],
)
def test_an_architecture_with_the_same_sizes_is_refused_by_its_modules(kind, served, message) -> None:
    with pytest.raises(InputError, match=message):
        ModelFacts(model(kind)).check(URL, printed(**served))


@pytest.mark.parametrize("text", [printed(kind="Llama", bias=False), printed(kind="Transformers"), "", "?", "0 x ("])
def test_what_may_be_the_same_model_is_accepted(text) -> None:
    ModelFacts(model("Mistral" if "Llama" in text else "Qwen2")).check(URL, text)


@pytest.mark.parametrize("text", ["Attention(head_size=1", "(norm", "(o_proj): RowParallelLinear(", "(1 ", "(1", "1"])
def test_hostile_text_is_read_in_time(text) -> None:
    start = time.thread_time()  # not of what else the machine does
    ModelFacts(model()).check(URL, text * 200_000)
    assert time.thread_time() - start < 3


@pytest.mark.parametrize("targets", ["all-linear", ["k_proj"]])
def test_layers_around_which_vllm_has_adapters_are_compared_too(targets) -> None:
    wrapped = printed(heads=4).replace("(o_proj): ", "(o_proj): RowParallelLinearWithLoRA()(\n    (base_layer): ")
    assert "WithLoRA" in wrapped
    ours = copy.deepcopy(model(heads=4))
    adapted = get_peft_model(ours, LoraConfig(target_modules=targets, task_type="CAUSAL_LM")).get_base_model()
    ModelFacts(adapted).check(URL, wrapped)
    other = wrapped.replace("RowParallelLinear(in_features=64", "RowParallelLinear(in_features=96")
    with pytest.raises(InputError, match="has 96 inputs of o_proj, not 64"):
        ModelFacts(adapted).check(URL, other)


def test_layers_that_differ_from_each_other_are_counted_together() -> None:
    text = re.sub(r"\(0-1\): 2 x", "(0): DenseDecoderLayer()()\n      (1, 3-4): 3 x", printed())
    ModelFacts(model(layers=5)).check(URL, text)
    with pytest.raises(InputError, match="has 1 layers, not 4"):
        ModelFacts(model(layers=4)).check(URL, text)


def test_a_server_that_comes_back_with_another_model_gets_no_weights(servers, build_model, tokenizer) -> None:
    ours = build_model("qwen2", tied=True)
    servers[0].model = printed()
    engine = VLLMServerEngine(ours, tokenizer, base_urls=[servers[0].url], timeout=20)
    engine.load_weights(checkpoint_weights(ours), version=0)
    servers[0].model, before = printed(layers=3), dict(servers[0].weights)
    engine.load_weights(checkpoint_weights(ours), version=1)  # it has the weights of the last sync: the same server
    servers[0].weight_version, servers[0].weights = "default", {}
    with pytest.raises(WeightSyncError, match=rf"got a server at {servers[0].url} whose .* has 3 layers, not 2"):
        engine.load_weights(checkpoint_weights(ours), version=2)
    assert before
    assert not servers[0].weights


def test_a_server_that_does_not_say_is_a_warning(servers, build_model, tokenizer, caplog) -> None:
    VLLMServerEngine(build_model("llama"), tokenizer, base_urls=[servers[0].url], timeout=20)
    assert f"{servers[0].url} does not say which model it has (status 404" in caplog.text
