"""Writes a tiny corpus in the format of `data_dir/text`."""

import lzma
import random
from pathlib import Path

WORDS = ("the", "of", "and", "to", "a", "in", "that", "it", "was", "he", "his", "is", "with", "for", "had", "you")


def documents(count: int, *, seed: int, words: int = 60) -> list[bytes]:
    """Sentences of common words, no two documents alike."""
    draw = random.Random(seed)
    return [f"{seed}-{number}: {' '.join(draw.choices(WORDS, k=words))}.".encode() for number in range(count)]


def packed(texts: list[bytes]) -> bytes:
    return lzma.compress(b"".join(text + b"\0" for text in texts), preset=0)


def write_corpus(data_dir: Path, name: str = "tiny", *, train: int = 40, valid: int = 4, seed: int = 0) -> Path:
    """About 300 bytes a document. Returns `data_dir`."""
    folder = data_dir / "text"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.train.xz").write_bytes(packed(documents(train, seed=2 * seed)))
    (folder / f"{name}.valid.xz").write_bytes(packed(documents(valid, seed=2 * seed + 1)))
    return data_dir
