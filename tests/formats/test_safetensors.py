"""The safetensors reader and writer: equal to the library on good files, one clear line on bad ones."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ralo.errors import FormatError, RaloError
from ralo.formats.safetensors import metadata, open_file, write_file

st = pytest.importorskip("safetensors")
st_numpy = pytest.importorskip("safetensors.numpy")


def entry(dtype: Any = "F32", shape: Any = (4,), span: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


def write_raw(path: Path, header: Any, data: bytes = bytes(16), length: int | None = None) -> Path:
    """A file with any header, valid or not; a str or bytes header goes in as it is."""
    text = header if isinstance(header, (str, bytes)) else json.dumps(header)
    text = text.encode() if isinstance(text, str) else text
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def refusal(path: Path) -> str:
    """The line with which the file is refused."""
    with pytest.raises(FormatError) as caught:
        open_file(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message and len(message) < 1000
    return message


ARRAYS: dict[str, NDArray[Any]] = {
    "odd": np.arange(5, dtype=np.int8),
    "floats": np.linspace(-2, 2, 96, dtype=np.float32).reshape(12, 8),
    "halves": np.linspace(-2, 2, 64).astype(np.float16).reshape(4, 16),
    "bits": np.arange(128, dtype=np.uint16).reshape(2, 64) + 0x3F00,
    "words": np.arange(-16, 16, dtype=np.int32),
    "bytes": np.arange(64, dtype=np.uint8),
    "shorts": np.arange(32, dtype=np.uint16),
    "one": np.array(3.5, np.float32),
    "none": np.zeros((0, 7), np.float32),
}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    st_numpy.save_file(ARRAYS, tmp_path / "a.safetensors", {"format": "pt"})
    found = open_file(tmp_path / "a.safetensors")
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        stored = found[name].stored()
        assert stored is not None and stored.dtype == array.dtype and found[name].shape == array.shape
        np.testing.assert_array_equal(stored, array)
        assert not stored.flags.writeable
    assert found["floats"].dtype == "f32" and found["odd"].dtype == "i8"
    assert metadata(tmp_path / "a.safetensors") == {"format": "pt"}


def test_library_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    strided: dict[str, NDArray[Any]] = {"strided": np.arange(64, dtype=np.float32).reshape(8, 8).T}
    write_file(path, ARRAYS | strided, {"note": "ñ\n"}, bf16=["bits"])
    found = dict(st.deserialize(path.read_bytes()))
    for name, array in (ARRAYS | strided).items():
        assert bytes(found[name]["data"]) == array.tobytes() and found[name]["shape"] == list(array.shape)
    assert found["bits"]["dtype"] == "BF16" and found["shorts"]["dtype"] == "U16"
    assert metadata(path) == {"note": "ñ\n"}
    assert open_file(path)["bits"].dtype == "bf16"
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_written_tensors_are_aligned(tmp_path: Path) -> None:
    write_file(tmp_path / "a", ARRAYS)
    found = open_file(tmp_path / "a")
    even = [name for name, array in ARRAYS.items() if array.nbytes % 64 == 0]
    assert [name for name in found if name in even and name != "none"] == [name for name in even if name != "none"]
    assert all(found[name].start % 64 == 0 for name in even)
    assert all(tensor.stored() is not None for tensor in found.values())


def test_rows_are_float32(tmp_path: Path) -> None:
    values = np.array([[0.0, -0.0, 1.5, -2.25], [np.inf, -np.inf, np.nan, 1e-40]], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    write_file(tmp_path / "a", {"f32": values, "f16": values.astype(np.float16), "bf16": bits}, bf16=["bf16"])
    found = open_file(tmp_path / "a")
    expected = {"f32": values, "f16": values.astype(np.float16).astype(np.float32)}
    expected["bf16"] = (bits.astype(np.uint32) << 16).view(np.float32)
    for name, want in expected.items():
        assert found[name].rows(0, 2).dtype == np.float32
        np.testing.assert_array_equal(found[name].rows(0, 2), want)
        np.testing.assert_array_equal(found[name].rows(1, 2), want[1:])
        assert found[name].rows(1, 1).shape == (0, 4)


def test_any_float16_bits_are_read_without_warning(tmp_path: Path) -> None:
    write_file(tmp_path / "a", {"w": np.arange(1 << 16, dtype=np.uint16).view(np.float16)})
    assert np.isnan(open_file(tmp_path / "a")["w"].rows(0, 1 << 16)).sum() == 2046


def test_misaligned_tensor_is_read_but_not_viewed(tmp_path: Path) -> None:
    values = np.arange(4, dtype=np.float32)
    text = json.dumps({"w": entry()})
    text += " " * (1 - len(text) % 4)  # data starts one byte after a multiple of 4
    tensor = open_file(write_raw(tmp_path / "a", text, values.tobytes()))["w"]
    assert tensor.stored() is None
    rows = tensor.rows(0, 4)
    assert rows.flags.aligned
    np.testing.assert_array_equal(rows, values)


def test_weights_must_be_floats(tmp_path: Path) -> None:
    write_file(tmp_path / "a", {"w": np.zeros((2, 2), np.int32), "x": np.zeros(2), "one": np.array(1, np.float32)})
    found = open_file(tmp_path / "a")
    for name in found:
        with pytest.raises(FormatError, match=f"tensor '{name}'"):
            found[name].rows(0, 1)


def test_eight_bit_floats_are_listed_only(tmp_path: Path) -> None:
    tensor = open_file(write_raw(tmp_path / "a", {"w": entry("F8_E4M3", [16])}))["w"]
    assert tensor.dtype == "f8_e4m3" and tensor.stored() is None


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's account of mapped pages")
def test_release_gives_pages_back(tmp_path: Path) -> None:
    values = np.ones((1024, 4096), np.float32)  # 16 MB
    write_file(tmp_path / "a", {"w": values})
    tensor = open_file(tmp_path / "a")["w"]

    def resident() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Rss:")).split()[1]) * 1024

    assert tensor.rows(0, 1024).sum() == values.size
    before = resident()
    tensor.release()
    assert before - resident() > 15_000_000
    np.testing.assert_array_equal(tensor.rows(0, 1024), values)


HUGE = 2**62
BAD_ENTRIES: dict[str, tuple[Any, str]] = {
    "not an object": ([1, 2], "not a JSON object"),
    "no dtype": ({"shape": [4], "data_offsets": [0, 16]}, "dtype None"),
    "unknown dtype": (entry("F33"), "dtype 'F33'"),
    "dtype not text": (entry(["F32"]), "dtype"),
    "shape not a list": (entry(shape=4), "shape"),
    "negative size": (entry(shape=[-4]), "shape"),
    "both negative": (entry(shape=[-2, -2]), "shape"),
    "boolean size": (entry(shape=[True, 4]), "shape"),
    "fractional size": (entry(shape=[4.0]), "shape"),
    "text size": (entry(shape=["4"]), "shape"),
    "huge size": (entry(shape=[10**30]), "shape"),
    "too many axes": (entry(shape=[1] * 70), "shape"),
    "overflowing product": (entry(shape=[HUGE, HUGE, 4]), "larger than any file"),
    "overflow hidden by zero": (entry(shape=[0, HUGE, HUGE], span=[0, 0]), "larger than any file"),
    "product wraps to right size": (entry(shape=[2**32, 2**32 + 4]), "larger than any file"),
    "no offsets": ({"dtype": "F32", "shape": [4]}, "data_offsets"),
    "three offsets": (entry(span=[0, 8, 16]), "data_offsets"),
    "boolean offset": (entry(span=[False, 16]), "data_offsets"),
    "negative offset": (entry(span=[-16, 0]), "data_offsets"),
    "reversed offsets": (entry(span=[16, 0]), "span -16 bytes"),
    "too few bytes": (entry(span=[0, 12]), "span 12 bytes"),
    "too many bytes": (entry(shape=[3]), "span 16 bytes"),
    "gap before": (entry(shape=[3], span=[4, 16]), "unused bytes before it"),
    "past the end": (entry(shape=[8], span=[0, 32]), "lacks 16 bytes"),
    "far past the end": (entry(shape=[2**40], span=[0, 2**42]), "lacks"),
}


@pytest.mark.parametrize("case", BAD_ENTRIES)
def test_bad_entry(tmp_path: Path, case: str) -> None:
    bad, reason = BAD_ENTRIES[case]
    message = refusal(write_raw(tmp_path / "a", {"w": bad}))
    assert "tensor 'w'" in message and reason in message


BAD_HEADERS: dict[str, tuple[Any, str]] = {
    "not JSON": ("{", "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', "not UTF-8"),
    "not an object": ([], "not a JSON object"),
    "empty": ("", "not valid JSON"),
    "NaN": ('{"w": NaN}', "NaN"),
    "repeated name": ('{"w": {}, "w": {}}', "'w' appears twice"),
    "repeated field": ('{"w": {"shape": [1], "shape": [4]}}', "'shape' appears twice"),
    "too deep": ('{"w":' + "[" * 100_000 + "]" * 100_000 + "}", "too deep"),
    "number too long": ('{"w": ' + "9" * 10_000 + "}", "not valid JSON"),
    "notes not an object": ({"__metadata__": 3}, "__metadata__"),
    "notes not text": ({"__metadata__": {"a": 3}}, "__metadata__"),
    "name too long": ({"w" * 1000: entry()}, "1000 characters"),
    "overlap": ({"v": entry(), "w": entry(shape=[2], span=[8, 16])}, "overlaps"),
    "same place": ({"v": entry(), "w": entry()}, "overlaps"),
    "bytes left over": ({"w": entry(shape=[3], span=[0, 12])}, "4 bytes after its last tensor"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_header(tmp_path: Path, case: str) -> None:
    header, reason = BAD_HEADERS[case]
    assert reason in refusal(write_raw(tmp_path / "a", header))


def test_names_with_newlines_stay_on_one_line(tmp_path: Path) -> None:
    refusal(write_raw(tmp_path / "a", {"a\nb\u2028\ud800": entry("\n")}))


@pytest.mark.parametrize(
    ("length", "reason"),
    [(10**9, "claims a header"), (2**64 - 1, "claims a header"), (99_000_000, "header are missing")],
)
def test_header_length_claims(tmp_path: Path, length: int, reason: str) -> None:
    assert reason in refusal(write_raw(tmp_path / "a", {}, length=length))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "whole", ARRAYS)
    whole = (tmp_path / "whole").read_bytes()
    for size in range(0, len(whole), 7):
        (tmp_path / "a").write_bytes(whole[:size])
        message = refusal(tmp_path / "a")
        if size > 64 + int.from_bytes(whole[:8], "little"):
            assert f"lacks {len(whole) - size} bytes" in message


def test_claims_allocate_nothing(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a", {"w": entry(shape=[2**50], span=[0, 2**52])})
    other = write_raw(tmp_path / "b", {}, length=99_999_999)
    tracemalloc.start()
    refusal(path)
    refusal(other)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent")
    assert "is a directory" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(tmp_path / "pipe")
    (tmp_path / "lfs").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "Git LFS pointer" in refusal(tmp_path / "lfs")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission(tmp_path: Path) -> None:
    (write_raw(tmp_path / "a", {})).chmod(0)
    assert "Permission denied" in refusal(tmp_path / "a")


def test_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken").mkdir()
    for path in (tmp_path / "absent" / "a", tmp_path / "file" / "a", tmp_path / "taken"):
        with pytest.raises(RaloError, match="cannot be written"):
            write_file(path, ARRAYS)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "taken"]
    with pytest.raises(ValueError, match="uint16"):
        write_file(tmp_path / "a", {"w": np.zeros(2, np.float32)}, bf16=["w"])
