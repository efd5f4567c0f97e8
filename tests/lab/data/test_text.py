"""Text: every byte predicted once, by a function of the seed, and an error for every file that is wrong."""

import lzma
from collections import Counter
from itertools import pairwise

import pytest
import torch
from text_files import documents, packed, write_corpus

from divebatch.errors import ArgumentError, DataError
from divebatch.lab.data import DATASETS, DataPlace

CPU = torch.device("cpu")
LENGTH = 32


def split(folder, *, seed=0, held_out=0.0, length=LENGTH, **settings):
    place = DataPlace(CPU, folder=folder, sequence_length=length)
    return DATASETS["text"](**settings).load(seed, place, held_out=held_out)


def rows(batches):
    return [(tuple(x.tolist()), tuple(y.tolist())) for batch in batches for x, y in zip(*batch, strict=True)]


def test_every_byte_is_predicted_once_from_those_before_it(tmp_path):
    loader = split(write_corpus(tmp_path)).loader(8, seed=0)
    sequences = rows(loader.full_pass())
    targets = [byte for _, target in sequences for byte in target]
    assert [byte for inputs, _ in sequences for byte in inputs] == [0, *targets[:-1]]
    written = [text + b"\0" for text in documents(40, seed=0)]
    total = sum(map(len, written))
    assert len(targets) == total // LENGTH * LENGTH
    found = bytes(targets).split(b"\0")
    assert {text + b"\0" for text in found[:-1]} <= set(written)
    assert len(found[:-1]) in (39, 40)  # the last one may be cut
    assert Counter(rows(loader)) == Counter(sequences)


def test_the_seed_decides_on_the_order_of_documents_and_nothing_else_does(tmp_path):
    write_corpus(tmp_path)
    first, again, other = (rows(split(tmp_path, seed=seed).loader(4, seed=0).full_pass()) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_validation_is_the_held_out_documents_in_their_order(tmp_path):
    validation = rows(split(write_corpus(tmp_path)).validation)
    text = b"".join(text + b"\0" for text in documents(4, seed=1))
    assert bytes(byte for _, target in validation for byte in target) == text[: len(text) // LENGTH * LENGTH]


def test_a_part_of_the_validation_is_taken_evenly(tmp_path):
    write_corpus(tmp_path)
    whole, part = rows(split(tmp_path).validation), rows(split(tmp_path, validation_bytes=5 * LENGTH + 1).validation)
    places = [whole.index(row) for row in part]
    assert len(places) == 5
    assert (places[0], places[-1]) == (0, len(whole) - 1)
    gaps = [later - earlier for earlier, later in pairwise(places)]
    assert max(gaps) - min(gaps) <= 1


def test_corpora_are_joined_or_chosen_by_name(tmp_path):
    write_corpus(tmp_path, "a")
    write_corpus(tmp_path, "b", seed=1)
    sizes = [len(split(tmp_path, corpora=names).loader(4, seed=0).dataset) for names in ([], ["a"], ["b"])]
    assert abs(sizes[0] - sizes[1] - sizes[2]) <= 1


def test_a_search_holds_out_whole_training_documents(tmp_path):
    write_corpus(tmp_path)
    (tmp_path / "text" / "tiny.valid.xz").unlink()  # a search must not even read it
    data = split(tmp_path, held_out=0.25)
    held = bytes(byte for _, target in rows(data.validation) for byte in target).split(b"\0")[:-1]
    kept = bytes(byte for _, target in rows(data.loader(4, seed=0).full_pass()) for byte in target).split(b"\0")
    assert len(held) in (9, 10)
    assert not set(held) & set(kept)


# What is wrong is refused


def test_a_missing_folder_or_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no data folder was given: pass data_dir=FOLDER, the one that holds 'text'"):
        split(None)
    with pytest.raises(DataError, match=r"nowhere' does not exist: pass --data-dir FOLDER, the one that holds 'text'"):
        split(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"there is no folder '.*text'"):
        split(tmp_path)
    (tmp_path / "text").mkdir()
    with pytest.raises(DataError, match=r"NAME.train.xz' is missing; of such files .* holds: none"):
        split(tmp_path)
    write_corpus(tmp_path)
    with pytest.raises(DataError, match=r"is the dataset itself: pass --data-dir .*, which holds it"):
        split(tmp_path / "text")
    with pytest.raises(DataError, match=r"x.train.xz' is missing; .* holds: tiny.train.xz, tiny.valid.xz"):
        split(tmp_path, corpora=["x"])
    (tmp_path / "text" / "tiny.valid.xz").unlink()
    with pytest.raises(DataError, match=r"tiny.valid.xz' is missing"):
        split(tmp_path)


WRONG = {
    "cut": (packed(documents(3, seed=9))[:-20], "cannot be read as .xz, or is cut short"),
    "no xz": (b"plain words, never packed\0", "cannot be read as .xz"),
    "no documents": (lzma.compress(b""), "is cut short, or not made of documents"),
    "no zero byte": (lzma.compress(b"words"), "not made of documents: its last one does not end"),
    "empty document": (lzma.compress(b"ab\0\0cd\0"), r"document 2 is empty \(two zero bytes in a row"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_foreign_or_damaged_file_is_named(tmp_path, name):
    content, message = WRONG[name]
    write_corpus(tmp_path)
    (tmp_path / "text" / "tiny.train.xz").write_bytes(content)
    with pytest.raises(DataError, match=f"tiny.train.xz'.*({message})"):
        split(tmp_path)


def test_a_damaged_middle_is_noticed(tmp_path):
    write_corpus(tmp_path)
    path = tmp_path / "text" / "tiny.train.xz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot be read as .xz"):
        split(tmp_path)


def test_validation_documents_that_are_trained_on_are_an_error(tmp_path):
    write_corpus(tmp_path)
    known = documents(40, seed=0)[7]
    (tmp_path / "text" / "tiny.valid.xz").write_bytes(packed([b"something new", known]))
    with pytest.raises(DataError, match=r"1 of the 2 validation documents are training documents too, .*'0-7: "):
        split(tmp_path)


def test_sequences_that_do_not_fit_are_an_error(tmp_path):
    write_corpus(tmp_path, train=1)
    with pytest.raises(DataError, match=r"sequences of 1000 bytes are longer than all training text, which has 2\d\d"):
        split(tmp_path, length=1000)
    with pytest.raises(ArgumentError, match=r"sequence_length=64 bytes are longer than the 32 that the model takes"):
        split(tmp_path, sequence_length=64)
    with pytest.raises(ArgumentError, match=r"needs a model that takes sequences, such as gpt"):
        split(tmp_path, length=None)
