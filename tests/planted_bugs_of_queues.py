"""The bugs of `planted_bugs.py` in batches that are sampled during training: (file, old, new, caught by)."""

TESTS = "tests/trainer/collect/test_batch_queue.py"
ROUNDS = [TESTS, "-k", "further_rounds"]
RESUMED = [TESTS, "-k", "stopped_after_any_step and 4"]
OTHER = [TESTS, "-k", "another_number"]
FAILURE = [TESTS, "-k", "failure_ends"]
OWN = "tests/trainer/engines/test_own_server.py"
COPY = [TESTS, "-k", "copy_of_weights"]
PACE = "tests/trainer/collect/test_pace.py"

BUGS = {
    "one batch too many is in flight": (
        "trainer/collect/collector.py",
        "range(min(self.pace.batches, later) - len(self.queue))",
        "range(min(self.pace.batches + 1, later) - len(self.queue))",
        [
            "tests/trainer/collect/test_batch_queue.py::test_a_batch_is_as_many_generations_old_as_the_option_says[1-slow]"
        ],
    ),
    "batches are requested that no step is left for": (
        "trainer/collect/collector.py",
        "range(min(self.pace.batches, later) - len(self.queue))",
        "range(self.pace.batches - len(self.queue))",
        [
            "tests/trainer/collect/test_batch_queue.py::test_a_batch_is_as_many_generations_old_as_the_option_says[1-slow]"
        ],
    ),
    "the way is taken for the divergence": (
        "trainer/collect/batch_queue.py",
        "generations * math.sqrt(self.limit / ",
        "generations * (self.limit / ",
        [PACE, "-k", "near_enough and moves2"],
    ),
    "rounding counts as a way": (
        "trainer/collect/batch_queue.py",
        "self.on_policy_kl = kl",
        "pass",
        [PACE, "-k", "rounding"],
    ),
    "a resumed run has forgotten its pace": (
        "trainer/collect/collector.py",
        """self._pace(*position.get("pace", ()))""",
        "self._pace()",
        [PACE, "-k", "stopped_after_any_step"],
    ),
    "each step of a generation counts as one": (
        "trainer/collect/batch_queue.py",
        "off_policy_steps // self.steps",
        "off_policy_steps",
        [PACE, "-k", "count_as_one and options1"],
    ),
    "the divergence is that of the policy from its sampler": (
        "trainer/batching/micro_batch_metrics.py",
        "old - sampling, 0.0)",
        "sampling - old, 0.0)",
        ["tests/trainer/batching/test_ratio_metrics.py", "-k", "compared_with_the_old"],
    ),
    "the newest batch is learned from first": (
        "trainer/collect/batch_queue.py",
        "self.popleft()",
        "self.pop()",
        [
            "tests/trainer/collect/test_batch_queue.py::test_a_batch_is_as_many_generations_old_as_the_option_says[2-slow]"
        ],
    ),
    "batches are sampled side by side": (
        "trainer/collect/batch_queue.py",
        "failure = None if earlier is None else earlier.exception()",
        "failure = None",
        [
            "tests/trainer/collect/test_batch_queue.py::test_a_batch_is_as_many_generations_old_as_the_option_says[2-slow]"
        ],
    ),
    "weights for later are no copy": (
        "trainer/models/weight_stream.py",
        'weight.to("cpu", copy=True)',
        "weight",
        COPY,
    ),
    "an engine that is not free keeps its weights": (
        "trainer/collect/collector.py",
        "if not is_free and not (self.queue and self.queue[-1].weight_version == step):",
        "if False:",
        [
            "tests/trainer/collect/test_batch_queue.py::test_a_batch_is_as_many_generations_old_as_the_option_says[2-slow]"
        ],
    ),
    "a batch of several versions has that of its last round": (
        "trainer/collect/collector.py",
        "Scored.joined([scored, more])",
        "replace(Scored.joined([scored, more]), weight_version=more.weight_version)",
        ROUNDS,
    ),
    "a run that has ended goes on sampling": (
        "trainer/collect/batch_queue.py",
        "            if self.is_closed:\n                raise CancelledError\n",
        "",
        [TESTS, "-k", "has_ended"],
    ),
    "further rounds are sampled anew while a queue waits": (
        "trainer/collect/collector.py",
        "more = self._with_unequal_rewards(self._round(engine, phases, sync))",
        "self._draw_and_request = lambda *_: (lambda rows, of: (rows, of()))(*self._next_batch(engine))\n"
        "                more = self._with_unequal_rewards(self._round(engine, phases, sync))\n"
        "                del self._draw_and_request",
        [TESTS, "-k", "stopped_after_any_step and 4 and dynamic"],
    ),
    "a checkpoint has the first batch of the queue alone": (
        "trainer/collect/collector.py",
        "tables.append(as_tensors(samples) | {GREEDY",
        "tables or tables.append(as_tensors(samples) | {GREEDY",
        RESUMED,
    ),
    "a resumed queue begins behind its rows": (
        "trainer/collect/collector.py",
        "next((batch.before for batch in self.queue), self._position())",
        "self._position()",
        RESUMED,
    ),
    "a resumed run learns from batches that are too old": (
        "trainer/collect/collector.py",
        "is_old = step - version > (self.args.generate_ahead - number) * self.steps_per_batch",
        "is_old = False",
        OTHER,
    ),
    "an epoch that is left goes on with what is in flight": (
        "trainer/collect/collector.py",
        "        if self.queue:\n            self.load_state(self._place())\n",
        "",
        [TESTS, "-k", "epoch_that_is_left"],
    ),
    "the server of a rank waits for weights of the first": (
        "trainer/engines/server/server_engine.py",
        "self._own, self.first_rank_sends = own, own is None",
        "self._own = own",
        [OWN, "-k", "in_flight and False"],
    ),
    "a server outlives a trainer that is killed": (
        "trainer/engines/server/serve_beside.py",
        "    threading.Thread(target=_end_with_trainer, args=(os.getppid(), left_in), daemon=True).start()\n",
        "",
        [OWN, "-k", "ends_with_a_trainer_that_is_killed"],
    ),
    "weights of a killed trainer stay in memory": (
        "trainer/engines/server/serve_beside.py",
        "        _remove_abandoned(parent)\n",
        "        pass\n",
        [OWN, "-k", "left_in_memory"],
    ),
    "a server ends with the last fork of its trainer": (
        "trainer/engines/server/serve_beside.py",
        "os.getppid() == trainer and not",
        "not",
        [OWN, "-k", "ends_with_a_trainer_that_is_killed"],
    ),
    "a server of the trainer's own gets 100 requests at a time": (
        "trainer/engines/server/replicas.py",
        "verify=self._certificates, limits=limits, uds",
        "verify=self._certificates, uds",
        [OWN, "-k", "as_many_requests"],
    ),
    "a server of the trainer's own has the key of the user's": (
        "trainer/engines/server/own_server.py",
        ', "VLLM_API_KEY"}',
        "}",
        [OWN, "-k", "ends_with_it"],
    ),
    "what a server has started outlives it": (
        "trainer/engines/server/own_server.py",
        "        os.killpg(process.pid, signal.SIGTERM)\n",
        "        os.kill(process.pid, signal.SIGKILL)\n        return\n",
        [OWN, "-k", "ends_with_it"],
    ),
    "a server that has ended is waited for": (
        "trainer/engines/server/replicas.py",
        "retry=may_pass and not has_ended",
        "retry=may_pass",
        [OWN, "-k", "at_once and room"],
    ),
    "any user can connect to a server of the trainer's own": (
        "trainer/engines/server/own_server.py",
        "home = resources.enter_context(temporary_folder(0))",
        "home = resources.enter_context(temporary_folder(0))\n            home.chmod(0o755)",
        [OWN, "-k", "ends_with_it"],
    ),
    "the arguments of a server are for all to see": (
        "trainer/engines/server/own_server.py",
        '[sys.executable, "-P", str(_SCRIPT)]',
        '[sys.executable, "-P", str(_SCRIPT), *command[3:]]',
        [OWN, "-k", "ends_with_it"],
    ),
    "a fork that ends takes the server with it": (
        "trainer/common/contexts.py",
        "if os.getpid() == process:",
        "if True:",
        [OWN, "-k", "fork_of_its_trainer"],
    ),
    "a fork that ends removes a folder of weights": (
        "trainer/engines/weight_files.py",
        "if os.getpid() == owner:",
        "if True:",
        ["tests/trainer/engines/test_weight_files.py", "-k", "a_fork"],
    ),
    "a request that fails holds up all others": (
        "trainer/engines/server/replicas.py",
        "await asyncio.sleep(_MOMENT)",
        '__import__("time").sleep(_MOMENT)',
        [OWN, "-k", "side_by_side"],
    ),
    "a step has the metrics of the last sync": (
        "trainer/collect/collector.py",
        "self.sync_metrics = self.queue[0].sync_metrics",
        'self.sync_metrics = dict(getattr(engine, "sync_metrics", {}))',
        [TESTS, "-k", "own_sync"],
    ),
    "sampling goes on behind a failure": (
        "trainer/collect/batch_queue.py",
        "            if failure is not None:\n                raise failure\n",
        "",
        FAILURE,
    ),
    "a thread that samples puts back generators of the trainer": (
        "trainer/engines/transformers_generate.py",
        "generators=beams > 1 or not self.samples_in_background",
        "generators=True",
        ["tests/trainer/engines/test_transformers_generate.py", "-k", "thread_of_its_own"],
    ),
    "calls that fail are none": (
        "trainer/logging/run_output.py",
        'bool(calls) and metric(metrics, "tools/failure_frequency") == 1.0',
        'bool(calls) and not metric(metrics, "tools/failure_frequency")',
        ["tests/trainer/logging/test_advice.py", "-k", "warned_of_once"],
    ),
}
