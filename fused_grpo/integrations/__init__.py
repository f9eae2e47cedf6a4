"""The ops inside what people run already: a module for each project, imported by who wants it and by nobody else.

    fused_grpo.integrations.transformers  a causal LM that returns log-probs instead of logits
    fused_grpo.integrations.trl           TRL's trainers with our ops under them, and its GRPO loss in one pass
    fused_grpo.integrations.liger         Liger's fused GRPO loss, same class, same call
    fused_grpo.integrations.verl          verl's linear_cross_entropy, same call

What changes somebody else's objects is a context manager: leaving it puts back what was there, to the bit.
"""
