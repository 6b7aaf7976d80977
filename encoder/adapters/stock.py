"""`StockAdapter`: what adapters of transformers' own modules have in common, whatever their layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from encoder.adapters.base import EncoderModel
from encoder.adapters.stock_families import StockFamily
from encoder.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from encoder.config import Precision


class StockAdapter:
    """A base: weights, config and precision are the same matter for all; the layout is the adapter's."""

    family: StockFamily
    encoder: str
    _config: dict[str, Any]

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Released names and shapes of the vision part. Raises ConfigError for sizes that the modules cannot have."""
        from encoder.towers.stock import weight_shapes

        try:
            return weight_shapes(self.family)
        except Exception as error:  # transformers checks what a config says in many ways, or not at all
            raise ConfigError(
                f"{self.encoder}: transformers cannot make its modules from what config.json says: "
                f"{type(error).__name__}: {' '.join(str(error).split())}"
            ) from error

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
        """transformers' modules on the device, in the native precision."""
        return self._model(weights, device, dtype, attention)

    def _model(
        self, weights: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype, attention: str
    ) -> EncoderModel:
        raise NotImplementedError
