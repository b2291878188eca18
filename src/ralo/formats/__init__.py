"""File formats: each reader returns a Checkpoint; ralo's own packed directory returns weights ready to run."""
