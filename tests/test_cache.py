from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from lintgpu.cache import Cache, default_folder, key_of
from lintgpu.workload import Workload


@dataclass(frozen=True)
class Value:
    text: str
    numbers: tuple[int, ...] = ()


def test_a_value_comes_back_equal(tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.write_text("x = 1\n")
    cache = Cache(tmp_path / "cache")
    cache.put(key_of("a"), [str(source)], Value("ä", (1, 2)))
    assert cache.get(key_of("a"), Value) == Value("ä", (1, 2))
    assert cache.get(key_of("b"), Value) is None


def test_a_changed_or_missing_file_is_a_miss_whatever_its_date(tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.write_text("x = 1\n")
    cache = Cache(tmp_path / "cache")
    cache.put(key_of("a"), [str(source)], Value("v"))
    stat = source.stat()
    source.write_text("x = 2\n")
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert cache.get(key_of("a"), Value) is None
    source.write_text("x = 1\n")
    assert cache.get(key_of("a"), Value) == Value("v")
    source.unlink()
    assert cache.get(key_of("a"), Value) is None


@pytest.mark.parametrize("content", [b"", b"{", b'{"files": [], "value": {"text": 1}}', b"\xff" * 100])
def test_a_damaged_entry_is_a_miss(tmp_path: Path, content: bytes) -> None:
    cache = Cache(tmp_path)
    cache.put(key_of("a"), [], Value("v"))
    (entry,) = tmp_path.glob("*/*.json")
    entry.write_bytes(content)
    assert cache.get(key_of("a"), Value) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    cache = Cache(blocked)
    cache.put(key_of("a"), [], Value("v"))
    assert cache.get(key_of("a"), Value) is None
    assert Cache(None).get(key_of("a"), Value) is None


def test_every_part_of_the_question_counts() -> None:
    keys = {key_of("t", Workload()), key_of("t", Workload(batch=2)), key_of("u", Workload()), key_of("t", Workload(), {"d": 8})}
    assert len(keys) == 4
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})


def test_the_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINTGPU_CACHE_DIR", str(tmp_path / "here"))
    assert default_folder() == tmp_path / "here"
    monkeypatch.delenv("LINTGPU_CACHE_DIR")
    assert default_folder().name == "lintgpu"


def _write_many(folder: Path, number: int) -> None:
    cache = Cache(folder)
    for turn in range(30):
        cache.put(key_of("shared"), [], Value("x" * 20000, (number, turn)))
        found = cache.get(key_of("shared"), Value)
        assert found is not None
        assert len(found.text) == 20000


def test_sixteen_writers_at_once_leave_whole_entries(tmp_path: Path) -> None:
    processes = [multiprocessing.get_context("fork").Process(target=_write_many, args=(tmp_path, n)) for n in range(16)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 16
    assert [path.suffix for path in tmp_path.glob("*/*")] == [".json"]


@pytest.mark.skipif(os.name != "posix", reason="kill -9")
def test_a_killed_writer_leaves_no_broken_entry(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom lintgpu.cache import Cache, key_of\n"
        "print('go', flush=True)\nwhile True:\n    Cache(Path(sys.argv[1])).put(key_of('k'), [], {'text': 'y' * 500000})\n"
    )
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.05)
            process.send_signal(signal.SIGKILL)
        found = Cache(tmp_path).get(key_of("k"), dict)
        assert found is None or found == {"text": "y" * 500000}
    Cache(tmp_path).put(key_of("k"), [], {"text": "z"})
    assert Cache(tmp_path).get(key_of("k"), dict) == {"text": "z"}


def test_the_oldest_entries_go_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    keys = [f"aa{number:062d}" for number in range(70)]
    for number, key in enumerate(keys):
        cache.put(key, [], Value(str(number)))
        os.utime(tmp_path / "aa" / f"{key[2:]}.json", (number, number))
    cache.put(f"aa{70:062d}", [], Value("newest"))
    assert cache.get(keys[0], Value) is None
    assert cache.get(keys[-1], Value) == Value("69")
