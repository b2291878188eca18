"""One dial: the fastest plan within a quality budget, found by measuring."""
