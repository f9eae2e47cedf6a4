"""For each family of models, log-probs and all gradients are those of the model's own logits."""

import ast
import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import CONFIG_MAPPING

from fused_grpo import linear_logprobs
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.integrations.logit_transform import head_transform, heeds_its_text_config, logit_transform
from fused_grpo.integrations.transformers import return_logprobs

pytestmark = pytest.mark.grid

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
FULL = {"layer_types": ["full_attention"] * 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}  # which can do fp64
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
LATENT |= {"head_dim": 4, "num_key_value_heads": 4}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}
CONFIGS = {"GPT2LMHeadModel": "GPT2Config", "Gemma3": "Gemma3TextConfig"}

# Name, options of the config, and what happens between the head and the logits: (scale, softcap).
PLAIN = (1.0, None)
IS_5_23 = Version(transformers.__version__) >= Version("5.23")
FAMILIES: list[tuple[str, dict[str, Any], tuple[float, float | None]]] = [
    ("Llama", {"tie_word_embeddings": False}, PLAIN),
    ("Llama", {"tie_word_embeddings": True}, PLAIN),
    ("Qwen2", {"tie_word_embeddings": True}, PLAIN),
    ("Qwen3", {}, PLAIN),
    ("Mistral", {}, PLAIN),
    ("Phi", {"partial_rotary_factor": 0.5}, PLAIN),  # its head has a bias
    ("Phi3", {}, PLAIN),
    ("GPT2LMHeadModel", GPT2, PLAIN),
    ("GPTNeoX", {}, PLAIN),
    ("OPT", {"ffn_dim": 40, "word_embed_proj_dim": 16, "dropout": 0.0}, PLAIN),  # a projection before its head
    ("StableLm", {}, PLAIN),
    ("Olmo2", {}, PLAIN),
    ("SmolLM3", {}, PLAIN),
    ("ModernBertDecoder", FULL, PLAIN),  # a dense layer and a norm before its head
    (
        "Mpt",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "logit_scale": 3.0},
        PLAIN,
    ),  # an option that its forward does not read
    ("MiniCPM3", {"dim_model_base": 16, **LATENT}, PLAIN),  # divides by 2 before its head
    ("Mixtral", EXPERTS, PLAIN),
    ("Qwen2Moe", {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 24}, PLAIN),
    ("Gemma", {}, PLAIN),
    ("Gemma2", {"final_logit_softcapping": 3.0}, (1.0, 3.0)),
    ("Gemma3", {"final_logit_softcapping": 4.0, **FULL}, (1.0, 4.0)),
    ("NanoChat", {"final_logit_softcapping": 2.5}, (1.0, 2.5)),
    ("RecurrentGemma", {"logits_soft_cap": 0.5, "attention_window_size": 16}, (1.0, 0.5)),
    ("Cohere", {"logit_scale": 0.6}, (0.6, None)),
    ("Cohere2", {"logit_scale": 1.7, **FULL}, (1.7, None)),
    ("Granite", {"logits_scaling": 1.6}, (1 / 1.6, None)),
    ("GraniteMoe", {"logits_scaling": 2.0, **EXPERTS}, (0.5, None)),
    ("HyperCLOVAX", {"logits_scaling": 1.6}, (1.6, None)),
    ("FalconH1", {"lm_head_multiplier": 0.7, **MAMBA}, (0.7, None)),
]


def differentiated(model: Any, scores: Any) -> dict[str, Tensor]:
    """The scores and, of a loss that weighs each of them differently, the gradients of all parameters."""
    generator = torch.Generator().manual_seed(2)
    slopes = torch.randn(2, *scores[0].shape, generator=generator, dtype=torch.float64).to(scores[0].dtype)
    (torch.stack(tuple(scores)) * slopes).sum().backward()
    values = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"log_probs": scores[0].detach(), "entropy": scores[1].detach(), **values}


def other_tokens(batch: dict[str, Tensor], by: int) -> dict[str, Tensor]:
    """The same batch of other tokens: one alone may come out right by luck."""

    def moved(tokens: Tensor) -> Tensor:
        return torch.where(tokens < 3, tokens, 3 + (tokens - 3 + by) % 58)

    return {**batch, **{name: moved(batch[name]) for name in ("input_ids", "labels")}}


def joined(values: list[dict[str, Tensor]], exact: list[dict[str, Tensor]]) -> Tensor:
    """All gradients in one vector, each in units of its largest entry: one number too many decides nothing."""
    names = [name for name in exact[0] if name not in ("log_probs", "entropy")]
    pairs = [(value[name], x[name].abs().max()) for value, x in zip(values, exact, strict=True) for name in names]
    return torch.cat([(value / scale).flatten() for value, scale in pairs])


