"""`EncpoolECConnector`: vLLM takes encoder outputs from a pool's caches instead of running its own vision tower.

    vllm serve MODEL --ec-transfer-config '{"ec_connector": "EncpoolECConnector", "ec_role": "ec_consumer",
        "ec_connector_module_path": "cluster.vllm_ec_connector", "ec_connector_extra_config": {"pool": "default"}}'

Encode the picture in the pool first, then send it to vLLM with the hexadecimal digest of its bytes as `uuid`, which
`to_vllm` and `workers.cache_keys.content_digest` give: vLLM asks under that name, as long as it has its processor cache
or prefix caching on, and no `mm_processor_kwargs` come with the request. What the pool does not have, or has in another
number of rows than vLLM expects (other limits of slices or pixels, a picture turned by EXIF), vLLM encodes itself.

Only the scheduler's side talks to the pool. It takes the rows when vLLM asks whether they exist and sends them along
with the step's metadata, so that an eviction in between cannot leave a promise unkept. Written against
`ECConnectorBase` as vLLM publishes it (vllm/distributed/ec_transfer/ec_connector/base.py: `has_cache_item` of one
identifier, `ensure_cache_available` where there is one).
"""

# Shapes: T rows of an item, E width of a token.

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

from encoder.errors import EncodeError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

DIGEST_CHARS = 32
MAX_HELD = 256  # items taken from the pool for requests that the scheduler has not placed yet
MAX_EXPECTED = 4096
FORGET_MISS_S = 1.0  # how soon the pool is asked again for what it did not have


class Finder(Protocol):
    """The way to the pool: `cluster.lookup.Lookup`."""

    def find(self, digests: Sequence[bytes], *, scope: str = "") -> list[torch.Tensor | None]:
        """Rows of each content, or None."""


@dataclass
class EncpoolECMetadata(ECConnectorMetadata):
    """What a step needs: rows by vLLM's identifier. On the CPU; it is pickled on its way to the workers."""

    rows_TE: dict[str, torch.Tensor] = field(default_factory=dict)


class EncpoolECConnector(ECConnectorBase):
    """Consumer side. One in vLLM's scheduler, one in each of its workers."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: ECConnectorRole,
        *,
        find: Finder | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connects the scheduler's side to the pool. `find` is for those who bring their own connection.

        `ec_connector_extra_config`: `pool` (its name, "default"), `ray_address`, `scope`, `timeout_s` of a look-up.

        Raises WorkerStartError when there is no such pool.
        """
        super().__init__(vllm_config=vllm_config, role=role)
        extra = vllm_config.ec_transfer_config.get_from_extra_config
        self._dtype: torch.dtype = vllm_config.model_config.dtype
        self._scope: str = extra("scope", "")
        self._now_s = now_s
        self._find = find
        self._held_TE: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._missed_s: dict[str, float] = {}
        self._num_expected: OrderedDict[str, int] = OrderedDict()  # rows, of items of requests that came
        self._to_load: dict[str, torch.Tensor] = {}
        if find is None and role is ECConnectorRole.SCHEDULER:
            from cluster.lookup import Lookup

            self._find = Lookup.connect(
                extra("pool", "default"), ray_address=extra("ray_address", None), timeout_s=extra("timeout_s", 1.0)
            )

    # --- in the scheduler ----------------------------------------------------------------------------------------

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """A request comes: how many rows each of its items has in vLLM. Nothing is in transit, ever.

        Versions of vLLM without this call meet a wrong number in `update_state_after_alloc`, where it is an error.
        """
        for index, feature in enumerate(request.mm_features):
            self._num_expected[feature.identifier] = request.get_num_encoder_embeds(index)
            self._num_expected.move_to_end(feature.identifier)
        while len(self._num_expected) > MAX_EXPECTED:
            self._num_expected.popitem(last=False)
        return True

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the pool has it, as vLLM needs it; then its rows are here already."""
        if identifier in self._held_TE:
            return True
        digest = as_digest(identifier)
        if digest is None or self._find is None:
            return False
        now_s = self._now_s()
        if now_s - self._missed_s.get(identifier, float("-inf")) < FORGET_MISS_S:
            return False
        (rows_TE,) = self._find.find([digest], scope=self._scope)
        num_expected = self._num_expected.get(identifier)
        if rows_TE is not None and num_expected not in (None, len(rows_TE)):
            logger.warning("%s", _other_number(identifier, len(rows_TE), num_expected))
            rows_TE = None
        if rows_TE is None:
            if len(self._missed_s) >= MAX_HELD:
                self._missed_s.clear()
            self._missed_s[identifier] = now_s
            return False
        self._held_TE[identifier] = rows_TE
        if len(self._held_TE) > MAX_HELD:
            self._held_TE.popitem(last=False)
        return True

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """vLLM has made room for the item: its rows go with the next step.

        vLLM calls this too for what it encodes itself. Raises EncodeError when the rows are not as many as it expects.
        """
        identifier = request.mm_features[index].identifier
        if not self.is_consumer or not self.has_cache_item(identifier):
            return
        rows_TE = self._held_TE.pop(identifier)
        num_expected = request.get_num_encoder_embeds(index)
        if len(rows_TE) != num_expected:
            raise EncodeError(_other_number(identifier, len(rows_TE), num_expected))
        self._to_load[identifier] = rows_TE

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> EncpoolECMetadata:
        """The rows that this step's workers need."""
        rows_TE, self._to_load = self._to_load, {}
        return EncpoolECMetadata(rows_TE)

    # --- in the workers ------------------------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Put the step's rows on the device, where vLLM looks for encoder outputs."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, EncpoolECMetadata)
        for identifier, rows_TE in metadata.rows_TE.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = rows_TE.to(device=current_device(), dtype=self._dtype)
                logger.debug("loaded %d rows for %s", len(rows_TE), identifier)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Nothing: the pool keeps what it encodes itself."""


def _other_number(identifier: str, num_rows: int, num_expected: int | None) -> str:
    return (
        f"the pool has {num_rows} rows for {identifier}, vLLM expects {num_expected}; give both the same "
        f"model and the same limits of slices or pixels"
    )


def as_digest(identifier: str) -> bytes | None:
    """The content digest that an identifier is, or None for one of vLLM's own hashes."""
    if len(identifier) != DIGEST_CHARS:
        return None
    try:
        return bytes.fromhex(identifier)
    except ValueError:
        return None


def current_device() -> torch.device:
    """The device of this vLLM worker; a bare "cuda" would be the first one for all of them."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike():
        return torch.device(current_platform.device_type, torch.cuda.current_device())
    return torch.device(current_platform.device_type)
