"""Drop-ins: the ops inside other projects, with one module per project. No other module imports them.

    fused_grpo.integrations.transformers  a causal LM that returns log-probs instead of logits
    fused_grpo.integrations.trl           TRL's trainers with our ops under them, and its GRPO loss in one pass
    fused_grpo.integrations.liger         Liger's fused GRPO loss, same class, same call
    fused_grpo.integrations.verl          verl's linear_cross_entropy, same call

Each change to objects of another project is a context manager, which restores the original objects when it is left.
"""
