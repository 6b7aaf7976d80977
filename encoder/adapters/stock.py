"""`StockAdapter`: what adapters of transformers' own modules have in common, whatever their layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from encoder.adapters.base import EncoderModel
from encoder.adapters.stock_families import StockFamily

if TYPE_CHECKING:
    import torch

    from encoder.config import Precision


class StockAdapter:
    """A base: weights, config and precision are the same matter for all; the layout is the adapter's."""

    family: StockFamily
    encoder: str
    _config: dict[str, Any]

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Released names and shapes of the vision part."""
        from encoder.towers.stock import weight_shapes

        return weight_shapes(self.family)

    def checkpoint_config(self) -> dict[str, Any]:
        """The config it was made from."""
        return dict(self._config)

    def build(
        self,
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
        attention: str,
        precision: Precision,
    ) -> EncoderModel:
        """transformers' modules on the device. Raises ConfigError for a precision that they lack."""
        from encoder.precision import check_native

        check_native(precision, self.encoder)
        return self._model(weights, device, dtype, attention)

    def _model(
        self, weights: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype, attention: str
    ) -> EncoderModel:
        raise NotImplementedError
