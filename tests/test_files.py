"""A file is written whole, or what was there stays."""

import errno
import os
import stat
from pathlib import Path

import pytest

from dpoptim.files import write_atomically


@pytest.mark.parametrize(
    ("content", "bytes_"),
    [("Grüße\n", "Grüße\n".encode()), (b"\x00\xff\r\n", b"\x00\xff\r\n"), ("\udc80", b"\\udc80")],
)
def test_writes_exactly_the_content(tmp_path: Path, content: bytes | str, bytes_: bytes) -> None:
    path = tmp_path / "file"
    write_atomically(path, "much longer than what comes next " * 9)
    write_atomically(path, content)
    assert path.read_bytes() == bytes_
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, OSError), (errno.EACCES, PermissionError)])
def test_a_failure_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, kind: type[OSError]
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(kind) as caught:
        write_atomically(path, "new")
    assert caught.value.errno == number
    for part in (str(path), os.strerror(number), "Fix:", "unchanged"):
        assert part in str(caught.value)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_leaves_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", "new")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_and_a_folder_in_the_way_are_explained(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="create the folder first"):
        write_atomically(tmp_path / "nowhere" / "file", "x")
    (tmp_path / "runs").mkdir()
    with pytest.raises(IsADirectoryError, match="this one is a folder"):
        write_atomically(tmp_path / "runs", "x")


def test_an_error_without_a_number_is_still_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError("the disk is on fire")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match=r"file: the disk is on fire.*Fix:"):
        write_atomically(tmp_path / "file", "x")


def test_the_longest_name_fits(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 255)
    write_atomically(path, "x")
    assert path.read_text() == "x"


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_permissions_follow_the_umask_and_then_the_file(tmp_path: Path) -> None:
    path, ordinary = tmp_path / "file", tmp_path / "ordinary"
    ordinary.touch()
    write_atomically(path, "x")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)
    path.chmod(0o600)
    write_atomically(path, "y")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.name == "nt", reason="symbolic links need a privilege there")
def test_a_symbolic_link_still_points_where_it_did(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)
    write_atomically(link, "x")
    assert link.is_symlink()
    assert real.read_text() == "x"
