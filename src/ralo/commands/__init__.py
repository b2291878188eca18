"""One verb per file: `add_arguments(parser)` and `run(args) -> exit code`."""
