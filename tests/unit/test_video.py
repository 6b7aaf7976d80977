"""Video files: headers, frames, limits, and what is wrong with the broken ones."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from clips import brightness, make_clip, make_sound
from PIL import Image

from encoder import video
from encoder.adapters.registry import load_adapter
from encoder.config import EncoderConfig, VideoConfig
from encoder.errors import BadMediaError, ConfigError, EncoderPoolError, MediaTooLargeError
from encoder.items import prepare_item, probe_item
from encoder.media import MediaHeader
from encoder.video import Video, is_video, probe_video

KINDS = {
    "mp4": ("mp4", "libx264"),
    "mov": ("mov", "libx264"),
    "webm": ("webm", "libvpx-vp9"),
    "mkv": ("matroska", "libx264"),
    "avi": ("avi", "mpeg4"),
    "mpg": ("mpeg", "mpeg2video"),
}


def probe(data: bytes, max_pixels: int = 10**8, **limits: object) -> MediaHeader:
    return probe_video(data, max_pixels=max_pixels, limits=VideoConfig.model_validate(limits))


def greys(data: bytes, numbers: list[int]) -> list[float]:
    """Brightness at the lower right of these frames."""
    frames = Video(data, probe(data)).frames(numbers)
    return [float(np.asarray(frame)[-20:, -20:].mean()) for frame in frames]


@pytest.mark.parametrize("kind", KINDS)
def test_the_wanted_frames_of_every_kind_of_file_come_in_order(kind: str) -> None:
    container, codec = KINDS[kind]
    data = make_clip(50, container=container, codec=codec)
    header = probe(data)
    assert is_video(data)
    assert (header.width, header.height, header.num_frames) == (320, 240, 50)
    assert header.frames_per_s == pytest.approx(30)
    numbers = [0, 7, 7, 20, 49]
    assert greys(data, numbers) == pytest.approx([brightness(number) for number in numbers], abs=6)


UNUSUAL: dict[str, dict[str, Any]] = {
    "one frame": {"num_frames": 1},
    "odd sides": {"size": (321, 243), "pixels": "yuv444p"},
    "ten bits": {"pixels": "yuv420p10le"},
    "grey": {"codec": "ffv1", "container": "matroska", "pixels": "gray"},
    "sixteen bits": {"codec": "ffv1", "container": "matroska", "pixels": "gray16le"},
    "alpha": {"codec": "png", "container": "mov", "pixels": "rgba"},
    "interlaced": {"codec": "mpeg2video", "container": "mpeg", "interlaced": True},
    "varying rate": {"times": [0, 1, 2, 30, 31, 90, 91, 92, 120, 300]},
    "one a second": {"fps": 1},
    "a thousand a second": {"fps": 1000},
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_frames_of_unusual_clips_are_all_there(kind: str) -> None:
    """By number, whatever their times; and in each family's segments, as promised."""
    options = {"num_frames": 10, "size": (64, 48)} | UNUSUAL[kind]
    data = make_clip(**options)
    header = probe(data)
    assert (header.num_frames, header.width, header.height) == (options["num_frames"], *options["size"])
    wanted = [brightness(number) for number in range(header.num_frames)]
    assert greys(data, list(range(header.num_frames))) == pytest.approx(wanted, abs=6)
    for model in ("tiny-qwen2.5-vl", "tiny-minicpmv-4.5", "tiny-kimi-k2.5", "tiny-smolvlm"):
        config = EncoderConfig(model=model)
        adapter = load_adapter(config)
        _, shape = probe_item(data, adapter, config)
        segments = [segment for part in prepare_item(data, adapter, config) for segment in part]
        assert tuple(segment.shape.grid for segment in segments) == shape.grids


def test_two_frames_that_lie_hours_apart_are_a_long_clip() -> None:
    with pytest.raises(MediaTooLargeError, match="video lasts 7200 s, the limit is 3600"):
        probe(make_clip(3, (64, 48), codec="mjpeg", pixels="yuvj420p", times=[0, 1, 30 * 7200]))


def test_a_clip_that_lies_on_its_side_is_set_upright() -> None:
    data = make_clip(4, rotation=90)
    header = probe(data)
    assert (header.width, header.height) == (240, 320)
    (frame,) = Video(data, header).frames([1])
    assert isinstance(frame, Image.Image)
    assert frame.size == (240, 320)
    pixels = np.asarray(frame)[..., 0]
    assert pixels[-20:, :20].mean() > 240, "turned counterclockwise, the upper left is the lower left"
    assert pixels[:20, :20].mean() < 60


