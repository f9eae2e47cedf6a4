# Each target is complete from a clean clone: it makes .venv and installs what it needs. Re-running is quick.
PYTHON ?= python3
SEED ?= 0
OUTPUT_DIR ?= runs/demo
JOBS ?= 2
BIN := .venv/bin

.PHONY: setup demo test check bench bench-gpu clean

setup:   ## a virtual environment with the package and the rollout engine for this machine
	@$(PYTHON) scripts/setup_env.py

demo:    ## train the built-in arithmetic task with vLLM rollouts; SEED=n, OUTPUT_DIR=path
	@$(PYTHON) scripts/setup_env.py
	@$(BIN)/fused-grpo train --seed $(SEED) --output-dir $(OUTPUT_DIR) --overwrite-output-dir

test:    ## the whole suite, with real vLLM and interpreted Triton; JOBS=n files at a time
	@$(PYTHON) scripts/setup_env.py dev bench
	@OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

check:   ## style, types and the house rules
	@$(PYTHON) scripts/setup_env.py dev bench
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python scripts/house_style.py

bench:   ## time and memory beside the peers, on this machine's CPU: bench/results/<machine>/<date>.json, .md, charts
	@$(PYTHON) scripts/setup_env.py dev bench
	@$(BIN)/python -m fused_grpo.bench --suite cpu $(ARGS)

bench-gpu: ## the same on its GPU; goes on where it was interrupted. ARGS=--tiny tries it without one
	@$(PYTHON) scripts/setup_env.py dev bench
	@$(BIN)/python -m fused_grpo.bench --suite gpu $(ARGS)

clean:   ## everything that these targets made, but not runs/
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
