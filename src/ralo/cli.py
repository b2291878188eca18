"""The `ralo` command: a table of verbs, one module each, and how errors end."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module

from ralo.errors import RaloError
from ralo.options import Parser, nearest

COMMANDS = {
    "run": "continue a text",
    "chat": "talk with a model in the terminal",
    "ppl": "perplexity of a text",
    "bench": "speed of decode and prefill, beside a peer if asked",
    "pack": "quantise a checkpoint into a directory that opens at once",
    "explain": "what would run, layer by layer",
    "calibrate": "learn what skipping costs a model and write a plan within a quality budget",
    "tune": "the fastest plan within a quality budget, for this model on this CPU",
    "accept": "measure what each mode promises, line by line",
    "serve": "answer OpenAI's clients and a browser",
    "batch": "answer a file of prompts, here or on a Ray cluster",
    "heal": "let a pack's weights learn from the dense model again",
}
NOTE = "[Defaults] can be set in the environment: RALO_QUANT=int4 is --quant int4."


def main(argv: Sequence[str] | None = None) -> int:
    """One command. Bad input is one line on stderr and exit 2; a failed check is the command's own exit 1."""
    prepare_streams()
    args = list(sys.argv[1:] if argv is None else argv)
    prog = f"ralo {args[0]}" if args and args[0] in COMMANDS else "ralo"
    try:
        try:
            code = run(prog, args)
        except SystemExit as end:  # argparse: --help, or a wrong flag after its one line
            code = int(end.code or 0)
        sys.stdout.flush()  # here, not at exit: so a full disk or a closed pipe ends like any other error
        return code
    except RaloError as error:
        return fail(prog, str(error))
    except MemoryError:
        return fail(prog, "not enough memory: use a smaller --quant or a smaller model")
    except BrokenPipeError:  # the reader of our output has gone: nothing more to say
        drop_output()
        return 0
    except OSError as error:
        drop_output()
        where = f"{error.filename}: " if error.filename else ""
        return fail(prog, f"{where}{error.strerror or error}")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def run(prog: str, args: Sequence[str]) -> int:
    name = args[0] if args else "help"
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name in ("-V", "--version"):
        from ralo import __version__

        print(f"ralo {__version__}")
        return 0
    if name not in COMMANDS:
        raise RaloError(f"unknown command {name!r}{nearest(name, COMMANDS)} (commands: {', '.join(COMMANDS)})")
    module = import_module(f"ralo.commands.{name}")
    parser = Parser(prog=prog, description=module.__doc__, epilog=NOTE, allow_abbrev=False)
    module.add_arguments(parser)
    parser.set_defaults(command=shlex.join(("ralo", *args)))  # for what is written to be read later
    return int(module.run(parser.parse_args(args[1:])))


def prepare_streams() -> None:
    """A closed stream becomes an empty one, and a character that a stream cannot hold is no reason to stop."""
    sys.stdin, sys.stdout, sys.stderr = (s or io.StringIO() for s in (sys.stdin, sys.stdout, sys.stderr))
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def drop_output() -> None:
    """What an output that failed still has in its buffer would fail again at exit, with a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(prog: str, message: str) -> int:
    print(f"{prog}: {' '.join(message.split())}", file=sys.stderr)
    return 2


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  ralo {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(["Language models on ordinary CPUs.", "", *lines, "", "ralo COMMAND --help tells more."])
