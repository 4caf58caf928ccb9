"""Adapters: one file per engine."""