@pytest.mark.parametrize(("name", "options", "transform"), FAMILIES, ids=[name for name, _, _ in FAMILIES])
def test_log_probs_and_gradients_are_those_of_the_models_own_logits(
    make_model, batch, by_logits, assert_as_exact, name, options, transform
):
    model = make_model(name, CONFIGS.get(name), **options)
    assert tuple(head_transform(model.config).values()) == pytest.approx(transform)
    wide = copy.deepcopy(model).double()
    ours, plain, exact = [], [], []
    for tokens in (batch, other_tokens(batch, 11), other_tokens(batch, 29)):
        exact.append(differentiated(wide, by_logits(wide, tokens)))
        plain.append(differentiated(model, by_logits(model, tokens)))
        with return_logprobs(model):
            out = model(**tokens)
        ours.append(differentiated(model, (out.log_probs, out.entropy)))
        assert ours[-1].keys() == plain[-1].keys() == exact[-1].keys()
    head = next(n for n, x in model.named_parameters() if x is model.get_output_embeddings().weight)
    for which in ("log_probs", "entropy", head):
        assert_as_exact(*(torch.stack([x[which] for x in results]) for results in (ours, plain, exact)), what=which)
    assert_as_exact(*(joined(values, exact) for values in (ours, plain, exact)), what="gradients")


@pytest.mark.parametrize(("name", "options", "transform"), FAMILIES, ids=[name for name, _, _ in FAMILIES])
def test_each_transform_makes_a_difference_here(make_model, batch, name, options, transform):
    model, raw = make_model(name, CONFIGS.get(name), **options), []
    model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: raw.append(output.clone()))
    logits = model(batch["input_ids"], use_cache=False).logits
    moved = (logits.log_softmax(-1) - raw[0].log_softmax(-1)).abs().max().item()
    assert moved == 0 if transform == PLAIN else moved > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["Gemma2", "Granite", "Cohere", "HyperCLOVAX", "FalconH1", "RecurrentGemma"])
def test_rounding_is_not_taken_for_another_transform(make_model, batch, by_logits, name, dtype):
    options = next(options for family, options, _ in FAMILIES if family == name)
    model = make_model(name, **options).to(dtype)
    with return_logprobs(model):
        ours = model(**batch).log_probs
    assert ours.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert (ours - by_logits(model, batch).log_probs).abs().max() < 20 * torch.finfo(dtype).eps + 1e-6


@pytest.mark.parametrize("name", ["MiniCPM3", "Gemma2", "Cohere", "Granite", "HyperCLOVAX", "FalconH1", "Mpt"])
def test_from_the_backbone_too(make_model, batch, by_logits, name):
    """For callers of the backbone alone: transforms before the head count, too."""
    options = next(options for family, options, _ in FAMILIES if family == name)
    model = make_model(name, **options).double()
    hidden = model.base_model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state[:, :-1]
    targets = batch["labels"][:, 1:].clone()
    ours = linear_logprobs(hidden, model.get_output_embeddings().weight, targets, **logit_transform(model.config))
    torch.testing.assert_close(ours, by_logits(model, batch).log_probs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "text", "expected"),
    [
        ("PaliGemma", {"model_type": "gemma2", "final_logit_softcapping": 3.0}, (1.0, 3.0) if IS_5_23 else PLAIN),
        ("AyaVision", {"model_type": "cohere2", "logit_scale": 0.5}, PLAIN),
        ("LlavaNext", {"model_type": "granite", "logits_scaling": 8.0}, PLAIN),
        ("Gemma3", {"final_logit_softcapping": 3.0}, PLAIN),
        ("Gemma3n", {"final_logit_softcapping": 3.0}, (1.0, 3.0)),
        ("MuseGlimmer", {"final_logit_softcapping": 3.0, "output_multiplier": 0.5}, (0.5, 3.0)),
        ("Granite4Vision", {"logits_scaling": 8.0}, (0.125, None)),
    ],
)
def test_most_multimodal_models_do_not_do_what_their_text_config_says(config, text, expected):
    if not hasattr(transformers, f"{config}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {config}Config")
    made = getattr(transformers, f"{config}Config")(text_config=text)
    assert tuple(head_transform(made).values()) == expected


def test_a_multimodal_model_that_does_not_do_it(make_model, batch, by_logits):
    text = {"final_logit_softcapping": 2.0, **FULL}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 8}
    model = make_model("Gemma3ForConditionalGeneration", "Gemma3Config", text_config=text, vision_config=vision).eval()
    with return_logprobs(model):
        ours = model(**batch).log_probs
    torch.testing.assert_close(ours, by_logits(model, batch).log_probs, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not hasattr(transformers, "InklingTextConfig"), reason="this transformers has no Inkling")
