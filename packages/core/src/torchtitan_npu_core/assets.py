"""Text and tokenizer for runs without downloads, made from what every Python installation has.

The text is the reference manual in ``pydoc_data.topics``; the tokenizer is a byte-level BPE trained
on it. Both are made once and kept in a cache folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from torchtitan_npu_core.errors import CommandError

NAME = "pydoc_data.topics"
"""Value of ``hf_assets_path`` and ``dataset_path`` in a TOML that stands for these assets."""

CACHE_VARIABLE = "TORCHTITAN_NPU_CACHE"
VOCAB_SIZE = 2048
"""Entries of the tokenizer; the debug flavors of torchtitan have a vocabulary of this size."""


def cache_folder() -> Path:
    """Where made assets are kept: ``TORCHTITAN_NPU_CACHE``, or a folder in the user's cache."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "torchtitan-npu"


def _topics() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def make_folder(folder: Path, write: Callable[[Path], None]) -> Path:
    """Fill a folder in one step: it exists complete or not at all, whoever else tries.

    Args:
        folder: What to make, below ``cache_folder()``.
        write: Called with an empty folder that becomes this one.

    Raises:
        CommandError: If it cannot be written.
    """
    if _complete(folder):
        return folder
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        write(temporary)
        if folder.is_dir() and not _complete(folder):
            shutil.rmtree(folder)
        try:
            os.replace(temporary, folder)
        except OSError:
            # another process was faster
            if not _complete(folder):
                raise
    except OSError as error:
        raise CommandError(
            f"{folder.name} could not be made in {folder.parent}: {error}. Set {CACHE_VARIABLE} to "
            f"a folder that can be written to."
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _complete(folder: Path) -> bool:
    """Whether a made folder is there with something in every file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return bool(files) and all(file.stat().st_size for file in files)


def _digest(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:8]


def text_folder(cache: Path | None = None) -> Path:
    """Folder with the text as JSON lines, one document per topic."""
    texts = _topics()

    def write(folder: Path) -> None:
        with open(folder / "topics.jsonl", "w", encoding="utf-8") as file:
            for text in texts:
                file.write(json.dumps({"text": text}) + "\n")

    return make_folder((cache or cache_folder()) / f"topics-{_digest(texts)}", write)


def tokenizer_folder(cache: Path | None = None, vocab_size: int = VOCAB_SIZE) -> Path:
    """Folder with ``tokenizer.json`` and its config, trained on the text."""
    texts = _topics()

    def write(folder: Path) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        special = ["<|begin_of_text|>", "<|end_of_text|>"]
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"bos_token": special[0], "eos_token": special[1]}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))

    return make_folder((cache or cache_folder()) / f"bpe{vocab_size}-{_digest(texts)}", write)
