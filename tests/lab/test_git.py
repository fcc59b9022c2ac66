"""What a record says of the source it was made with."""

from __future__ import annotations

import pytest

from polarstep_lab.git import git, tree_of
from polarstep_lab.records import environment


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one commit of ``src/package/module.py``."""
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "Somebody")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "somebody@example.org")
    (tmp_path / "src/package").mkdir(parents=True)
    (tmp_path / "src/package/module.py").write_text("one = 1\n")
    (tmp_path / ".gitignore").write_text("*.pyc\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def files_of(repository):
    return {path: path.read_bytes() for path in (repository / ".git").rglob("*") if path.is_file()}


def test_source_that_is_committed_later_is_found_by_its_tree(repository):
    source = repository / "src"
    assert tree_of(source) == git(repository, "rev-parse", "HEAD:src")
    (source / "package/module.py").write_text("one = 2\n")
    (source / "package/more.py").write_text("two = 2\n")
    (source / "package/module.pyc").write_bytes(b"\0")  # not part of the source
    (repository / "notes.txt").write_text("outside of the folder\n")
    before = files_of(repository)
    found = tree_of(source)
    assert files_of(repository) == before
    assert found != git(repository, "rev-parse", "HEAD:src")
    git(repository, "add", "src")
    git(repository, "commit", "--quiet", "-m", "second")
    assert found == git(repository, "rev-parse", "HEAD:src")
    assert tree_of(repository) != git(repository, "rev-parse", "HEAD^{tree}")  # it has the notes


def test_a_record_names_the_tree_only_where_the_commit_does_not_tell_the_source(
    repository, monkeypatch
):
    source = repository / "src"
    monkeypatch.setattr(environment, "__file__", str(source / "lab/records/environment.py"))
    commit = git(repository, "rev-parse", "HEAD")
    assert environment.source_of_packages() == {"git_commit": commit}
    (source / "package/module.py").write_text("one = 2\n")
    assert environment.source_of_packages() == {
        "git_commit": f"{commit}+",
        "git_tree": tree_of(source),
    }


def test_without_a_repository_nothing_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "src/lab/records/environment.py"))
    assert environment.source_of_packages() == {"git_commit": None}
