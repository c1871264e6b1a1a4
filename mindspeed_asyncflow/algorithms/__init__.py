"""Advantages, policy losses, off-policy corrections and KL: pure arrays in, arrays and metrics out."""
