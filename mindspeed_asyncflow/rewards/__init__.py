"""Scoring of answers in processes that can be ended at any moment."""
