"""Views of tensors: transposed and cut into rows, with shapes that tell the truth about what the file holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ralo.formats.mapped import StoredTensor
from ralo.formats.safetensors import open_file, write_file
from ralo.formats.tensor import RowSlice, Transposed, read, transpose

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, StoredTensor]:
    write_file(tmp_path / "a", {"matrix": VALUES, "vector": VALUES[0], "number": VALUES[0, 0].reshape(())})
    return open_file(tmp_path / "a")


def test_transposed_rows(stored: dict[str, StoredTensor]) -> None:
    turned = Transposed(stored["matrix"])
    assert turned.shape == (4, 3) and turned.dtype == "f32"
    np.testing.assert_array_equal(read(turned), VALUES.T)
    np.testing.assert_array_equal(turned.rows(1, 3), VALUES.T[1:3])
    assert transpose(turned) is stored["matrix"]


def test_row_slice(stored: dict[str, StoredTensor]) -> None:
    part = RowSlice(stored["matrix"], 1, 3)
    assert part.shape == (2, 4)
    np.testing.assert_array_equal(read(part), VALUES[1:3])
    np.testing.assert_array_equal(part.rows(1, 2), VALUES[2:3])
    np.testing.assert_array_equal(part.stored(), VALUES[1:3])


def test_shapes_show_what_is_missing(stored: dict[str, StoredTensor]) -> None:
    assert RowSlice(stored["matrix"], 2, 5).shape == (1, 4)
    assert RowSlice(stored["matrix"], 5, 8).shape == (0, 4)
    assert RowSlice(stored["number"], 0, 2).shape == (0,)
    assert Transposed(stored["vector"]).shape == (4,)
    assert Transposed(stored["number"]).shape == ()
