"""Plain data is read in every protocol; whatever else a file asks for is refused, and none of it runs."""

import collections
import contextlib
import os
import pickle
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_files import cifar_pixels, python2_pickle

from divebatch.errors import DataError
from divebatch.lab.experiments.datasets.dataset import Origin
from divebatch.lab.experiments.datasets.unpickle import ADMITTED, read_pickle

ORIGIN = Origin("some-folder", "https://example.org/archive", "0" * 32)
GOOD = python2_pickle({"batch_label": "a", "labels": [1, 2], "data": cifar_pixels(2)})


def read(path: Path, content: bytes):
    path.write_bytes(content)
    return read_pickle(path, ORIGIN)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("key", ["data", b"data"])
def test_every_binary_protocol_is_read(tmp_path, protocol, key):
    pixels = cifar_pixels(3)
    found = read(tmp_path / "batch", pickle.dumps({key: pixels, "labels": [3, 0, 255, 70_000, -1, 2**40]}, protocol))
    assert found["labels"] == [3, 0, 255, 70_000, -1, 2**40]
    assert found["data"].dtype == np.uint8
    assert np.array_equal(found["data"], pixels)


def test_the_form_of_python_2_is_read_as_pickle_itself_reads_it(tmp_path):
    found = read(tmp_path / "batch", GOOD)
    with warnings.catch_warnings(action="ignore"):  # numpy.core has moved
        theirs = pickle.loads(GOOD, encoding="bytes")
    assert {key.encode() for key in found} == set(theirs)
    assert np.array_equal(found["data"], theirs[b"data"])
    assert found["labels"] == theirs[b"labels"]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=">i4").reshape(2, 3, 4),
        np.asfortranarray(np.arange(12).reshape(3, 4)),
        np.array(7, dtype=np.int8),
    ],
    ids=["big-endian", "fortran", "scalar array"],
)
@pytest.mark.parametrize("protocol", [2, 5])
def test_arrays_of_whole_numbers_come_back(tmp_path, array, protocol):
    found = read(tmp_path / "a", pickle.dumps(array, protocol))
    assert np.array_equal(found, array)
    assert found.dtype == array.dtype


def test_numbers_of_numpy_become_plain(tmp_path):
    assert read(tmp_path / "a", pickle.dumps([np.int64(5), np.uint8(200)], 2)) == [5, 200]


@pytest.mark.parametrize("protocol", [2, 4])
def test_shared_lists_of_plain_values_are_read(tmp_path, protocol):
    shared = [None, True, False, 0.5, -3, "x", b"y"]
    value = {"a": shared, "b": shared, "c": "text", "d": None, "e": []}
    found = read(tmp_path / "a", pickle.dumps(value, protocol))
    assert found == value
    assert found["a"] is found["b"]


# What must be refused


class Calls:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.parts = function, arguments

    def __reduce__(self):
        return self.parts


def global_call(module: str, name: str, argument: str) -> bytes:
    """The same for functions by name, in protocol 2."""
    return (
        b"\x80\x02"
        + f"c{module}\n{name}\nU".encode()
        + struct.pack("<B", len(argument))
        + argument.encode()
        + b"\x85R."
    )


def array_state(shape: bytes, dtype: bytes, raw: bytes) -> bytes:
    empty = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    return empty + b"(K\x01" + shape + dtype + b"\x89U" + struct.pack("<B", len(raw)) + raw + b"tb."


def dtype_of(code: bytes) -> bytes:
    return b"cnumpy\ndtype\nU" + struct.pack("<B", len(code)) + code + b"K\x00K\x01\x87R"


def pyramid(levels: int, step: bytes) -> bytes:
    """Containers of which each level holds the one below twice: 2^levels elements in a few bytes."""
    return b"q\x00" + b"".join(b"h" + bytes([n, 104, n]) + step + b"q" + bytes([n + 1]) for n in range(levels))


