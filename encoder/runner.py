"""`EncoderRunner`: segments in, tokens out, by replay or eagerly. One thread owns it.

On CUDA a launch passes through three streams: its inputs are copied in while the launch before it computes, and its
output is copied out while the next one computes. A ring of pinned host buffers makes those copies asynchronous.
"""

# Shapes: T output rows of a run, E width of a token.

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from encoder.adapters.base import EncoderAdapter, EncoderModel, Segment
from encoder.adapters.registry import resolve_model
from encoder.arena import ArenaLayout
from encoder.attention import capturable, choose_backend
from encoder.budgets import graph_keys
from encoder.config import EncoderConfig
from encoder.cost_book import CostBook
from encoder.graphs import CaptureReport, GraphMemory, GraphSet
from encoder.helpers import MAX_COPIERS, helped_by
from encoder.measuring import measure_eager
from encoder.packing import LOOK_AHEAD, EagerCost, GraphTable, GraphView, Replay, plan_replay
from encoder.precision import check_precision, resolve_dtype
from encoder.runner_stats import RunnerStats
from encoder.staging import Slot, StagingRing
from encoder.types import AxisKeys, GraphKey, MissReason, SegmentShape
from encoder.weights import obtain_tensors, weights_digest

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Launch:
    """A run under way; `EncoderRunner.finish` ends it."""

    replay: Replay
    token_counts: list[int]
    num_patches: int
    slot: Slot
    elapsed_ms: float = 0.0  # device time; set by `finish`

    @property
    def done(self) -> bool:
        """Whether `finish` would return at once."""
        return self.slot.returned()


