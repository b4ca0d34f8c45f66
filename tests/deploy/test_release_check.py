"""`make release-check` as its steps end: in a repository of its own, with real processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from release import check
from tessera.shared.version import VERSION

MAKEFILE = """
install:
\t@echo installed
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / ".gitignore").write_text("dist/\n")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "--quiet"), ("add", "."), (*author, "commit", "--quiet", "--message", "First")):
        subprocess.run(["git", *words], cwd=folder, check=True)
    monkeypatch.setattr(check, "ROOT", folder)
    steps = {
        "one": "echo once >> ../count; echo 'SKIPPED [2] test_it.py:7: there is no GPU here'",
        "two": "echo the reason; test -e ../mended",
    }
    monkeypatch.setattr(check, "STEPS", steps)
    return folder


def test_what_failed_is_named_and_what_passed_is_not_repeated(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["check"])
    with pytest.raises(SystemExit, match="not ready: two failed"):
        check.main()
    printed = capsys.readouterr().out
    assert "one: passed in 0 s\n  SKIPPED [2] test_it.py:7: there is no GPU here" in printed
    assert "two: FAILED, the reason" in printed
    (place,) = (repository / "dist").iterdir()
    (place / "mended").touch()
    check.main()
    assert "is ready to be released" in capsys.readouterr().out
    assert (place / "count").read_text() == "once\n"


def test_a_step_alone_leaves_the_others_to_be_checked(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["check", "--only", "one"])
    check.main()
    assert "still to be checked: two" in capsys.readouterr().out
    (repository / "new.py").touch()
    with pytest.raises(SystemExit, match=r"commit these first.*\n\?\? new\.py"):
        check.main()


def test_a_changelog_without_the_day_or_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in (
        "pyproject.toml",
        "Dockerfile",
        "deploy/helm/tessera/Chart.yaml",
        "deploy/worker-gpu.kubernetes.yaml",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((check.ROOT / file).read_text())
    changelog = tmp_path / "CHANGELOG.md"
    version = VERSION
    monkeypatch.setattr(check, "ROOT", tmp_path)
    changelog.write_text(f"# Changelog\n\n## {version} (unreleased)\n\n- A line.\n")
    with pytest.raises(SystemExit, match="the day of the newest version"):
        check.version()
    # The day of an earlier version is not that of this one.
    changelog.write_text(changelog.read_text() + "\n## 0.0.9 (2026-01-01)\n\n- A line.\n")
    with pytest.raises(SystemExit, match="the day of the newest version"):
        check.version()
    changelog.write_text(f"# Changelog\n\n## {version} (2026-12-24)\n\n- A line.\n")
    check.version()
    changelog.write_text("# Changelog\n\n## 9.9.9 (2026-12-24)\n\n- A line.\n")
    with pytest.raises(SystemExit, match=r"the version differs: .*'CHANGELOG.md': '9\.9\.9'"):
        check.version()
    changelog.write_text(f"# Changelog\n\n## {VERSION} (2026-12-24)\n\n- A line.\n")
    git = ("git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b")
    for words in (
        ("init", "--quiet"),
        ("commit", "--quiet", "--allow-empty", "--message", "First"),
        ("tag", f"v{VERSION}"),
    ):
        subprocess.run([*git, *words], check=True)
    check.version()
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "Second"], check=True)
    with pytest.raises(SystemExit, match=f"v{VERSION} is the tag of"):
        check.version()