def test_columns_that_a_model_leaves_out_are_refused():
    config = transformers.InklingTextConfig(vocab_size=16, unpadded_vocab_size=16, logits_mup_width_multiplier=8.0)
    assert logit_transform(config)["logit_scale"] == 1 / 8
    assert head_transform(config)["logit_scale"] == 1.0
    config.unpadded_vocab_size = 12
    with pytest.raises(UnsupportedError, match="16 rows of which the model uses 12"):
        logit_transform(config)
    config.model_type = "inkling2_text"  # whose head has 12 rows
    assert logit_transform(config)["logit_scale"] == 1.0


def test_what_is_no_config_is_refused():
    with pytest.raises(InputError, match=r"got a Linear, want the config .*; fix: model\.config"):
        logit_transform(torch.nn.Linear(2, 2))


# Every causal or multimodal LM of transformers that makes something else of its head's output, and by which name.
_OF_MODELS = {
    "logit_scale": ["Cohere", "Cohere2", "Cohere2Moe", "CohereCompass"],
    "lm_head_multiplier": ["FalconH1"],
    "logits_scaling": [
        *(f"Granite{x}" for x in ("", "SWA", "Moe", "MoeSWA", "MoeHybrid", "MoeShared", "4Vision", "Docling")),
        *("HyperCLOVAX", "HyperCLOVAXVisionV2"),
    ],
    "final_logit_softcapping": [
        *(f"Gemma{x}" for x in ("2", "3", "3n", "4", "4Unified")),
        *("Beam", "NanoChat", "VaultGemma", "MuseGlimmer", "MuseSpark", "MistralLarge4", "PaliGemma"),
    ],
    "logit_softcap": ["Inkling2", "Inkling2Loop"],  # = Softcap(config.final_logit_softcapping)
    "cap": ["RecurrentGemma"],  # = self.config.logits_soft_cap
    "output_logit_soft_cap": ["xLSTM"],
    "unpadded_vocab_size": ["Inkling"],  # cut: refused
    "image_tokens": ["Chameleon"],  # masked: refused
    "predict_logits": ["ProphetNet"],  # two at a time: refused
    "lm_heads": ["Musicgen", "MusicgenMelody"],  # several heads: refused
}
KNOWN = {model: name for name, models in _OF_MODELS.items() for model in models}
# Models that encode and decode, and names for the same logits.
OTHER = re.compile(r"final_logits_bias|outputs\b|generation_steps|predict_logits|labels\.size")
LM = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def changed_logits(source: str) -> dict[str, set[str]]:
    """For each class of `LM`, the names in statements of its forward that are more than `logits = head(...)`."""
    words: dict[str, set[str]] = {}
    for made in ast.parse(source).body:
        if not isinstance(made, ast.ClassDef) or not made.name.endswith(LM) or made.name.startswith("T5"):
            continue
        forward = [x for x in made.body if isinstance(x, ast.FunctionDef) and x.name == "forward"]
        for node in (node for function in forward for node in ast.walk(function)):
            text = ast.unparse(node) if isinstance(node, ast.Assign) else ""
            head = r"self(\.\w+)+\((?!logits\)).*\)"
            plain = re.fullmatch(rf"(lm_)?logits = ({head}|logits)(\.float\(\)|\.contiguous\(\))?", text)
            other = made.name.endswith(LM[-1]) and OTHER.search(text)
            if re.match(r"(lm_)?logits\b", text) and not plain and not other:
                words.setdefault(made.name, set()).update(re.findall(r"\w+", text))
    return words


def changes_of_transformers() -> dict[str, set[str]]:
    changes: dict[str, set[str]] = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        source = path.read_text()
        if re.search(
            r"^ {8,}(lm_)?logits\b[^=\n]* = (?!self\.\w+\([^*\n]*\)$)|= .*\(logits\)$", source, flags=re.MULTILINE
        ):
            changes |= changed_logits(source)
    return changes


def test_the_table_knows_every_lm_of_transformers():
    changes = changes_of_transformers()
    assert {"Gemma2ForCausalLM", "FalconH1ForCausalLM", "GraniteForCausalLM"} <= changes.keys()
    for model, names in changes.items():
        entry = KNOWN.get(re.sub("|".join(LM), "", model), "nothing")
        assert entry in names, f"{model} does something to its logits: {sorted(names)}, and the table says {entry}"


def test_multimodal_models_heed_their_text_config_where_they_read_it():
    read = {model.removesuffix(LM[-1]) for model in changes_of_transformers() if model.endswith(LM[-1])}
    assert {"Gemma3n", "Gemma4", "MuseGlimmer"} <= read
    types = {getattr(transformers, f"{model}Config").model_type for model in read - {"Chameleon"}}
    assert types == set(filter(heeds_its_text_config, CONFIG_MAPPING))
