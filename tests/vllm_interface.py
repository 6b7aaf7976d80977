"""What `cluster/vllm_ec_connector.py` uses of vLLM, for where vLLM is not installed: names and signatures alone.

They are those of vLLM (Apache-2.0, github.com/vllm-project/vllm): `vllm/distributed/ec_transfer/ec_connector/base.py`,
`vllm/config/ec_transfer.py` and `vllm/platforms`. The bodies are ours.
"""

from __future__ import annotations

import enum
import sys
from abc import ABC, abstractmethod
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class ECConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class ECConnectorMetadata(ABC):  # noqa: B024
    pass


class ECConnectorBase(ABC):
    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        self._connector_metadata: ECConnectorMetadata | None = None
        self._vllm_config, self._role = vllm_config, role
        self._is_producer = vllm_config.ec_transfer_config.is_ec_producer
        self._is_consumer = vllm_config.ec_transfer_config.is_ec_consumer

    @property
    def is_consumer(self) -> bool:
        return bool(self._is_consumer)

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def _get_connector_metadata(self) -> ECConnectorMetadata:
        assert self._connector_metadata is not None
        return self._connector_metadata

    @abstractmethod
    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None: ...

    @abstractmethod
    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None: ...

    @abstractmethod
    def has_cache_item(self, identifier: str) -> bool: ...

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        return True

    @abstractmethod
    def update_state_after_alloc(self, request: Any, index: int) -> None: ...

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata: ...


def modules() -> dict[str, ModuleType]:
    """The modules that the connector imports, to be put into `sys.modules`."""
    path, made = "", {}
    for part in ("vllm", "distributed", "ec_transfer", "ec_connector", "base"):
        path = f"{path}.{part}".lstrip(".")
        made[path] = ModuleType(path)
        made[path].__path__ = []  # type: ignore[attr-defined]
    base = sys.modules[__name__]
    for name in ("ECConnectorBase", "ECConnectorMetadata", "ECConnectorRole"):
        setattr(made[path], name, getattr(base, name))
    platforms = made["vllm.platforms"] = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(  # type: ignore[attr-defined]
        is_cuda_alike=lambda: False, device_type="cpu"
    )
    return made


def config(*, dtype: torch.dtype = torch.bfloat16, **extra: Any) -> Any:
    """A `VllmConfig` as far as a connector reads it."""
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype),
        ec_transfer_config=SimpleNamespace(
            is_ec_producer=False,
            is_ec_consumer=True,
            get_from_extra_config=lambda key, default: extra.get(key, default),
        ),
    )
