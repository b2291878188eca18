"""The flags of `ralo serve`."""

from __future__ import annotations

from dataclasses import dataclass

from ralo.options import flag


@dataclass(frozen=True)
class ServeOptions:
    host: str = flag("127.0.0.1", "address to listen at; the default is reached from this machine alone")
    port: int = flag(8080, "port to listen at; 0 = a free one", low=0, high=65535)
    api_key: str = flag("", "key that requests must carry; better in RALO_API_KEY, where no list of processes shows it")
    name: str = flag("", "name of the model in the API; without it the model's own")
    texts: int = flag(32, "answers that are made at once", low=1, high=1024)
    queue: int = flag(64, "requests that may wait; more are told to come back", low=1, high=1 << 20)
    cache_mb: int = flag(512, "memory for texts that may be continued, in MB; 0 = none", low=0, high=1 << 30)
    max_tokens: int = flag(4096, "most tokens of one answer", low=1, high=1 << 30)
    drain_s: float = flag(30.0, "seconds that answers may go on after SIGTERM", low=0, high=86400)
    allow_host: str = flag("", "names under which the server may be asked, with commas, besides loopback's; * = any")
