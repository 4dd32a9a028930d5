"""Numbers kept on disk. Reference: the numbers themselves; no file remains."""

import numpy as np

from megatron_parm.data.growing_column import GrowingColumn


def test_numbers_come_back_in_order_and_no_file_is_seen(tmp_path) -> None:
    column = GrowingColumn(tmp_path, np.dtype("<i4"))
    numbers = np.arange(3_000_000, dtype=np.int64)
    for part in np.array_split(numbers, 7):
        column.add(part)
    column.add(numbers[:0])
    parts = list(column.parts())
    assert len(column) == 3_000_000 and len(parts) == 3
    assert np.array_equal(np.concatenate(parts), numbers) and parts[0].dtype == np.dtype("<i4")
    assert list(tmp_path.iterdir()) == []
    column.close()
