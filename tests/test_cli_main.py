"""The command line's promises: exit statuses, one-paragraph messages, and a light start."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import typer

from looplm.cli import main as cli
from looplm.errors import UserError

HEAVY = ["torch", "transformers", "numpy", "matplotlib", "tensorboard", "safetensors", "tokenizers"]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60)


@pytest.fixture
def exit_status(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception | KeyboardInterrupt], int | str | None]:
    """Runs `main()` around a command that raises the given exception, and returns the exit status."""

    def run(failure: Exception | KeyboardInterrupt) -> int | str | None:
        app = typer.Typer(pretty_exceptions_enable=False)

        @app.command()
        def fail() -> None:
            raise failure

        monkeypatch.setattr(cli, "app", app)
        monkeypatch.setattr(sys, "argv", ["looplm"])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code

    return run


def test_user_error_is_a_message_and_status_2(exit_status, capsys):
    assert exit_status(UserError("the file a.yaml is empty; give one with at least one stage")) == 2
    captured = capsys.readouterr()
    assert captured.err == "looplm: the file a.yaml is empty; give one with at least one stage\n"
    assert captured.out == ""


def test_interrupt_is_status_130(exit_status, capsys):
    assert exit_status(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err.strip() == "looplm: interrupted"


def test_a_command_may_choose_its_own_status(exit_status, capsys):
    assert exit_status(typer.Exit(3)) == 3
    assert capsys.readouterr().err == ""


def test_a_defect_keeps_its_traceback(exit_status):
    with pytest.raises(RuntimeError, match="a defect"):
        exit_status(RuntimeError("a defect"))


@pytest.mark.parametrize("arguments", [["no-such-command"], ["--no-such-option"]])
def test_wrong_usage_is_status_2_without_traceback(arguments):
    done = run_python("-m", "looplm", *arguments)
    assert done.returncode == 2
    assert arguments[0] in done.stderr
    assert "Traceback" not in done.stderr


def test_version():
    done = run_python("-m", "looplm", "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "looplm 0.1.0\n"


def test_importing_the_command_line_is_light():
    heavy = [*HEAVY, "pydantic", "yaml", "rich"]
    done = run_python("-c", f"import sys, looplm.cli.main; print([name for name in {heavy} if name in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_help_is_light():
    code = f"""
import sys
from looplm.cli.main import main
sys.argv = ["looplm", "--help"]
try:
    main()
except SystemExit as stop:
    print(stop.code, [name for name in {HEAVY} if name in sys.modules])
"""
    done = run_python("-c", code)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr
    assert "Usage: looplm" in done.stdout


def test_sigterm_is_status_143_and_cleans_up(monkeypatch: pytest.MonkeyPatch, tmp_path):
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def stopped() -> None:
        half_written = tmp_path / "half"
        half_written.touch()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            half_written.unlink()

    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(sys, "argv", ["looplm"])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 143 and not any(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is before
