"""Times that a roofline predicts of GPUs: the trace on fake tensors, and the file of predicted times."""
