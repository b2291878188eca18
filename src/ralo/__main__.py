"""`python -m ralo` is `ralo`."""

from ralo.cli import main

raise SystemExit(main())
