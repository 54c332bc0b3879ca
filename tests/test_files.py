"""A file is written whole, or what was there stays."""

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dpoptim import files
from dpoptim.files import make_folder, write_atomically


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


def test_programs_take_turns_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a turn that ended by an error."""
    monkeypatch.setattr(files, "TURN", -1.0)
    waits = pytest.raises(OSError, match="another process has been saving there")
    with files.turn_in(tmp_path), waits, files.turn_in(tmp_path):
        pass
    with pytest.raises(KeyError), files.turn_in(tmp_path):
        raise KeyError
    with files.turn_in(tmp_path):
        pass
    with files.turn_in(tmp_path / "missing"):  # writing there says so
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, OSError), (errno.EACCES, PermissionError)]
)
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


def test_an_error_without_a_number_is_still_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


KILLED = """
import os, signal, sys
from pathlib import Path
from dpoptim import files

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

os.umask(0)
setattr(os, sys.argv[2], die)
files.write_atomically(Path(sys.argv[1]), b"secret " * 1000, secret=sys.argv[3] == "secret")
"""


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals and permissions")
@pytest.mark.parametrize("kind", ["secret", "kept"])
def test_what_a_killed_process_leaves_is_closed_to_others_and_removed_later(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "run"
    if kind == "kept":
        target.touch(mode=0o600)
    # A process that imports nothing else: the module alone.
    source = Path(files.__file__).parent
    script = KILLED.replace(
        "from dpoptim import files", f"sys.path.insert(0, {str(source)!r}); import files"
    )
    for call in ("fsync", "replace"):
        died = subprocess.run([sys.executable, "-c", script, str(target), call, kind], check=False)
        assert died.returncode == -signal.SIGKILL
    left = [path for path in tmp_path.iterdir() if path != target]
    assert len(left) == 1  # the second process removed what the first one left
    assert stat.S_IMODE(left[0].stat().st_mode) == 0o600
    monkeypatch.setattr(files, "_swept", set())
    write_atomically(target, b"whole", secret=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.skipif(os.name == "nt", reason="POSIX locks")
def test_another_process_unfinished_work_is_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with files.written_beside(tmp_path / "one", [b"x"], private=True) as temporary:
        monkeypatch.setattr(files, "_swept", set())
        write_atomically(tmp_path / "two", b"y")
        assert temporary.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["two"]


def test_a_new_file_replaces_nothing(tmp_path: Path) -> None:
    assert files.create_whole(tmp_path / "new", b"first")
    assert not files.create_whole(tmp_path / "new", b"second")
    assert (tmp_path / "new").read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_folder_that_cannot_be_made_is_named_with_the_fix(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("kept")
    with pytest.raises(NotADirectoryError, match="choose a path whose parent is a folder"):
        make_folder(tmp_path / "file" / "run")
    assert (tmp_path / "file").read_text() == "kept"
