"""Adapters for agent frameworks, each driven by its framework with a scripted model."""
