"""FP8 attention over paged KV caches."""

__version__ = "0.1.0"
