"""Plain data is read in every protocol; whatever else a file names is refused, and none of it runs."""

import os
import pickle
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_files import cifar_pixels, python2_pickle

from divebatch.errors import DataError
from divebatch.lab.data.cifar import CIFAR10

GOOD = python2_pickle({"batch_label": "a", "labels": [1, 2], "data": cifar_pixels(2)})
SENTINEL = "harm-was-done"


def read(path: Path, content: bytes):
    path.write_bytes(content)
    return CIFAR10._read_file(path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("key", [str, str.encode])
def test_every_binary_protocol_is_read(tmp_path, protocol, key):
    pixels = cifar_pixels(3)
    entries = {key("data"): pixels, key("labels"): [3, 0, np.int64(9)]}
    images, labels = read(tmp_path / "batch", pickle.dumps(entries, protocol))
    assert labels == [3, 0, 9]
    assert images.dtype == np.uint8
    assert np.array_equal(images, pixels)


def test_the_form_of_python_2_is_read(tmp_path):
    images, labels = read(tmp_path / "batch", GOOD)
    assert np.array_equal(images, cifar_pixels(2))
    assert labels == [1, 2]


class Call:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


HOSTILE = {
    "os.system": pickle.dumps(Call(os.system, f"touch {SENTINEL}"), protocol=2),
    "eval": pickle.dumps({"data": Call(eval, f"open({SENTINEL!r}, 'w')")}, protocol=4),
    "getattr": pickle.dumps(Call(getattr, "text", "join"), protocol=5),
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"Pevil\n.",
    "a bytearray of 2^62 bytes": b"\x80\x05\x96" + (2**62).to_bytes(8, "little") + b".",
    "cut short": GOOD[:-40],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_by_name_and_nothing_runs(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="batch"):
        read(tmp_path / "batch", HOSTILE[name])
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]


@given(place=st.integers(0, len(GOOD) - 1), bit=st.integers(0, 7))
def test_flipped_bits_give_data_or_a_data_error(tmp_path_factory, place, bit):
    content = bytearray(GOOD)
    content[place] ^= 1 << bit
    with suppress(DataError):
        read(tmp_path_factory.mktemp("flipped") / "batch", bytes(content))
