"""vLLM in the trainer's process.

inprocess.py   the engine
adapter.py     the same, with a LoRA adapter beside the base: a sync is the adapter alone
start.py       how vLLM is started
isolation.py   what it may not do to the process that it is in
"""
