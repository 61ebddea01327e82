"""Mapped vocabularies against the `tokenizers` library, bit for bit."""

import json
import os
import threading

import pytest
from tokenizers import Tokenizer as Library

from tests.serving.frontend.random_tokenizers import random_file, random_texts
from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, word_tokenizer, wrapped, write_folder
from tests.tiers import scaled
from tokenmill.model.vocabulary import mapped_file
from tokenmill.model.vocabulary.mapped_backend import MappedBackend
from tokenmill.model.vocabulary.mapped_file import SUFFIX, MappedVocabulary, open_vocabulary
from tokenmill.serving.frontend.library_backend import LibraryBackend
from tokenmill.serving.frontend.tokenizer import IncrementalDetokenizer, Tokenizer

pytest.importorskip("tokenmill._native")

CONFIG = {"added_tokens_decoder": {"9999": {"content": "<gap>"}}}


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    monkeypatch.setattr(mapped_file, "LEAST_BYTES", 0)


def mapped(folder, cache) -> Tokenizer:
    tokenizer = Tokenizer.load(folder, cache)
    assert isinstance(tokenizer._backend, MappedBackend)
    return tokenizer


def assert_equal(ours: Tokenizer, library: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        for adds in (False, True):
            assert ours.encode(text, adds) == library.encode(text, adds), text
        ids = library.encode(text)
        for skips in (False, True):
            assert ours.decode(ids, skips) == library.decode(ids, skips), text
    assert (ours.vocab_size, ours.longest_token) == (library.vocab_size, library.longest_token)
    size = ours.vocab_size + 3
    for number in range(size):
        token = library.token(number)
        assert ours.token(number) == token
        assert ours.token_bytes(number) == library.token_bytes(number)
        assert token is None or ours.token_id(token) == library.token_id(token)
    assert list(ours.ids_outside_text(size)) == list(library.ids_outside_text(size))


def test_random_tokenizers_have_the_ids_of_the_library(rng, tmp_path):
    kinds = []
    for number in range(scaled(200)):
        file = random_file(rng)
        try:
            library = Library.from_str(json.dumps(file))
        except Exception:  # the library's own; a merge of tokens that are not there
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(file))
        (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG))
        ours = Tokenizer.load(folder, tmp_path / "cache")
        kinds.append(type(ours._backend))
        # The library is not its own equal where a normalizer makes two added tokens one: which it finds is by chance.
        if isinstance(ours._backend, MappedBackend):
            assert_equal(ours, wrapped(library), random_texts(rng, 12))
    assert kinds.count(MappedBackend) > 0.4 * len(kinds) > 0


def test_texts_without_pauses_are_encoded_alike(rng, tmp_path):
    """One piece of 100,000 characters, by the heap."""
    for number in range(3):
        file = random_file(rng)
        file["pre_tokenizer"] = file["normalizer"] = None
        try:
            library = wrapped(Library.from_str(json.dumps(file)))
        except Exception:  # as above
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(file))
        ours = Tokenizer.load(folder, tmp_path / "cache")
        text = "".join(random_texts(rng, 3000))
        assert ours.encode(text) == library.encode(text)


def test_a_stream_is_decoded_alike(tmp_path):
    folder = write_folder(tmp_path / "model", byte_level_tokenizer())
    ours, library = mapped(folder, tmp_path / "cache"), Tokenizer.load(folder)
    for text in ("naïve 👩‍👩‍👧 नमस्ते", "a<tool call>b<|im_end|>"):
        streams = [IncrementalDetokenizer(tokenizer) for tokenizer in (ours, library)]
        for number in library.encode(text):
            assert streams[0].push([number]) == streams[1].push([number])
        assert streams[0].finish() == streams[1].finish()


