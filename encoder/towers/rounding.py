"""Rounding weights to e4m3 such that the errors cancel on the rows they will meet: GPTQ (Frantar et al. 2022).

Columns are rounded one after another, and what a column got wrong is made good in those to come, as far as rows
correlate: with H the covariance of the rows and U the upper Cholesky factor of its inverse, an error e of column j is
answered by - e U[j, k] / U[j, j] in column k. Many layers of one shape go together, a column of all at a time.
"""

# Shapes: L layers, N output width, K input width.

from __future__ import annotations

import torch
from torch import Tensor

from encoder.kernels.fp8 import round_8

BLOCK = 128  # columns between which errors pass at once; those behind hear of them a block at a time
DAMPING = 0.01


def round_weights(weight_LNK: Tensor, covariance_LKK: Tensor) -> Tensor:
    """e4m3 weights near `weight_LNK` (float32, scaled already) in what they do to rows of these covariances.

    Exact where H is a multiple of the identity: then each weight goes to its nearest number.
    """
    num_columns = weight_LNK.shape[2]
    upper_LKK = _inverse_factor(covariance_LKK)
    weight_LNK = weight_LNK.clone()
    rounded_LNK = torch.empty_like(weight_LNK, dtype=torch.float8_e4m3fn)
    for begin in range(0, num_columns, BLOCK):
        end = min(begin + BLOCK, num_columns)
        block_LNB = weight_LNK[:, :, begin:end]
        errors_LNB = torch.empty_like(block_LNB)
        for column in range(end - begin):
            row_LB = upper_LKK[:, begin + column, begin:end]
            wanted_LN = block_LNB[:, :, column]
            nearest_LN = round_8(wanted_LN)
            rounded_LNK[:, :, begin + column] = nearest_LN
            errors_LNB[:, :, column] = (wanted_LN - nearest_LN.float()) / row_LB[:, column, None]
            block_LNB[:, :, column + 1 :] -= errors_LNB[:, :, column, None] * row_LB[:, None, column + 1 :]
        weight_LNK[:, :, end:] -= errors_LNB @ upper_LKK[:, begin:end, end:]
    return rounded_LNK


def _inverse_factor(covariance_LKK: Tensor) -> Tensor:
    damped_LKK = covariance_LKK.clone()
    diagonal_LK = damped_LKK.diagonal(dim1=1, dim2=2)
    diagonal_LK += DAMPING * diagonal_LK.mean(1, keepdim=True) + 1e-12
    inverse_LKK = torch.cholesky_inverse(torch.linalg.cholesky(damped_LKK))
    upper_LKK: Tensor = torch.linalg.cholesky(inverse_LKK, upper=True)
    return upper_LKK
