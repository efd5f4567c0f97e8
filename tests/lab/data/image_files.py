"""Small datasets, written to disk in the formats of the real ones."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIDE, TINY_SIDE = 32, 64


def python2_pickle(entries: Mapping[str, Any]) -> bytes:
    """A dict of str to str, lists and uint8 arrays as Python 2 wrote it in protocol 2, the way of the CIFAR files."""
    items = b"".join(_python2(key) + _python2(value) for key, value in entries.items())
    return b"\x80\x02}(" + items + b"u."


def _python2(value: Any) -> bytes:
    if isinstance(value, str):
        return b"U" + struct.pack("<B", len(value)) + value.encode("latin-1")
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_python2, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(_python2, value)) + b"e"
    return _python2_array(value)


def _python2_array(array: Any) -> bytes:
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    raw = array.tobytes()
    return empty + b"(K\x01" + _python2(array.shape) + dtype + b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"


def cifar_pixels(count: int, *, seed: int = 0) -> Any:
    """As the files hold them: one row an image, the red plane first."""
    return np.random.default_rng(seed).integers(0, 256, (count, 3 * SIDE * SIDE), dtype=np.uint8)


def write_cifar10(data_dir: Path, *, per_file: int = 4, seed: int = 0) -> Path:
    folder = data_dir / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for number, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        labels = [(number + place) % 10 for place in range(per_file)]
        entries = {"batch_label": name, "labels": labels, "data": cifar_pixels(per_file, seed=number + 100 * seed)}
        (folder / name).write_bytes(python2_pickle({**entries, "filenames": [f"{k}.png" for k in labels]}))
    return folder


def write_cifar100(data_dir: Path, *, train: int = 12, test: int = 6) -> Path:
    folder = data_dir / "cifar-100-python"
    folder.mkdir(parents=True)
    for seed, (name, count) in enumerate({"train": train, "test": test}.items()):
        fine = [(7 * place) % 100 for place in range(count)]
        entries = {"fine_labels": fine, "coarse_labels": [label // 5 for label in fine]}
        (folder / name).write_bytes(python2_pickle({**entries, "data": cifar_pixels(count, seed=10 + seed)}))
    return folder


def write_tiny_imagenet(
    data_dir: Path, *, classes: tuple[str, ...] = ("n03", "n01", "n02"), per_class: int = 3
) -> Path:
    """The second image of each class is grey."""
    folder = data_dir / "tiny-imagenet-200"
    rng = np.random.default_rng(0)
    lines = []
    for place, name in enumerate(classes):
        images = folder / "train" / name / "images"
        images.mkdir(parents=True)
        for number in range(per_class):
            write_jpeg(images / f"{name}_{number}.JPEG", rng, mode="L" if number == 1 else "RGB")
        lines.append(f"val_{place}.JPEG\t{name}\t0\t0\t10\t10\n")
    (folder / "val" / "images").mkdir(parents=True)
    for place in range(len(classes)):
        write_jpeg(folder / "val" / "images" / f"val_{place}.JPEG", rng)
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("".join(f"{name}\n" for name in classes))
    return folder


def write_jpeg(path: Path, rng: np.random.Generator, *, mode: str = "RGB", side: int = TINY_SIDE) -> None:
    shape = (side, side) if mode == "L" else (side, side, 3)
    Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(path, format="JPEG")