def test_tokens_that_only_the_config_lists_are_added(tmp_path):
    folder = write_folder(tmp_path / "model", byte_level_tokenizer())
    size = byte_level_tokenizer().get_vocab_size()
    listed = {str(size): {"content": "<|new|>", "special": True}, str(size + 5): {"content": "<|gap|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    assert_equal(mapped(folder, tmp_path / "cache"), Tokenizer.load(folder), ["<|new|> a", "<|gap|>"])


def test_other_models_stay_with_the_library(tmp_path):
    folder = write_folder(tmp_path / "model", word_tokenizer())
    assert isinstance(Tokenizer.load(folder, tmp_path / "cache")._backend, LibraryBackend)


def test_the_file_is_made_once_and_again_for_other_sources(tmp_path):
    folder, cache = write_folder(tmp_path / "model", byte_level_tokenizer()), tmp_path / "cache"
    mapped(folder, cache)
    (first,) = cache.iterdir()
    made = first.stat().st_ino
    mapped(folder, cache)
    assert [path.stat().st_ino for path in cache.iterdir()] == [made]
    write_folder(folder, byte_level_tokenizer(350))
    assert mapped(folder, cache).vocab_size == byte_level_tokenizer(350).get_vocab_size()
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("damage", ["cut", "byte", "empty", "version", "readable"])
def test_a_damaged_file_is_made_anew(tmp_path, damage):
    folder, cache = write_folder(tmp_path / "model", byte_level_tokenizer()), tmp_path / "cache"
    want = mapped(folder, cache).encode("hello world")
    (path,) = cache.iterdir()
    content = bytearray(path.read_bytes())
    if damage == "byte":
        content[len(content) // 2] ^= 1
    elif damage == "version":
        content[8] += 1
    elif damage == "readable":
        os.chmod(path, 0o666)
    path.write_bytes(content[: {"cut": 1000, "empty": 0}.get(damage, len(content))])
    assert mapped(folder, cache).encode("hello world") == want
    MappedVocabulary(path)


def test_damage_behind_the_checksum_never_leaves_the_memory(tmp_path, rng, monkeypatch):
    """A file whose checksum was written anew, too, gives wrong ids at worst."""
    folder, cache = write_folder(tmp_path / "model", byte_level_tokenizer()), tmp_path / "cache"
    mapped(folder, cache)
    (path,) = cache.iterdir()
    content = path.read_bytes()
    monkeypatch.setattr(mapped_file.MappedVocabulary, "is_sound", lambda self: True)
    for _ in range(scaled(100)):
        damaged = bytearray(content)
        for at in rng.integers(16, len(content) - 4000, 30).tolist():
            damaged[at] = int(rng.integers(256))
        path.write_bytes(damaged)
        try:
            vocabulary = MappedVocabulary(path)
            encoder = vocabulary.encoder(vocabulary.recipe.prefix)
        except ValueError:
            continue
        encoder.encode("hello naïve world", [0], [(0, 17)])
        for number in range(500):
            vocabulary.native.token(number)


def test_no_cache_is_no_error(tmp_path, caplog):
    folder = write_folder(tmp_path / "model", byte_level_tokenizer())
    (tmp_path / "cache").write_text("a file")
    tokenizer = Tokenizer.load(folder, tmp_path / "cache")
    assert isinstance(tokenizer._backend, LibraryBackend)
    assert "cannot be kept" in caplog.text


def test_only_the_latest_files_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped_file, "_MOST_FILES", 2)
    for size in (300, 320, 340):
        open_vocabulary(write_folder(tmp_path / str(size), byte_level_tokenizer(size)), tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob(f"*{SUFFIX}"))) == 2


def test_threads_encode_side_by_side(tmp_path):
    folder = write_folder(tmp_path / "model", byte_level_tokenizer())
    tokenizer = mapped(folder, tmp_path / "cache")
    text = "naïve dog who liked to play " * 2000
    want, found = tokenizer.encode(text), []
    threads = [threading.Thread(target=lambda: found.append(tokenizer.encode(text))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [want] * 4
