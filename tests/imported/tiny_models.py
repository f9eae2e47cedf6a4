"""A tiny random model of each type that `AutoModelForCausalLM` of transformers knows, and what the trainer does to it.

A config is its own defaults with every size made small, by what configs call it: two layers, one of each kind where
there are several, of width 32, with 4 heads of 8.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from batches import batch_of
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fused_grpo.config import GRPOLossConfig
from fused_grpo.errors import FusedGRPOError
from fused_grpo.integrations.model_modes import disable_dropout
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.batching.micro_batch_metrics import per_sequence
from fused_grpo.trainer.batching.micro_batches import micro_batches
from fused_grpo.trainer.policy import PolicyLoss
from fused_grpo.trainer.self_check import self_check, shared_layout

VOCABULARY = 60
TYPES = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks")

# What a size is called: the same words everywhere.
_SIZES = {
    60: """vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size audio_vocab_size""",
    64: """
        max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions
        context_length intermediate_size moe_intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dff dim_ff
        ffn_hidden_size expert_ffn_hidden_size feed_forward_size intermediate_size_mlp d_inner
        dense_intermediate_size shared_expert_intermediate_size shared_intermediate_size
        moe_shared_expert_intermediate_size model_max_length local_attention sliding_window sliding_window_size
        attention_chunk_size window_size attention_window_size keep_window_size original_max_position_embeddings
        mamba_d_ssm index_topk rel_extent floor_scale
    """,
    32: """
        hidden_size n_embd d_model emb_dim embedding_dim embedding_size word_embed_proj_dim input_embedding_size
        output_embedding_size dim_model_base backbone_hidden_size lru_width attention_hidden_size
        pronunciation_embed_dim shape_embed_dim router_hidden_size image_size
    """,
    16: """
        q_lora_rank kv_lora_rank o_lora_rank hidden_size_per_layer_input laurel_rank block_size adapter_rank
        index_head_dim pronunciation_vocab_size shape_vocab_size num_centroids mamba_d_state state_size
        ssm_state_size chunk_size mamba_chunk_size ple_embed_dim local_attn_chunk_length lsh_attn_chunk_length
        ngram_vocab_size_base qk_head_dim hc_lowrank gated_norm_rank encoder_hash_byte_group_vocab patch_size
        num_mel_bins mamba_dt_rank time_step_rank
    """,
    8: """
        head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim kv_channels d_head dim_head attention_head_size
        attention_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim rotary_dim mamba_d_head
        mamba_headdim mamba_head_dim swa_head_dim d_rel prompt_length num_buckets
        centroid_intermediate_top_k
    """,
    4: """
        num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads
        num_decoder_attention_heads num_encoder_attention_heads num_experts n_routed_experts num_local_experts
        moe_num_experts linear_num_heads linear_num_value_heads mamba_n_heads mamba_num_heads n_mamba_heads
        swa_num_attention_heads index_n_heads zero_expert_num num_query_groups
    """,
    2: """
        num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads num_experts_per_tok moe_topk
        moe_k num_experts_per_token top_k_experts encoder_layers num_encoder_layers num_decoder_layers
        num_layers_per_stack max_window_layers n_groups num_hidden_layers n_layer n_layers num_layers decoder_layers
        num_blocks
    """,
    1: """
        n_group topk_group num_shared_experts n_shared_experts moe_num_shared_experts first_k_dense_replace
        num_dense_layers moe_layer_start_index mamba_n_groups mamba_ngroups num_expert_group
        num_nextn_predict_layers
    """,
}

# What the rules above leave inconsistent.
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
ZAMBA = {"head_dim": 16, "attention_head_dim": 16, "attention_hidden_size": 64}
GEMMA4 = {"per_layer_config": {}}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "mamba2": {"num_heads": 8},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64},
    },
    "dory": {
        **{"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        **{"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1},
    },
    "dots3_note_text": {"per_layer_config": {}, "layer_types": ["indexed_attention"] * 2},
    "flint": {"mlp_only_layers": [0]},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": {**ROPE, "mrope_section": [2, 1, 1]}, "full_attention": None},
    },
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "local"], "axial_pos_shape": [8, 8],
                 "axial_pos_embds_dim": [16, 16]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "zamba": {**ZAMBA, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": {**ZAMBA, "n_mamba_heads": 8, "layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1]},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16},
        **{"indexer_compress_ratio": 4, "ple_layer_ids": []},
    },
}  # fmt: skip
SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}


def small(name: str, value: Any, layers: int) -> Any:
    """A value of a config, small."""
    if isinstance(value, dict) and ("model_type" in value or name.endswith("_config")):
        return shrunk(value)
    if isinstance(value, list) and layers and len(value) >= layers > 2:
        return sorted(dict.fromkeys(value), key=value.index)[:2] if len(set(map(str, value))) > 1 else value[:2]
    if name in SMALL and isinstance(value, int) and not isinstance(value, bool) and value:
        return SMALL[name]
    if name.endswith(("token_id", "token_index")) and isinstance(value, int):
        return min(value, 1)
    return value


def shrunk(defaults: dict[str, Any]) -> dict[str, Any]:
    layers = next((defaults[name] for name in LAYERS if name in defaults), 0)
    made = {name: small(name, value, layers) for name, value in defaults.items()} | OPTIONS.get(
        defaults.get("model_type", ""), {}
    )
    if "is_decoder" in made:
        made["is_decoder"] = True
    if "kv_lora_rank" in made:
        made["num_key_value_heads"] = made["num_attention_heads"]
    return made


def tiny_config(model_type: str) -> Any:
    cls = CONFIG_MAPPING[model_type]
    return cls(**shrunk(cls().to_dict()))


def tiny_model(model_type: str) -> PreTrainedModel:
    """Its weights are larger than at initialisation, and biases not 0: nothing that it does is lost in rounding."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(model_type))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def outcome(model_type: str, folder: Path) -> tuple[str, str]:
    """ "right", "refused" or "not built here", and why.

    Right is what the assertions say, after a step with the trainer's own engine, whose log-probs are checked.
    """
    try:
        model = tiny_model(model_type).eval()
        model(torch.arange(3, 15)[None]).logits.sum()
    except Exception as error:
        return "not built here", f"{type(error).__name__}: {str(error).strip().splitlines()[0][:70]}"
    try:
        apart = policy_difference(model)
        trained = train_one_step(model, folder)
    except FusedGRPOError as error:
        what = re.sub(
            r" (of|by) -?\d[\d.e-]*|, want.*|( with \[)?\(.*| at weight .*|^got an? ", "", str(error), flags=re.DOTALL
        )
        return "refused", what.replace(type(model).__name__, "model").strip()
    assert apart < 1e-4, apart
    assert trained
    assert dropout_left(model) == 0
    return "right", ""


