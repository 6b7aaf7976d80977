"""Position ids against the specification's rule and its table of exceptions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from encoder.adapters.minicpmv_positions import patch_indices, position_ids

# Where the float32 product falls short of `70 * i // n`, for every n up to 70 (i -> id), from the specification.
EXCEPTIONS = {
    25: {5: 13, 10: 27, 15: 41, 20: 55},
    49: {7: 9, 14: 19, 28: 39, 35: 49},
    50: {5: 6, 10: 13, 15: 20, 20: 27, 30: 41, 40: 55},
    55: {11: 13, 22: 27, 33: 41, 44: 55},
}


def bucket(n: int) -> torch.Tensor:
    """The rule as the specification words it, in torch."""
    boundaries = torch.arange(1 / 70, 1.0, 1 / 70)
    fractions = torch.arange(n, dtype=torch.float32) * torch.tensor(1 / n, dtype=torch.float32)
    return torch.bucketize(fractions.clamp(max=1 - 1e-6), boundaries, right=True)


@pytest.mark.parametrize("n", range(1, 71))
def test_buckets_are_the_quotient_but_for_the_exceptions(n: int) -> None:
    expected = [EXCEPTIONS.get(n, {}).get(i, 70 * i // n) for i in range(n)]
    assert position_ids(1, n).tolist() == expected
    assert position_ids(n, 1).tolist() == [70 * row for row in expected]


def test_ids_follow_the_rule_for_every_grid_up_to_256() -> None:
    buckets = {n: bucket(n).numpy() for n in range(1, 257)}
    for rows in range(1, 257):
        for columns in range(1, 257):
            expected = (70 * buckets[rows][:, None] + buckets[columns]).ravel()
            assert np.array_equal(position_ids(rows, columns), expected), (rows, columns)


@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (24, 43), (5, 200), (1, 1)])
def test_2_5_numbers_the_patches_of_a_slice_as_one_row(rows: int, columns: int) -> None:
    ids = position_ids(rows, columns, one_row=True)
    assert np.array_equal(ids, bucket(rows * columns).numpy())
    assert ids.max() < 70


def test_resampler_coordinates_are_raw() -> None:
    _, rows, columns = patch_indices((1, 5, 200), 70, False)
    assert rows.tolist() == [row for row in range(5) for _ in range(200)]
    assert columns.tolist() == list(range(200)) * 5
