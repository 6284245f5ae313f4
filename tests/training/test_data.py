import hashlib
import re
import subprocess
import sys

import numpy as np
import pytest

from zbpp.core import RequestError
from zbpp.training.data import Corpus, is_held_out, load_corpus


@pytest.fixture(scope="module")
def library() -> Corpus:
    return load_corpus(seq=128)


@pytest.fixture
def folder(tmp_path):
    """Forty files of one repeated character each; names decide what is held out."""
    for i in range(40):
        (tmp_path / f"file_{i}.txt").write_text(chr(40 + i) * 100)
    return tmp_path


def held_out_characters(n_files):
    return {40 + i for i in range(n_files) if is_held_out(f"file_{i}.txt")}


def test_the_library_is_large_enough_and_a_twentieth_is_held_out(library):
    n_bytes = len(library.training) + len(library.validation)
    assert n_bytes > 5_000_000
    assert library.n_files > 300
    assert 0.02 < len(library.validation) / n_bytes < 0.10


def test_the_library_has_no_tests_and_no_installed_packages(library):
    text = library.training.tobytes() + library.validation.tobytes()
    assert b"class OrderedDict(dict):" in text  # collections: positive control
    assert b"class LlamaForCausalLM" not in text
    assert b"regression test for SF bug #695250" not in text


def test_no_held_out_file_is_trained_on(folder):
    corpus = load_corpus(folder, seq=10)
    expected = held_out_characters(40)
    assert expected, "choose other names: nothing is held out"
    assert set(corpus.validation) - {0} == expected
    assert set(corpus.training) - {0} == set(range(40, 80)) - expected


def test_more_files_move_no_file_to_the_other_side(folder):
    before = load_corpus(folder, seq=10)
    for i in range(40, 80):
        (folder / f"file_{i}.txt").write_text(chr(40 + i) * 100)
    after = load_corpus(folder, seq=10)
    assert set(before.validation) <= set(after.validation)
    assert set(before.training) <= set(after.training)
    assert before.sha256 != after.sha256


def test_the_choice_of_files_is_known():
    """A changed rule would mix training and validation text of older runs."""
    chosen = [i for i in range(200) if is_held_out(f"package/module_{i}.py")]
    assert chosen == [2, 23, 43, 91, 98, 109, 110, 129, 141, 142, 159, 165]


def test_the_hash_covers_the_text_in_the_order_of_paths(tmp_path):
    (tmp_path / "b.txt").write_text("s" * 30)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_text("f" * 30)
    (tmp_path / ".hidden").write_text("not read")
    (tmp_path / "empty.txt").write_text("")
    corpus = load_corpus(tmp_path, seq=0)
    assert corpus.n_files == 2
    assert corpus.sha256 == hashlib.sha256(b"f" * 30 + b"\0" + b"s" * 30).hexdigest()
    assert corpus.sha256 in corpus.describe()
    assert re.search(r"2 files, 61 bytes .*Python 3\.", corpus.describe())


def test_of_a_single_file_the_end_is_held_out(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(range(100)) * 10)
    corpus = load_corpus(path, seq=10)
    assert (len(corpus.training), len(corpus.validation)) == (950, 50)
    assert corpus.validation.tolist() == list(range(50, 100))


def test_of_few_files_the_end_is_held_out_if_no_name_is(tmp_path):
    names = [f"{i}.txt" for i in range(20) if not is_held_out(f"{i}.txt")][:2]
    for name in names:
        (tmp_path / name).write_text("x" * 100)
    assert len(load_corpus(tmp_path, seq=5).validation) == 10


def test_a_batch_depends_on_seed_and_step_alone(library):
    def batch(**changed):
        choice = {"seed": 1, "step": 2, "windows": 4, "seq": 16} | changed
        return library.training_batch(**choice)

    inputs, targets = batch()
    np.random.default_rng(0).random(10)  # nobody else's random numbers matter
    assert np.array_equal(inputs, batch()[0]) and np.array_equal(targets, batch()[1])
    assert not np.array_equal(inputs, batch(step=3)[0])
    assert not np.array_equal(inputs, batch(seed=2)[0])


def test_a_batch_holds_windows_of_the_text_and_targets_are_one_byte_later(library):
    inputs, targets = library.training_batch(seed=0, step=0, windows=8, seq=64)
    assert inputs.shape == targets.shape == (8, 64)
    assert inputs.dtype == targets.dtype == np.int64
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    text = library.training.tobytes()
    for window in inputs:
        assert bytes(window.astype(np.uint8)) in text


def test_windows_reach_both_ends_of_the_text():
    text = np.arange(4, dtype=np.uint8)
    corpus = Corpus("tiny", 1, "", text, text)
    inputs, targets = corpus.training_batch(seed=0, step=0, windows=100, seq=3)
    assert set(inputs[:, 0]) == {0} and set(targets[:, -1]) == {3}
    inputs, _ = corpus.training_batch(seed=0, step=0, windows=100, seq=2)
    assert set(inputs[:, 0]) == {0, 1}
    inputs, targets = corpus.validation_batch(windows=2, seq=1)
    assert inputs.tolist() == [[0], [2]] and targets.tolist() == [[1], [3]]


def test_validation_windows_are_always_the_same(library):
    one = library.validation_batch(windows=8, seq=32)
    two = library.validation_batch(windows=8, seq=32)
    assert np.array_equal(one[0], two[0]) and np.array_equal(one[1], two[1])
    assert len(np.unique(one[0], axis=0)) == 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist; give --data a text file"),
        ("", "holds no text; give --data a text file"),
        ("x" * 500, "leaves 25 bytes for validation; --seq 128 needs at least 129"),
    ],
)
def test_missing_empty_and_short_text_is_refused(tmp_path, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RequestError, match=re.escape(message)):
        load_corpus(path, seq=128)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(RequestError, match="holds no text"):
        load_corpus(tmp_path, seq=128)


def test_the_loader_needs_no_torch():
    code = "import sys, zbpp.training.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
