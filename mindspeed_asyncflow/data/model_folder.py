"""Writing a Hugging Face folder without noise on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_folder(folder: Path, model: Any, tokenizer: Any) -> None:
    """Config, generation config, safetensors, tokenizer and chat template, readable by every user."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
    for file in folder.iterdir():
        file.chmod(0o644)
