"""Tasks, prompt sets, tokenizers and model folders."""
