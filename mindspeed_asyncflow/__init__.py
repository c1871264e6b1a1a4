"""Asynchronous streaming RL post-training, Ascend first."""

__version__ = "0.1.0"
