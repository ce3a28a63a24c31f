"""Pooling models: from bodies to prompts, and from vectors to embeddings, classes, scores and rankings."""
