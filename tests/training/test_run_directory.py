"""Which directories a run takes, which it goes on in, and which it leaves alone."""

import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from looplm.errors import UserError
from looplm.training.recipe_file import dump_recipe, load_recipe
from looplm.training.run import run
from looplm.training.run_directory import LOCK

from .whole_runs import recipe_of, run_until, tiny


def test_a_directory_in_use_is_refused(straight: Path, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not empty: it holds a run that --resume continues"):
        run(recipe_of(tiny(texts)), straight)
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"is not empty: it holds thesis\.tex"):
        run(recipe_of(tiny(texts)), tmp_path)
    with pytest.raises(UserError, match="holds no run to resume"):
        run(recipe_of(tiny(texts)), tmp_path, resume=True)
    with pytest.raises(UserError, match="is a file"):
        run(recipe_of(tiny(texts)), tmp_path / "thesis.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_only_a_failed_start_of_ours_is_written_over(texts: Path, tmp_path: Path) -> None:
    run_dir, text = tmp_path / "exp", "# my comments\n" + dump_recipe(recipe_of(tiny(texts)))
    (run_dir / "tokenizer").mkdir(parents=True)
    (run_dir / "tokenizer" / "notes").write_text("precious")
    (run_dir / "recipe.yaml").write_text(text)
    recipe = load_recipe(run_dir / "recipe.yaml")
    with pytest.raises(UserError, match=r"is not empty: it holds recipe\.yaml, tokenizer\. Choose another"):
        run(recipe, run_dir)
    with pytest.raises(UserError, match=r"no run to resume: looplm has not written the recipe\.yaml in it"):
        run(recipe, run_dir, resume=True)
    shutil.rmtree(run_dir / "tokenizer")
    for resume in (False, True):
        with pytest.raises(UserError, match="not empty|no run to resume"):
            run(recipe, run_dir, resume=resume)
    assert (run_dir / "recipe.yaml").read_text() == text and len(list(run_dir.iterdir())) == 1
    (run_dir / "recipe.yaml").unlink()
    (run_dir / "tokenizer").mkdir()
    with pytest.raises(UserError, match="is not empty: it holds tokenizer"):
        run(recipe, run_dir)
    # With the marker the same is a start that failed, as on data that could not be tokenised.
    (run_dir / ".looplm-run").touch()
    run(recipe, run_dir)
    assert (run_dir / "second" / "config.json").is_file() and (run_dir / "tokenizer" / "tokenizer.json").is_file()


def test_two_processes_never_train_in_one_directory(straight: Path, texts: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(straight, tmp_path / "run")
    for directory, resume in ((run_dir, True), (tmp_path / "new", False)):
        directory.mkdir(exist_ok=True)
        held = FileLock(directory / LOCK)
        with held, pytest.raises(UserError, match="Another process is training in .*--resume; or choose another"):
            run(recipe_of(tiny(texts)), directory, resume=resume)
        before = {path.name for path in directory.iterdir()}
        run(recipe_of(tiny(texts)), directory, resume=resume)  # free again
        assert before <= {path.name for path in directory.iterdir()} | {LOCK}


def test_a_run_that_failed_leaves_its_directory_free(texts: Path, tmp_path: Path, monkeypatch) -> None:
    run_until(recipe_of(tiny(texts)), tmp_path / "run", 3, monkeypatch)
    FileLock(tmp_path / "run" / LOCK).acquire(timeout=0).lock.release()


def test_directories_that_cannot_be_made(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for run_dir in (tmp_path / "file" / "run", Path("/proc/run"), Path("/sys/run"), tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match="cannot be a run directory: .*--out"):
            run(recipe_of(tiny(texts)), run_dir)


def test_an_older_run_without_the_marker_resumes(straight: Path, texts: Path, tmp_path: Path) -> None:
    run_dir = shutil.copytree(straight, tmp_path / "run")
    (run_dir / ".looplm-run").unlink()
    with pytest.raises(UserError, match="it holds a run that --resume continues"):
        run(recipe_of(tiny(texts)), run_dir)
    run(recipe_of(tiny(texts)), run_dir, resume=True)