def test_pictures_are_no_videos() -> None:
    assert not is_video(b"\x00\x00\x00\x1cftypavif\x00\x00\x00\x00")
    assert not is_video(b"\xff\xd8\xff\xe0")
    assert not is_video(b"")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (make_clip(0), "cannot be decoded"),
        (make_clip(50)[:3000], "cannot be decoded"),
        (make_clip(50)[:100], "cannot be decoded"),
        (b"\x00\x00\x00\x18ftypmp42" + b"\x07" * 500, "cannot be decoded"),
        (make_clip(60, container="matroska")[:900], r"cannot be decoded|has no frames|no moving pictures"),
        (make_clip(5).replace(b"avc1", b"zzzz"), "has a codec that FFmpeg does not know"),
        (make_sound(), "has no moving pictures in it; send a video"),
    ],
    ids=["no frames", "half", "head", "noise", "no first frame", "unknown codec", "sound alone"],
)
def test_broken_files_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(BadMediaError, match=message):
        probe(data)


def test_a_file_that_is_cut_off_behind_its_index_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "clip.mp4"
    with (
        av.open(io.BytesIO(make_clip(150))) as source,
        av.open(file, "w", options={"movflags": "faststart"}) as target,
    ):
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    data = file.read_bytes()
    with pytest.raises(BadMediaError, match=r"video has \d+ of 150 frames; the file is cut off"):
        probe(data[: len(data) // 2])


def test_a_clip_that_ends_early_repeats_its_last_frame_or_is_refused() -> None:
    data = make_clip(40)
    almost = MediaHeader(width=320, height=240, num_frames=45, frames_per_s=30)
    frames = list(Video(data, almost).frames([39, 44]))
    assert np.array_equal(np.asarray(frames[0]), np.asarray(frames[1]))
    far = MediaHeader(width=320, height=240, num_frames=90, frames_per_s=30)
    with pytest.raises(BadMediaError, match="ends 50 frames before it should"):
        list(Video(data, far).frames([0, 89]))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_bytes": 100}, r"bytes, the limit is 100; cut it or raise encoder\.video\.max_bytes"),
        ({"max_duration_s": 1}, r"video lasts 2 s, the limit is 1; cut it or raise encoder\.video\.max_duration_s"),
        ({"max_pixels": 1000}, r"76800 pixels a frame, the limit is 1000; send it smaller"),
    ],
)
def test_limits_hold(limits: dict[str, int], message: str) -> None:
    with pytest.raises(MediaTooLargeError, match=message):
        probe(make_clip(60), **limits)


def test_frames_over_the_limit_are_never_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the header, nor when a clip's later frames are larger than its header said."""
    data = make_clip(3, (640, 480))
    decoded: list[object] = []
    monkeypatch.setattr(video, "_first_and_count", lambda *arguments: decoded.append(arguments))
    with pytest.raises(MediaTooLargeError, match="video of 640x480 has 307200 pixels a frame"):
        probe(data, max_pixels=1000)
    assert not decoded
    small = MediaHeader(width=64, height=48, num_frames=3, frames_per_s=30)
    with pytest.raises(BadMediaError, match="cannot be decoded"):
        list(Video(data, small, max_pixels=1000).frames([0]))


def test_without_pyav_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"pip install 'encpool\[video\]'"):
        probe(b"\x1aE\xdf\xa3")


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="name one"):
        VideoConfig(fps=1, num_frames=8)
    with pytest.raises(ValueError, match="min_frames 9 is above max_frames 8"):
        VideoConfig(min_frames=9, max_frames=8)
    assert issubclass(MediaTooLargeError, EncoderPoolError)


@pytest.mark.parametrize("model", ["tiny-minicpmv-2.5", "tiny-siglip"])
def test_a_model_of_images_says_so_when_it_gets_a_video(model: str) -> None:
    config = EncoderConfig(model=model)
    adapter, clip = load_adapter(config), make_clip(5)
    said = f"the file is a video and {model} takes images only; send JPEG"
    with pytest.raises(BadMediaError, match=said):
        probe_item(clip, adapter, config)
    with pytest.raises(BadMediaError, match=said):
        list(prepare_item(clip, adapter, config))


def test_what_to_send_instead_of_an_unreadable_file_depends_on_the_model() -> None:
    def refusal(model: str) -> str:
        config = EncoderConfig(model=model)
        with pytest.raises(BadMediaError) as raised:
            probe_item(b"%PDF-1.7", load_adapter(config), config)
        return str(raised.value)

    assert refusal("tiny-siglip") == "the file is a PDF document; send JPEG, PNG, WebP, GIF, BMP or TIFF"
    assert refusal("tiny-qwen2.5-vl").endswith("BMP or TIFF, or a video: MP4, QuickTime, Matroska, WebM, AVI or MPEG")
