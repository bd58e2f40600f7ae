"""The `looplm` application: registers the commands and turns failures into exit statuses.

0: done. 1: `parity` found a difference. 2: the input or the options are wrong, said in one paragraph on stderr.
130, 143: interrupted by Ctrl-C or SIGTERM.
Anything else is a defect of looplm and keeps its traceback.
"""

import signal
import sys
from typing import Annotated

import typer

from looplm.cli import (
    analyze,
    bench,
    calibrate,
    chat,
    code,
    convert,
    eval,
    export,
    gate,
    generate,
    harm,
    info,
    judge,
    lab,
    parity,
    quickstart,
    serve,
    train,
    upcycle,
)
from looplm.errors import UserError

app = typer.Typer(
    name="looplm",
    help="Looped language models: train them, run them with early exit, look inside.",
    no_args_is_help=True,
    add_completion=False,
    # Markdown leaves square brackets alone; rich's own markup would swallow "[key=value ...]".
    rich_markup_mode="markdown",
    # A plain traceback is what a bug report needs.
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    """Prints the installed version and stops; called by Typer before anything else is parsed."""
    if wanted:
        from importlib.metadata import version

        print(f"looplm {version('looplm')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that stand before the command."""


app.command("quickstart")(quickstart.quickstart)
app.command("train")(train.train)
app.command("gate")(gate.gate)
app.command("convert")(convert.convert)
app.command("upcycle")(upcycle.upcycle)
app.command("export")(export.export)
app.command("parity")(parity.parity)
app.command("info")(info.info)
app.command("generate")(generate.generate)
app.command("serve")(serve.serve)
app.command("chat")(chat.chat)
app.command("eval")(eval.evaluate)
app.command("code")(code.code)
app.command("judge")(judge.judge)
app.command("harm")(harm.harm)
app.command("calibrate")(calibrate.calibrate)
app.add_typer(lab.app, name="lab")
app.add_typer(analyze.app, name="analyze")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Runs the command line on `sys.argv` and always ends in `SystemExit`.

    `UserError` becomes its message and status 2, without a traceback; wrong options are reported by
    Typer, with status 2 as well; Ctrl-C becomes status 130, SIGTERM 143.
    """
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        app(prog_name="looplm")
    except UserError as error:
        _fail(str(error), status=2)
    except KeyboardInterrupt:  # pressed outside a command: Typer did not see it
        _fail("interrupted", status=130)
    except SystemExit as stop:
        if stop.code == 130 and not isinstance(stop, train.Stopped):
            _fail("interrupted", status=130)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(*_: object) -> None:
    """Leaves as from an error, so that what was half written is removed; `train` and `serve` have handlers of their
    own."""
    raise SystemExit(128 + signal.SIGTERM)


def _fail(message: str, *, status: int) -> None:
    print(f"looplm: {message}", file=sys.stderr)
    raise SystemExit(status) from None
