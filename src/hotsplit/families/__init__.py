"""Families of models, one module each: from a checkpoint's config, or from a GGUF's keys, to what
the model is (hotsplit.model.spec) and where its tensors are."""
