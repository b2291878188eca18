"""The `ralo` command: a table of verbs, one module each, and how errors end."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from ralo.errors import RaloError
from ralo.options import Parser

COMMANDS = {
    "run": "continue a text",
    "chat": "talk with a model in the terminal",
    "ppl": "perplexity of a text",
    "bench": "speed of decode and prefill, beside a peer if asked",
    "pack": "quantise a checkpoint into a directory that opens at once",
    "explain": "what would run, layer by layer",
}


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if args[0] in ("-V", "--version"):
        from ralo import __version__

        print(f"ralo {__version__}")
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return fail("ralo", f"unknown command {name!r}{hint} (commands: {', '.join(COMMANDS)})")
    return run(name, rest)


def run(name: str, args: Sequence[str]) -> int:
    """One command. Bad input is one line on stderr and exit 2; a failed check is the command's own exit 1."""
    prog = f"ralo {name}"
    try:
        module = import_module(f"ralo.commands.{name}")
        parser = Parser(prog=prog, description=module.__doc__, allow_abbrev=False)
        module.add_arguments(parser)
        return int(module.run(parser.parse_args(args)))
    except RaloError as error:
        return fail(prog, str(error))
    except MemoryError:
        return fail(prog, "not enough memory: use a smaller --quant or a smaller model")
    except BrokenPipeError:  # the reader of our output has gone: nothing more to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return fail(prog, f"{where}{error.strerror or error}")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except SystemExit as end:  # argparse: --help, or a wrong flag after its one line
        return int(end.code or 0)


def fail(prog: str, message: str) -> int:
    print(f"{prog}: {' '.join(message.split())}", file=sys.stderr)
    return 2


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  ralo {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(["Language models on ordinary CPUs.", "", *lines, "", "ralo COMMAND --help tells more."])