TOUCH = "touch PWNED"
MAKE = "open('PWNED','w')"
U1 = dtype_of(b"u1")
HOSTILE = {
    "os.system": pickle.dumps(Calls(os.system, TOUCH), 2),
    "os.system, protocol 4": pickle.dumps(Calls(os.system, TOUCH), 4),
    "os.system by its other name": global_call("posix", "system", TOUCH),
    "eval": pickle.dumps(Calls(eval, MAKE), 2),
    "eval, python 2's module": global_call("__builtin__", "eval", MAKE),
    "exec": pickle.dumps(Calls(exec, MAKE), 5),
    "inside a dict": pickle.dumps({"labels": [1], "data": [(Calls(os.system, TOUCH),)]}, 2),
    "as a key": pickle.dumps({Calls(eval, MAKE): 1}, 2),
    "getattr": pickle.dumps(Calls(getattr, "text", "encode"), 2),
    "dotted name": b"\x80\x04\x8c\x02os\x8c\x0bpath.isfile\x93\x8c\x01.\x85R.",
    "dotted name under numpy": b"\x80\x04\x8c\x05numpy\x8c\x0fndarray.__doc__\x93.",
    "numpy's runner": global_call("numpy.testing._private.utils", "runstring", MAKE),
    "numpy.load": global_call("numpy", "load", "PWNED"),
    "module with a space": b"\x80\x04\x8c\x0anumpy core\x8c\x07ndarray\x93.",
    "an object of a class": pickle.dumps(collections.OrderedDict(a=1), 2),
    "inst": b"\x80\x02(U\x0btouch PWNEDios\nsystem\n.",
    "obj": b"\x80\x02(cos\nsystem\nU\x0btouch PWNEDo.",
    "newobj": b"\x80\x02cos\nsystem\nU\x0btouch PWNED\x85\x81.",
    "a call of ndarray": b"\x80\x02cnumpy\nndarray\nJ\x00\x00\x00\x7f\x85\x85R.",
    "a call of a number": b"\x80\x02K\x01K\x02\x85R.",
    "a call of a built stand-in": b"\x80\x02" + U1 + b"K\x01\x85R.",
    "state for a list": b"\x80\x02]}b.",
    "state for a function": b"\x80\x02cnumpy\nndarray\nK\x01\x85b.",
    "persistent id": b"\x80\x02U\x01xQ.",
    "persistent id of a torch storage": pickle.dumps(torch.zeros(2), 2),
    "extension code": b"\x80\x02\x82\x01.",
    "object array": pickle.dumps(np.array([Calls(os.system, TOUCH)], dtype=object), 2),
    "object array from bytes": array_state(b"K\x01\x85", dtype_of(b"O8"), b"A" * 8),
    "record array": pickle.dumps(np.zeros(2, dtype=[("a", "u1")]), 2),
    "text array": pickle.dumps(np.array(["ab"]), 2),
    "float array": pickle.dumps(np.zeros(2), 5),
    "type that is a list": b"\x80\x02cnumpy\ndtype\n]\x85R.",
    "more shape than bytes": array_state(b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86", U1, b"abc"),
    "less shape than bytes": array_state(b"K\x01\x85", U1, b"abc"),
    "negative shape": array_state(b"J\xff\xff\xff\xffJ\xfd\xff\xff\xff\x86", U1, b"abc"),
    "huge empty shape": array_state(b"\x8a\x09" + b"\xff" * 8 + b"\x00K\x00\x86", U1, b""),
    "no shape": array_state(b"K\x03", U1, b"abc"),
    "no type": array_state(b"K\x03\x85", b"N", b"abc"),
    "wrong byte order": array_state(b"K\x03\x85", U1 + b"(K\x03U\x01?NNNK\x00K\x00K\x00tb", b"abc"),
    "array without state": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R.",
    "codec that inflates": b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00xX\x04\x00\x00\x00zlib\x86R.",
    "codec of another name": b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00xX\x05\x00\x00\x00utf-8\x86R.",
    "length of a string": b"\x80\x02T\xff\xff\xff\x7fabc.",
    "length of bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"abc.",
    "length of a bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"abc.",
    "length of a text": b"\x80\x04\x8d" + struct.pack("<Q", 2**63) + b"abc.",
    "negative length": b"\x80\x02T\xff\xff\xff\xffabc.",
    "memo that is not there": b"\x80\x02h\x07.",
    "pop from an empty stack": b"\x80\x02\x85.",
    "no mark": b"\x80\x02}u.",
    "half a pair": b"\x80\x02}(K\x01u.",
    "items for a list": b"\x80\x02](K\x01K\x02u.",
    "list as a key": b"\x80\x02}]K\x01s.",
    "number as a key": b"\x80\x02}K\x01K\x01s.",
    "key of a thousand letters": b"\x80\x02}X\xe8\x03\x00\x00" + b"x" * 1000 + b"Ns.",
    "dict in a dict": b"\x80\x02}U\x01a}s.",
    "tuple in a dict": b"\x80\x02}U\x01a)s.",
    "tuple in a list": b"\x80\x02])a.",
    "list that holds itself": b"\x80\x02]q\x00h\x00a.",
    "deep lists": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "stand-in in a list": b"\x80\x02]cnumpy\nndarray\na.",
    "call with many arguments": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(" + b"N" * 1000 + b"tR.",
    "too many opcodes": b"\x80\x02]" + b"N" * 2_000_000 + b".",
    "deep tuple as a key": b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s.",
    "pyramid of tuples as a key": b"\x80\x02}q\xff)" + pyramid(60, b"\x86") + b"h\xffh\x3cK\x01s.",
    "pyramid of tuples as a type": b"\x80\x02)" + pyramid(60, b"\x86") + b"cnumpy\ndtype\nh\x3c\x85R.",
    "pyramid of lists as a byte order": array_state(
        b"K\x03\x85", b"]" + pyramid(60, b"]h\x00a") + U1 + b"(K\x03h\x01tb", b"abc"
    ),
    "pyramid of lists as a name": b"\x80\x04]q\x00"
    + b"".join(b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(60))
    + b"\x8c\x01a\x93.",
    "pyramid of dicts as a name": b"\x80\x04}q\x00"
    + b"".join(b"}(\x8c\x01ah%c\x8c\x01bh%cuq%c" % (n, n, n + 1) for n in range(60))
    + b"\x8c\x01a\x93.",
    "the same bytes over and over": b"\x80\x02X\xe8\x03\x00\x00"
    + b"x" * 1000
    + b"q\x000X\x06\x00\x00\x00latin1q\x010"
    + b"c_codecs\nencode\nh\x00h\x01\x86R" * 100
    + b".",
    "nothing before the stop": b"\x80\x02.",
    "no stop": b"\x80\x02K\x01",
    "protocol 0": pickle.dumps({"data": [1]}, 0),
    "protocol 0 with a call": pickle.dumps(Calls(os.system, TOUCH), 0),
    "protocol 200": b"\x80\xc8K\x01.",
    "empty": b"",
    "zeros": bytes(1000),
    "text": b"<html>404 not found</html>",
    "gzip": b"\x1f\x8b\x08\x00" + bytes(range(100)),
    "torch file": b"PK\x03\x04" + bytes(50),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_and_nothing_runs(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"batch': .*https://example\.org/archive"):
        read(tmp_path / "batch", HOSTILE[name])
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]


def test_a_file_that_is_too_large_is_not_even_read(tmp_path):
    path = tmp_path / "batch"
    with path.open("wb") as file:
        file.truncate(2**31)  # takes no room on disk
    with pytest.raises(DataError, match="it has 2147483648 bytes, more than"):
        read_pickle(path, ORIGIN)


def test_the_sentinel_would_show_code_that_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickle.loads(HOSTILE["os.system by its other name"])
    assert (tmp_path / "PWNED").exists()


def test_the_forbidden_name_is_said(tmp_path):
    with pytest.raises(DataError, match=r"asks for 'posix\.system', which is not admitted"):
        read(tmp_path / "batch", HOSTILE["os.system"])


def test_shape_and_bytes_are_said(tmp_path):
    with pytest.raises(DataError, match=r"shape \(2147483647, 2147483647\) comes with 3 bytes"):
        read(tmp_path / "batch", HOSTILE["more shape than bytes"])


def test_messages_stay_short(tmp_path):
    long_name, long_text = b"\x80\x02c" + b"a" * 100_000 + b"\nb\n.", b"\x80\x02S" + b"a" * 100_000 + b"\n."
    for content in (long_name, long_text, array_state(b"(" + b"K\x01" * 50_000 + b"t", U1, b"ab")):
        with pytest.raises(DataError) as caught:
            read(tmp_path / "batch", content)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path, share):
    with pytest.raises(DataError, match="batch"):
        read(tmp_path / "batch", GOOD[: int(len(GOOD) * share)])


@given(place=st.integers(0, 200), bit=st.integers(0, 7))
def test_flipped_bits_give_data_or_a_data_error(tmp_path_factory, place, bit):
    damaged = bytearray(GOOD)
    damaged[place] ^= 1 << bit
    with contextlib.suppress(DataError):
        read(tmp_path_factory.getbasetemp() / "flipped", bytes(damaged))


@given(content=st.binary(max_size=200))
def test_random_bytes_give_data_or_a_data_error(tmp_path_factory, content):
    with contextlib.suppress(DataError):
        read(tmp_path_factory.getbasetemp() / "random", b"\x80\x02" + content)


PIECES = [
    *(b"N", b"K\x01", b"\x8c\x01a", b"\x8c\x06latin1", b"C\x02ab", b"U\x02u1", b"]", b"}", b")", b"("),
    *(b"\x85", b"\x86", b"\x87", b"t", b"a", b"e", b"s", b"u", b"R", b"b", b"\x93", b"\x94"),
    *(b"h" + bytes([place]) for place in range(4)),
    *(f"c{name.replace(' ', chr(10))}\n".encode() for name in ADMITTED),
]


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=8), times=st.integers(1, 30))
def test_no_container_but_a_list_in_a_dict_stands_in_another(tmp_path_factory, pieces, times):
    """Or few bytes could hold what takes for ever to unfold."""
    content = b"\x80\x04" + b"".join(pieces) * times + b"."
    with contextlib.suppress(DataError):
        found = read(tmp_path_factory.getbasetemp() / "repeated", content)
        for each in found.values() if isinstance(found, dict) else [found]:
            assert each is found or not isinstance(each, dict | tuple)
            assert not isinstance(each, list) or not any(isinstance(item, list | dict | tuple) for item in each)


def test_a_folder_in_the_place_of_a_file(tmp_path):
    with pytest.raises(DataError, match=str(tmp_path)):
        read_pickle(tmp_path, ORIGIN)