class EncoderRunner:
    """Holds one encoder and its graphs on one device. Every call comes from the same thread."""

    def __init__(
        self,
        adapter: EncoderAdapter,
        model: EncoderModel,
        config: EncoderConfig,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.adapter, self.config, self.device, self.dtype = adapter, config, device, dtype
        numbers = str(dtype).removeprefix("torch.") + ("" if config.precision == "native" else f"+{config.precision}")
        self.encoder_id = f"{adapter.encoder}@{numbers}"
        self.weights_digest = b""  # identity of a checkpoint's weights; seeded ones have none
        self.stats = RunnerStats()
        self._model = model
        self._book = CostBook()
        self._graphs = GraphSet(adapter, model, device, self._book)
        self._ring = StagingRing(device, num_slots=3)
        self._copiers = ThreadPoolExecutor(MAX_COPIERS - 1, thread_name_prefix="copy")
        self._eager: EagerCost | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # weights were written on another stream than runs read them on
        self._update_table()

    @classmethod
    def from_config(cls, config: EncoderConfig, device: str) -> EncoderRunner:
        """Load the weights onto `device` ("cpu", "cuda:0"); `capture` comes after it.

        Raises:
            ConfigError: a model, layout or backend that cannot work.
            WeightsError: the checkpoint lacks tensors or has others.
        """
        target = torch.device(device)
        dtype = resolve_dtype(config.dtype, target)
        source = resolve_model(config.model)
        adapter = source.adapter(config)
        backend = choose_backend(config.attention, target, dtype)
        check_precision(config.precision, target, dtype)
        weights = obtain_tensors(source.snapshot, adapter.weight_shapes(), seed=config.seed)
        with torch.inference_mode():
            model = adapter.build(weights, target, dtype, backend, config.precision)
        runner = cls(adapter, model, config, target, dtype)
        runner.weights_digest = weights_digest(source.snapshot)
        return runner

    @torch.inference_mode()
    def capture(self, keys: Sequence[GraphKey] | None = None) -> CaptureReport:
        """Capture the configured graph set, or the given keys on top of what is held.

        Raises:
            ConfigError: see `graph_keys`.
        """
        if keys is None:
            keys = graph_keys(self.adapter, self.config, self.encoder_id, self.device.type) if self._captures() else []
        report = self._graphs.capture(keys)
        if self._graphs.graphs and self.device.type == "cuda":  # the static backend exists to be exercised, not to win
            axis_keys = next(iter(self._graphs.graphs)).axis_keys
            self._eager = measure_eager(self.adapter, self._model, self.device, axis_keys, self.config.eager_patches)
        self._update_table()
        return report

    def _captures(self) -> bool:
        backend = choose_backend(self.config.attention, self.device, self.dtype)
        if self.config.graphs and not capturable(backend, self.device):
            logger.warning("attention backend %r cannot be captured: everything runs eagerly", backend)
            return False
        return self.config.graphs

    @torch.inference_mode()
    def add(self, key: GraphKey) -> str | None:
        """Capture one graph more (or anew, one that is held); None, or why it could not be captured.

        No launch may be under way. What it costs is measured only if it was never captured before.
        """
        if key.encoder != self.encoder_id:
            return f"ConfigError: this worker encodes with {self.encoder_id}"
        self._graphs.add(key)
        self._update_table()
        return self._graphs.failed.get(key)

    def drop(self, key: GraphKey) -> None:
        """Release a graph; its segments go to the next larger one, or run eagerly. No launch of it may be under way."""
        self._graphs.drop(key)
        self._update_table()

    def start_pool(self) -> None:
        """Let graphs captured from now on share scratch memory among themselves only; see `outside_pool`."""
        self._graphs.start_pool()

    def outside_pool(self) -> list[GraphKey]:
        """Graphs that share older scratch memory, and keep it from returning until they are captured anew."""
        return self._graphs.outside_pool()

    def graph_memory(self) -> GraphMemory:
        """What the graphs take and what the device has left."""
        return self._graphs.memory()

    def known_graphs(self) -> tuple[GraphView, ...]:
        """Every graph that was ever captured here, held or not, with what is known of its cost."""
        return self._graphs.known_views()

    def forget_stats(self) -> None:
        """Count from now on: what came before was no traffic."""
        self.stats = RunnerStats()
        self._book.forget_errors()

    @property
    def eager(self) -> EagerCost | None:
        """What eager runs take now; None where they were not measured."""
        return self._table.eager

    @property
    def cost_error(self) -> float | None:
        """Median of |predicted - real| / real of the latest runs' times; None: too few runs."""
        return self._book.error

    def _update_table(self) -> None:
        missing: dict[AxisKeys, MissReason] = dict.fromkeys(self._graphs.failed_axis_keys(), MissReason.CAPTURE_FAILED)
        self._table = GraphTable(
            self._graphs.views(),
            self.adapter.axis_choices,
            self.adapter.measure,
            missing,
            self._eager,
            self._book,
        )

    def graph_views(self) -> tuple[GraphView, ...]:
        """The graphs held, with their measured costs."""
        return self._table.views

    def plan(self, pending: Sequence[SegmentShape]) -> Replay:
        """Which of the pending segments, oldest first, form the next replay."""
        return plan_replay(pending, self._table, eager_patches=self.config.eager_patches)

    @torch.inference_mode()
    def submit(self, segments: Sequence[Segment], replay: Replay) -> Launch:
        """Start a run of these segments (those that `replay.taken` chose) and return before it ends.

        At most three launches may be under way; finish the oldest one first.
        """
        shapes = [segment.shape for segment in segments]
        if replay.key is None:
            axis_keys, capacity = self.adapter.exact(shapes)
            layout = ArenaLayout.of(self.adapter.inputs(axis_keys, capacity))
        else:
            graph = self._graphs.graphs[replay.key]
            axis_keys, capacity, layout = graph.key.axis_keys, graph.capacity, graph.layout
        num_tokens = sum(shape.num_tokens for shape in shapes)
        out_bytes = num_tokens * self.adapter.hidden_size * self.dtype.itemsize
        is_alone = self._ring.is_idle
        with self._ring.slot(layout.num_bytes, out_bytes) as slot:
            # While nothing computes, the copy is part of somebody's latency; else it happens beside a run.
            with helped_by(self._copiers if is_alone else None):
                rows = self.adapter.fill(slot.arrays(layout), segments, axis_keys, capacity)
            used_bytes = layout.used_bytes(rows)
            with self._ring.computing(slot, used_bytes):
                if replay.key is None:
                    self._model.reserve(capacity.longest)
                    block = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self.device)
                    block[:used_bytes].copy_(slot.device_in[:used_bytes])
                    output_TE = self._model.forward(layout.views(block), axis_keys, capacity)
                else:
                    graph.block[:used_bytes].copy_(slot.device_in[:used_bytes])
                    graph.replay()
                    output_TE = graph.output_TE
                slot.keep(output_TE[:num_tokens])
        self.stats.count(replay, shapes, capacity)
        return Launch(
            replay=replay,
            token_counts=[shape.num_tokens for shape in shapes],
            num_patches=sum(shape.num_patches for shape in shapes),
            slot=slot,
        )

    @torch.inference_mode()
    def finish(self, launch: Launch) -> list[torch.Tensor]:
        """Wait for a launch; one CPU tensor `[num_tokens, E]` a segment, which nothing overwrites.

        Tensors of one launch may share a block of page-locked memory, lent until the last of them is gone. Of such
        blocks there is a gigabyte at most; then outputs are copied to memory of their own.
        """
        num_rows = sum(launch.token_counts)
        with self._ring.returning(launch.slot):
            out_TE = launch.slot.wait(self.dtype, (num_rows, self.adapter.hidden_size))
            launch.elapsed_ms = launch.slot.elapsed_ms()
        if launch.replay.key is not None:
            use = self.stats.uses[launch.replay.key]
            use.predicted_ms += self._table.correct(launch.replay.key, launch.elapsed_ms, launch.num_patches)
            use.real_ms += launch.elapsed_ms
        else:
            self.stats.eager_ms += launch.elapsed_ms
            self._table.correct_eager(launch.elapsed_ms, launch.num_patches)
        return list(out_TE.split(launch.token_counts))

    def encode(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        """Every segment's tokens, in order: plan, submit and finish until all are done."""
        return self.encode_traced(segments)[0]

    def encode_traced(self, segments: Sequence[Segment]) -> tuple[list[torch.Tensor], list[Launch]]:
        """`encode`, and the launches it took."""
        results: list[torch.Tensor | None] = [None] * len(segments)
        waiting = list(range(len(segments)))
        under_way: list[tuple[Launch, list[int]]] = []
        launches: list[Launch] = []
        while waiting or under_way:
            if waiting and len(under_way) < 2:
                replay = self.plan([segments[index].shape for index in waiting[:LOOK_AHEAD]])
                chosen = [waiting[index] for index in replay.taken]
                for place in reversed(replay.taken):
                    del waiting[place]
                under_way.append((self.submit([segments[index] for index in chosen], replay), chosen))
                continue
            launch, chosen = under_way.pop(0)
            launches.append(launch)
            for index, tokens in zip(chosen, self.finish(launch), strict=True):
                results[index] = tokens
        return [tokens for tokens in results if tokens is not None], launches

    def replay_again(self, key: GraphKey) -> None:
        """Replay a graph over the inputs it holds, and leave its output where it is: for measuring alone."""
        self._graphs.graphs[key].replay()
