"""Serve a model to OpenAI's clients and to a browser."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING

from ralo.commands.run import open_model
from ralo.errors import RaloError
from ralo.lm import LoadOptions
from ralo.options import add_flags, read_flags
from ralo.plan import add_mode_flags, read_setup
from ralo.server.options import ServeOptions

if TYPE_CHECKING:
    from fastapi import FastAPI

STALLED_S = 60.0  # after which a client that takes nothing of what is sent to it has gone
LAST_S = 5.0  # that clients have to read the ends of their answers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, LoadOptions, ServeOptions)
    add_mode_flags(parser)


def run(args: argparse.Namespace) -> int:
    options, model, setup = read_flags(ServeOptions, args), read_flags(LoadOptions, args), read_setup(args)
    try:
        import uvicorn  # noqa: F401

        from ralo.server import protocol  # noqa: F401
        from ralo.server.app import create_app
    except ImportError as error:
        if error.name and error.name.startswith("ralo"):
            raise
        raise RaloError("serving needs some more packages: pip install 'ralo[serve]'") from None
    with _listen(options.host, options.port) as sock:  # before any work: a port that is taken is said at once
        lm = open_model(model, setup)
        app = create_app(lm, options)
        host, port = sock.getsockname()[:2]
        where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        names = ", ".join(app.state.service.offer.names)
        print(f"ralo serve: {names} at {where}/ (API at {where}/v1, Ctrl-C ends)", file=sys.stderr, flush=True)
        _serve(app, sock)
    return 0


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if not host:
        raise RaloError("--host is empty: 0.0.0.0 listens at every address of this machine")
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # where it is not known the system's own, longer one ends them
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * STALLED_S))
    try:
        sock.bind((host, port))
        sock.listen(512)  # clients that come while the model is loaded wait for it
    except (OSError, OverflowError, TypeError, UnicodeError) as error:  # the last two: a name that cannot be one
        sock.close()
        raise RaloError(f"cannot listen at {host}:{port}: {getattr(error, 'strerror', None) or error}") from None
    return sock


def _serve(app: FastAPI, sock: socket.socket) -> None:
    import uvicorn

    from ralo.server.protocol import Protocol

    class Server(uvicorn.Server):
        """The first signal lets answers finish, the second ends them."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            service = app.state.service
            if not self.started:
                self.should_exit = True
            elif service.closing:
                service.hurried = True
            else:
                service.closing = True
                asyncio.run_coroutine_threadsafe(self._drain(), service.board.loop)

        async def _drain(self) -> None:
            service = app.state.service
            await service.drain()
            logging.getLogger("uvicorn.error").disabled = True  # what is left now is cut off on purpose
            self.should_exit = True
            until = time.perf_counter() + LAST_S
            while not service.hurried and time.perf_counter() < until:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.2)  # for the ends of streams to be sent
            for connection in list(self.server_state.connections):  # what a client does not read would hold up the end
                if transport := getattr(connection, "transport", None):
                    transport.abort()
            self.force_exit = True

    config = uvicorn.Config(app, http=Protocol, ws="none", log_level="error", access_log=False, backlog=512)
    config.timeout_graceful_shutdown = int(LAST_S) + 1  # where that did not end it
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    Server(config).run(sockets=[sock])
