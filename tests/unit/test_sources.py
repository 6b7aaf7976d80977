import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.files.sources import find_sources
from encoder.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of names alone; nothing here reads the files."""
    for name in (
        "b.jpg",
        "a.PNG",
        "notes.txt",
        ".hidden.jpg",
        "sub/c.webp",
        "sub/deep/d.gif",
        ".git/e.jpg",
        "A/f.tiff",
        "raw/g.dat",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def paths(*arguments: str) -> list[str]:
    return [source.path for source in find_sources(arguments)]


@pytest.mark.usefixtures("folder")
def test_a_folder_is_searched_to_the_bottom_in_order_of_names() -> None:
    assert paths(".") == ["./a.PNG", "./b.jpg", "./A/f.tiff", "./sub/c.webp", "./sub/deep/d.gif"]


@pytest.mark.usefixtures("folder")
def test_arguments_keep_their_order_and_their_repetitions() -> None:
    assert paths("sub", "b.jpg", "b.jpg") == ["sub/c.webp", "sub/deep/d.gif", "b.jpg", "b.jpg"]


@pytest.mark.usefixtures("folder")
def test_a_named_file_is_taken_whatever_its_name() -> None:
    assert paths("notes.txt", ".hidden.jpg") == ["notes.txt", ".hidden.jpg"]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.jpg", ["b.jpg"]),
        ("*", ["A/f.tiff", "a.PNG", "b.jpg", "sub/c.webp", "sub/deep/d.gif"]),
        ("raw/*", None),
        ("raw/*.dat", ["raw/g.dat"]),
        ("**/*.gif", ["sub/deep/d.gif"]),
        ("sub/**", ["sub/c.webp", "sub/deep/d.gif"]),
        ("[ab].*", ["a.PNG", "b.jpg"]),
    ],
)
def test_patterns(pattern: str, found: list[str] | None) -> None:
    if found is None:
        with pytest.raises(ConfigError, match="no images in raw"):
            paths(pattern)
    else:
        assert paths(pattern) == found


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(folder: Path) -> None:
    (folder / "photo[1].jpg").touch()
    assert paths("photo[1].jpg") == ["photo[1].jpg"]


def test_a_pattern_that_crosses_folders_follows_no_loop_of_links(folder: Path) -> None:
    (folder / "sub/deep/up").symlink_to("..")
    (folder / "linked").symlink_to("raw")
    assert paths("**/*.gif") == ["sub/deep/d.gif"]
    assert paths("**") == ["A/f.tiff", "a.PNG", "b.jpg", "sub/c.webp", "sub/deep/d.gif"]
    assert paths("linked/**/*.dat") == ["linked/g.dat"]


def test_images_of_a_kind_that_cannot_be_read_are_skipped_aloud(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("sub/phone.HEIC", "x.avif"):
        (folder / name).touch()
    assert "x.avif" not in paths(".")
    assert caplog.messages == [
        "skipped 2 images of kinds that cannot be read (.avif .heic), such as ./x.avif; save them as JPEG or PNG"
    ]
    assert paths("x.avif") == ["x.avif"]


def test_videos_are_skipped_aloud_where_the_model_takes_none(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "sub/clip.mp4").touch()
    assert "sub/clip.mp4" not in paths(".")
    assert caplog.messages == [
        "skipped 1 video (.mp4), such as ./sub/clip.mp4: this model takes images alone; "
        "`encpool models` lists what others take"
    ]
    caplog.clear()
    assert [source.path for source in find_sources(["sub"], videos=True)][-1] == "sub/deep/d.gif"
    assert not caplog.messages


@pytest.mark.usefixtures("folder")
def test_what_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no such file or folder: gone\.jpg, \*\.tga"):
        find_sources(["b.jpg", "gone.jpg", "*.tga"])


@pytest.mark.usefixtures("folder")
def test_a_folder_without_images_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no images in raw.*\.jpg"):
        find_sources(["raw"])


def test_a_folder_that_cannot_be_listed_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def guarded(path: str) -> Any:  # permissions do not stop root, who may run the tests
        if os.path.basename(path) == "deep":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(ConfigError, match=r"cannot list folder \./sub/deep: Permission denied"):
        find_sources(["."])


def test_ids_are_unique_stable_and_fit_for_file_names(save_picture: Callable[..., Path]) -> None:
    named = [save_picture("one/photo.png"), save_picture("two/photo.png"), save_picture("one/pho to ü/../x.png")]
    arguments = [str(path) for path in (*named, named[0])]
    ids = [source.id for source in find_sources(arguments)]
    assert len(set(ids)) == 4
    assert ids[3] == ids[0] + "-2"
    assert find_sources(arguments[1:2])[0].id == ids[1]
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", item_id) for item_id in ids)


def test_names_that_are_no_unicode_are_found(tmp_path: Path) -> None:
    name = b"caf\xe9.jpg"
    (tmp_path / name.decode("utf-8", "surrogateescape")).touch()
    (source,) = find_sources([str(tmp_path)])
    assert source.id.startswith("caf-")


def test_folders_are_searched_for_videos_where_the_model_takes_them(tmp_path: Path) -> None:
    for name in ("a.jpg", "b.mp4", "c.webm", "d.txt"):
        (tmp_path / name).touch()
    assert [Path(source.path).name for source in find_sources([str(tmp_path)])] == ["a.jpg"]
    found = [Path(source.path).name for source in find_sources([str(tmp_path)], videos=True)]
    assert found == ["a.jpg", "b.mp4", "c.webm"]
