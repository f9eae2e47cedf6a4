"""The bugs of `planted_bugs.py` in adapters, on servers and on bases in 4 bits: (file, old, new, caught by)."""

SENDER, INFO = "trainer/engines/server/weight_transfer.py", "trainer/engines/server/server_info.py"
SERVER = "trainer/engines/server/server_engine.py"
TESTS = "tests/trainer/engines/test_adapter_server.py"
SYNC = [TESTS, "-k", "nothing_else"]
KILLED = [TESTS, "-k", "was_killed"]
LOST = [TESTS, "-k", "samples_nothing"]
REFUSED = [TESTS, "-k", "cannot_serve"]
FLIGHT = [TESTS, "-k", "batches_in_flight"]
BYTES = [TESTS, "-k", "counted_and_logged"]

ADAPTERS, IN_4BIT = "trainer/models/adapters.py", "trainer/models/quantized.py"
QUANTIZED = "tests/trainer/models/test_quantized.py"

BUGS = {
    "PEFT merges a layer in 4 bits, which rounds the sum": (
        ADAPTERS,
        "    instead |= {} if plain is base else {id(base): plain}\n",
        "    plain = base\n",
        [QUANTIZED, "-k", "computes_with"],
    ),
    "layers in 4 bits without an adapter are sent as codes": (
        ADAPTERS,
        "if (_is_wrapped(layer) or is_4bit(layer)) and",
        "if _is_wrapped(layer) and",
        [QUANTIZED, "-k", "computes_with"],
    ),
    "bitsandbytes packs layers for inference": (
        IN_4BIT,
        "        layer.support_avx512bf16_for_cpu = False\n",
        "",
        [QUANTIZED, "-k", "round_the_scales"],
    ),
    "a merge adds to the bias of the base": (
        IN_4BIT,
        "copy.deepcopy(layer.bias)",
        "layer.bias",
        [QUANTIZED, "-k", "merged_exactly"],
    ),
    "a merge adds to the shards of one process": (
        ADAPTERS,
        "nn.Parameter(gathered(weight.detach()).clone())",
        "nn.Parameter(gathered(weight.detach()))",
        ["tests/trainer/distributed/test_sharding.py", "-k", "leaves_its_shards"],
    ),
    "what a checkpoint in 4 bits computes with is rounded": (
        IN_4BIT,
        "torch.promote_types(state.dtype, layer.compute_dtype or state.dtype)",
        "state.dtype",
        [QUANTIZED, "-k", "merged_exactly"],
    ),
    "a run goes on with a base that is quantised otherwise": (
        "trainer/checkpoint/resume.py",
        "codes_identity(base_model(_model(learner)).config)",
        "None",
        [QUANTIZED, "-k", "stopped_and_resumed"],
    ),
    "vLLM is told that the base is quantised": (
        "trainer/engines/vllm/start_vllm.py",
        "        del config.quantization_config\n",
        "        pass\n",
        [QUANTIZED, "-k", "computes_with"],
    ),
    "an adapter is loaded under the name of the one before": (
        SERVER,
        "partial(load_adapter, name=server_version,",
        "partial(load_adapter, name=self._server_version,",
        SYNC,
    ),
    "requests name the base": (
        SERVER,
        '{"model": self._server_version} if self.takes_adapter else {}',
        "{}",
        SYNC,
    ),
    "the adapter before stays loaded": (SENDER, "for old in names - {name}:", "for old in ():", SYNC),
    "adapters of others are unloaded": (SENDER, " if model.id.startswith(ADAPTER_PREFIX)}", "}", KILLED),
    "a 404 ends the run": (
        "trainer/engines/server/replicas.py",
        " and not isinstance(error, NoRouteError)",
        "",
        LOST,
    ),
    "a loaded adapter need not be there": (SENDER, "if name not in names:", "if False:", [TESTS, "-k", "did_not"]),
    "a lower rank is accepted": (
        INFO,
        "most < rank,",
        "False,",
        [
            "tests/trainer/engines/test_adapter_server.py",
            "-k",
            "a_server_that_cannot_serve_the_adapter_is_refused and attributes1",
        ],
    ),
    "the rank of a pattern does not count": (
        "trainer/engines/weight_files.py",
        "*config.rank_pattern.values()",
        "",
        [TESTS, "-k", "largest_rank"],
    ),
    "merged weights of another run are a base": (
        INFO,
        'version != "default" and not version.startswith(ADAPTER_PREFIX)',
        "False",
        [
            "tests/trainer/engines/test_adapter_server.py",
            "-k",
            "a_server_that_cannot_serve_the_adapter_is_refused and attributes4",
        ],
    ),
    "a server that was restarted is not asked for LoRA": (
        INFO,
        "if wanted.adapter_rank is not None:",
        "if False:",
        REFUSED,
    ),
    "adapters are merged for servers too": (
        "trainer/learner.py",
        'if getattr(engine, "takes_adapter", False) else',
        "if False else",
        FLIGHT,
    ),
    "an adapter is sent in fp32": (
        "trainer/models/adapters.py",
        "(name, narrow(name, weight)) for name, weight in adapter_weights",
        "(name, weight) for name, weight in adapter_weights",
        BYTES,
    ),
    "layers with adapters are not compared": (
        "trainer/engines/server/server_info.py",
        'printed = re.sub(_LORA, "): ", printed)',
        "",
        ["tests/trainer/engines/test_served_model.py", "-k", "has_adapters"],
    ),
    "a resumed run has another reference, or another base": (
        "trainer/checkpoint/resume.py",
        '        "frozen_weights": learner.frozen_weights,\n',
        "",
        ["tests/trainer/checkpoint/test_resume.py", "-k", "no_checkpoint_has"],
    ),
    "what an adapter has learned counts as its base": (
        "trainer/models/loading.py",
        "        if is_adapted(model) and parameter.requires_grad:\n            continue\n",
        "",
        ["tests/trainer/checkpoint/test_resume.py", "-k", "is_not_its_base"],
    ),
}
