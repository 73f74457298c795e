"""The command line: `steppe COMMAND …`, also `python -m steppe COMMAND …`."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import steppe

USAGE = """usage: steppe COMMAND [OPTIONS]

Train PyTorch models into flat minima, and find out whether it helps.

{commands}

`steppe COMMAND --help` lists the options. Try first: steppe compare
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and leave with its exit code: 0, 2 for a mistake, 130 for Ctrl-C."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """The exit code of a command; of the processes that torchrun started, the first one speaks."""
    try:
        from steppe.lab.command_line import COMMANDS, TRAINING, command_class, parse
        from steppe.lab.errors import LabError
        from steppe.lab.launch import rank_and_size
    except ModuleNotFoundError as error:
        return _fail(f"the commands need {error.name}: pip install 'steppe[lab]'")
    rank, _ = rank_and_size()
    if rank and (not arguments or arguments[0] not in TRAINING):
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        lines = []
        for name in COMMANDS:
            summary = command_class(name).__doc__.partition("\n")[0].rstrip(".")
            line, indent = f"  {name:{width}}  {summary}", " " * (width + 4)
            lines.append(textwrap.fill(line, 80, subsequent_indent=indent))
        sys.stdout.write(USAGE.format(commands="\n".join(lines)))
        return 0
    if arguments[0] == "--version":
        sys.stdout.write(f"steppe {steppe.__version__}\n")
        return 0
    name, rest = arguments[0], arguments[1:]
    _log("-q" in rest or "--quiet" in rest, rank)
    try:
        with Path(os.devnull).open("w") as nowhere:  # all ranks find the same mistakes: one says so
            out, err = (nowhere, nowhere) if rank else (sys.stdout, sys.stderr)
            with redirect_stdout(out), redirect_stderr(err):
                command = parse(name, rest)
    except LabError as error:
        return 2 if rank else _fail(str(error))
    except BrokenPipeError:
        return _unread()
    try:
        from steppe.lab.ranks import joined

        with joined():
            command.run()
    except LabError as error:
        if rank and error.shared:
            return 2
        return _fail(f"rank {rank}: {error}" if rank else str(error))
    except KeyboardInterrupt as stop:
        return 130 if rank else _stopped(stop)
    except BrokenPipeError:
        return _unread()
    except OSError as error:
        return _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
    return 0


def _unread() -> int:
    """The reader of our output (head, less) has gone: nothing is wrong."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _stopped(stop: KeyboardInterrupt) -> int:
    """Say what was stopped and how to resume it."""
    from steppe.lab.engines import Stopped
    from steppe.lab.errors import Interrupted

    if isinstance(stop, Interrupted):
        sys.stderr.write(f"{_capital(str(stop))}.\n")
        if stop.folder is not None:
            sys.stderr.write(f"Resume with: steppe train --resume {stop.folder}\n")
    elif isinstance(stop, Stopped):
        sys.stderr.write(f"Stopped: {stop}, the others are saved. The same command resumes them.\n")
    else:
        sys.stderr.write("Stopped at once; the last checkpoint is kept.\n")
    return 130


class _Stderr(logging.Handler):
    """Writes to whatever sys.stderr is now: progress bars put themselves in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        mark = "warning: " if record.levelno >= logging.WARNING else ""
        sys.stderr.write(f"{mark}{self.format(record)}\n")


def _log(quiet: bool, rank: int) -> None:
    logger = logging.getLogger("steppe")
    if not logger.handlers:
        logger.addHandler(_Stderr())
    level = logging.WARNING if quiet else logging.INFO
    logger.setLevel(logging.ERROR if rank else level)


def _fail(message: str) -> int:
    sys.stderr.write(f"steppe: {' '.join(message.split())}\n")
    return 2


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
