"""Checkpoints in the released layout: written, read back, and refused with names."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from encoder import weights
from encoder.adapters.registry import check_model, families, load_adapter, resolve_model
from encoder.checkpoints import init_checkpoint
from encoder.config import EncoderConfig
from encoder.errors import ConfigError, WeightsError
from encoder.media import MediaHeader
from encoder.snapshots import INDEX, SINGLE
from encoder.weights import load_tensors, random_tensors, write_snapshot

PRESET = "tiny-minicpmv-2.6"


@pytest.fixture
def shapes() -> dict[str, tuple[int, ...]]:
    return load_adapter(EncoderConfig(model=PRESET)).weight_shapes()


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    init_checkpoint(PRESET, tmp_path / "snapshot", seed=3)
    return tmp_path / "snapshot"


def test_released_names_are_written_and_read_back(snapshot: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    read, made = load_tensors(snapshot, shapes), random_tensors(shapes, seed=3)
    assert read.keys() == made.keys()
    assert all(torch.equal(read[name], made[name]) for name in made)
    assert "vpm.encoder.layers.1.self_attn.q_proj.weight" in read
    assert "resampler.attn.in_proj_weight" in read


def test_a_snapshot_is_told_by_its_config(snapshot: Path) -> None:
    model = resolve_model(str(snapshot))
    assert (model.name, model.snapshot) == ("snapshot", snapshot)


def test_settings_of_processors_are_read_from_files_of_their_own_or_from_one_for_all(tmp_path: Path) -> None:
    """As transformers 5 saves them, all in one file, which goes first; older ones of that name hold other things."""
    init_checkpoint("tiny-smolvlm", tmp_path / "snapshot")

    def longest() -> object:
        return resolve_model(str(tmp_path / "snapshot")).config["preprocessor_config"]["size"]["longest_edge"]

    assert longest() == 128
    for together, wanted in (
        ({"processor_class": "SmolVLMProcessor", "image_seq_len": 64}, 128),
        ({"image_processor": {"size": {"longest_edge": 192}}, "video_processor": {"fps": 2}}, 192),
    ):
        (tmp_path / "snapshot" / "processor_config.json").write_text(json.dumps(together))
        assert longest() == wanted
    assert resolve_model(str(tmp_path / "snapshot")).config["video_preprocessor_config"] == {"fps": 2}
    adapter = load_adapter(EncoderConfig(model=str(tmp_path / "snapshot")))
    assert len(adapter.probe(MediaHeader(width=100, height=100)).grids) == 10, "nine tiles of 64 pixels and the whole"


def test_only_shards_with_wanted_tensors_are_opened(
    snapshot: Path, shapes: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MAX_SHARD_BYTES", 200_000)
    config = json.loads((snapshot / "config.json").read_text())
    language = {"llm.model.embed_tokens.weight": torch.zeros(60_000)}
    write_snapshot(snapshot / "sharded", config, language | random_tensors(shapes, seed=3), torch.float32)
    index = json.loads((snapshot / "sharded" / INDEX).read_text())["weight_map"]
    assert len(set(index.values())) > 2
    shard_of_language = snapshot / "sharded" / index["llm.model.embed_tokens.weight"]
    if [name for name, shard in index.items() if shard == shard_of_language.name] == ["llm.model.embed_tokens.weight"]:
        shard_of_language.unlink()
    assert load_tensors(snapshot / "sharded", shapes).keys() == shapes.keys()


def test_single_file_without_index_is_read(snapshot: Path, shapes: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    tensors = random_tensors(shapes, seed=1)
    save_file(tensors, tmp_path / SINGLE)
    assert load_tensors(tmp_path, shapes).keys() == shapes.keys()


def test_missing_and_misshapen_tensors_are_named(snapshot: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    index = snapshot / INDEX
    stored = json.loads(index.read_text())
    del stored["weight_map"]["resampler.query"]
    index.write_text(json.dumps(stored))
    for read in (partial(load_tensors, snapshot, shapes), partial(check_model, EncoderConfig(model=str(snapshot)))):
        with pytest.raises(WeightsError, match=r"1 tensors are missing: resampler\.query"):
            read()
    wider = shapes | {"resampler.proj": (512, 512)}
    del wider["resampler.query"]
    with pytest.raises(WeightsError, match=r"resampler\.proj is \[256, 256\], not \[512, 512\]"):
        load_tensors(snapshot, wider)


@pytest.mark.parametrize(
    ("dtype", "said"), [(torch.int8, "int8"), (torch.float8_e4m3fn, "float8_e4m3fn"), (torch.complex64, "complex64")]
)
def test_quantised_tensors_are_refused_instead_of_taken_as_they_stand(
    snapshot: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, said: str
) -> None:
    shard = next(snapshot.glob("*.safetensors"))
    tensors = load_file(shard)
    save_file(tensors | {"resampler.proj": tensors["resampler.proj"].to(dtype)}, shard)
    with pytest.raises(WeightsError, match=rf"1 tensors are quantised: resampler\.proj is {said}; take a checkpoint"):
        load_tensors(snapshot, shapes)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_is_found_where_no_probe_would_meet_it(
    snapshot: Path, shapes: dict[str, tuple[int, ...]], number: float
) -> None:
    shard = next(snapshot.glob("*.safetensors"))
    tensors = load_file(shard)
    tensors["vpm.embeddings.position_embedding.weight"][-1, -1] = number  # of pictures larger than any probe
    save_file(tensors, shard)
    with pytest.raises(WeightsError, match=r"1 tensors hold NaN or infinity: vpm\.embeddings\.position_embedding"):
        load_tensors(snapshot, shapes)


@pytest.mark.parametrize("preset", [name for family in families().values() for name in list(family.presets)[:1]])
def test_a_checkpoint_that_says_nonsense_is_a_config_error(tmp_path: Path, preset: str) -> None:
    config = dict(resolve_model(preset).config)
    nonsense: list[dict[str, object]] = [
        config | {"vision_config": [1, 2, 3]},
        config | {"preprocessor_config": {"size": "large", "image_mean": 0.5, "min_pixels": "few"}},
        {key: value if isinstance(value, str) else {"hidden_size": "wide"} for key, value in config.items()},
    ]
    refused = []
    for number, said in enumerate(nonsense):
        write_snapshot(tmp_path / str(number), said, {}, torch.float32)
        try:
            load_adapter(EncoderConfig(model=str(tmp_path / str(number)))).weight_shapes()
        except ConfigError as error:
            refused.append(str(error))
    assert refused


@pytest.mark.parametrize(
    ("preset", "key", "said"),
    [
        ("tiny-internvl", "preprocessor_config", {"min_patches": None}),
        ("tiny-gemma3", "preprocessor_config", {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": "large"}),
        ("tiny-glm4v", "preprocessor_config", {"size": {"longest_edge": None}}),
        ("tiny-kimi-k2.5", "preprocessor_config", {"size": {"max_height": None}}),
        ("tiny-lfm2-vl", "preprocessor_config", {"max_pixels_tolerance": None}),
        ("tiny-glm4v", "video_preprocessor_config", {"fps": "fast"}),
    ],
)
def test_nonsense_that_only_an_image_would_meet_is_found_when_a_checkpoint_is_read(
    tmp_path: Path, preset: str, key: str, said: dict[str, object]
) -> None:
    write_snapshot(tmp_path, {**resolve_model(preset).config, key: said}, {}, torch.float32)
    with pytest.raises(ConfigError, match="says what no model of this kind can be"):
        load_adapter(EncoderConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        (None, "is missing, which model.safetensors.index.json names; fetch it again"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "is a pointer .*`git lfs pull`"),
        (b"\x10\x00", "is damaged or incomplete: .*; fetch it again"),
    ],
)
@pytest.mark.parametrize("whole", [True, False], ids=["one file", "shards"])
def test_a_checkpoint_that_was_fetched_in_part_says_what_to_do(
    snapshot: Path, shapes: dict[str, tuple[int, ...]], shard: bytes | None, said: str, whole: bool
) -> None:
    path = next(snapshot.glob("*.safetensors"))
    if whole:
        (snapshot / INDEX).unlink()
        path = path.rename(snapshot / SINGLE)
    if shard is None:
        path.unlink()
        (snapshot / "pytorch_model.bin").touch()
        if whole:
            said = "holds neither .* it has pytorch_model.bin, which is not read: take a release in safetensors"
    else:
        path.write_bytes(shard)
    with pytest.raises(WeightsError, match=said):
        load_tensors(snapshot, shapes)
    if whole or shard is None:  # what a list of tensors tells, no worker need be started for
        with pytest.raises(WeightsError, match=said):
            check_model(EncoderConfig(model=str(snapshot)))


@pytest.mark.parametrize("damage", ["truncate", "garbage", "no_index", "bad_index", "odd_index", "deep_index"])
def test_damaged_checkpoints_are_typed_errors(snapshot: Path, shapes: dict[str, tuple[int, ...]], damage: str) -> None:
    shard = next(snapshot.glob("*.safetensors"))
    if damage == "truncate":
        shard.write_bytes(shard.read_bytes()[:1000])
    elif damage == "garbage":
        shard.write_bytes(b"not a checkpoint at all")
    elif damage == "no_index":
        (snapshot / INDEX).unlink()
    elif damage == "odd_index":
        (snapshot / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(shapes, 3)}))
    elif damage == "deep_index":
        (snapshot / INDEX).write_text("[" * 100_000)
    else:
        (snapshot / INDEX).write_text("{")
    with pytest.raises(WeightsError, match=str(snapshot)):
        load_tensors(snapshot, shapes)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": ["a"]}', '{"weight_map": {"a": 3}}', "[" * 100_000])
def test_a_list_of_tensors_that_cannot_be_read_is_found_before_a_worker_starts(snapshot: Path, text: str) -> None:
    (snapshot / INDEX).write_text(text)
    with pytest.raises(WeightsError, match=rf"{INDEX} is no readable list of tensors: .*; fetch it again"):
        check_model(EncoderConfig(model=str(snapshot)))


def test_random_weights_depend_on_name_and_seed_alone(shapes: dict[str, tuple[int, ...]]) -> None:
    one = {"resampler.proj": shapes["resampler.proj"]}
    assert torch.equal(random_tensors(one, seed=5)["resampler.proj"], random_tensors(shapes, seed=5)["resampler.proj"])
    assert not torch.equal(random_tensors(one, seed=5)["resampler.proj"], random_tensors(one, seed=6)["resampler.proj"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "whisper"}, "model_type 'whisper' has no adapter; these have: .*minicpmv"),
        ({"model_type": "minicpmv", "version": 2.0}, "MiniCPM-V 2.0 is not supported"),
        ({"model_type": "minicpmv", "version": 2.6}, "lacks 'vision_config'"),
        ({"model_type": ["minicpmv"]}, "model_type \\['minicpmv'\\] has no adapter"),
    ],
)
def test_checkpoints_of_other_models_are_refused(tmp_path: Path, config: dict[str, object], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        load_adapter(EncoderConfig(model=str(tmp_path)))


def test_directories_and_presets_that_do_not_fit_are_refused(snapshot: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not an empty directory"):
        init_checkpoint(PRESET, snapshot)
    with pytest.raises(ConfigError, match="is not an empty directory"):
        init_checkpoint(PRESET, snapshot / "config.json")
    with pytest.raises(ConfigError, match="is a checkpoint already"):
        init_checkpoint(str(snapshot), tmp_path / "other")
    with pytest.raises(ConfigError, match=r"no readable config\.json"):
        resolve_model(str(tmp_path))


def test_layers_stored_last_may_be_skipped(snapshot: Path) -> None:
    """`drop_vision_last_layer` changes the result, not the keys that are read."""
    from encoder.runner import EncoderRunner

    config = json.loads((snapshot / "config.json").read_text())
    runner = EncoderRunner.from_config(EncoderConfig(model=str(snapshot), graphs=False), "cpu")
    (snapshot / "config.json").write_text(json.dumps(config | {"drop_vision_last_layer": True}))
    dropped = EncoderRunner.from_config(EncoderConfig(model=str(snapshot), graphs=False), "cpu")
    from PIL import Image

    segment = runner.adapter.prepare(Image.new("RGB", (100, 100), (9, 90, 200)))
    assert not torch.allclose(runner.encode(segment)[0], dropped.encode(segment)[0], atol=1e-3)
    assert load_file(next(snapshot.glob("*.safetensors"))).keys() == dropped.adapter.weight_shapes().keys()
