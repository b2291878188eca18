"""Files of prompts, answered here or on a Ray cluster."""