@torch.no_grad()
def policy_difference(model: PreTrainedModel) -> float:
    """The largest difference between log-probs of the policy in micro-batches and of the model's logits."""
    sequences = [[3, 4, 5, 6, 7], [20, 30, 40], [9, 8, 7, 6, 5, 4, 3, 2], [3, 51], [3, 6, 5, 4]]
    policy = PolicyLoss(model, GRPOLossConfig(), temperature=0.7)
    batch = batch_of(
        prompt_ids=[ids[:1] for ids in sequences],
        completion_ids=[ids[1:] for ids in sequences],
        sampling_logprobs=None,
        advantage=torch.zeros(len(sequences)),
    )
    packing = replace(shared_layout([self_check(policy)]), sequences=5)
    parts = micro_batches(batch, packing, device=torch.device("cpu"))
    # Those with the same first token share it.
    ours = torch.cat(per_sequence(parts, [policy.measure(part, "logprobs") for part in parts], len(batch)))
    return float((ours - torch.cat([own_logprobs(model, ids, 0.7) for ids in sequences])).abs().max())


def own_logprobs(model: PreTrainedModel, ids: list[int], temperature: float) -> Tensor:
    log_p = (model(torch.tensor([ids])).logits[0, :-1] / temperature).log_softmax(-1)
    return log_p.gather(1, torch.tensor(ids)[1:, None])[:, 0]


@torch.no_grad()
def dropout_left(model: PreTrainedModel) -> float:
    """How far two passes in training mode differ after `disable_dropout`."""
    disable_dropout(model)
    first, second = (model.train()(torch.arange(3, 35)[None]).logits for _ in range(2))
    return float((first - second).abs().max())


def train_one_step(model: PreTrainedModel, folder: Path, **options: Any) -> bool:
    """Whether one step of the trainer has moved the model's weights."""
    defaults: dict[str, Any] = {
        **{"output_dir": str(folder), "use_vllm": False, "logprob_mismatch": "fail", "disable_dropout": True},
        **{"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 5, "max_steps": 1},
        **{"learning_rate": 1e-3, "gradient_checkpointing": False, "save_strategy": "no", "log_completions": False},
    }
    before = [parameter.detach().clone() for parameter in model.parameters()]
    rows, tokenizer = [{"prompt": "1+1="}], tiny_tokenizer()
    GRPOTrainer(model, distinct, GRPOConfig(**defaults | options), rows, processing_class=tokenizer).train()
    pairs = zip(model.parameters(), before, strict=True)
    moved = any(not torch.equal(now, then) for now, then in pairs)
    return moved and all(parameter.isfinite().all() for parameter in model.parameters())


def distinct(completions: list[str], **columns: Any) -> list[float]:
    return [float(place) for place in range(len(completions))]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    tokens = ["<pad>", "<eos>", *"0123456789+-*=abcdefghijklmnopqrstuvwxyz"]
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<pad>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
