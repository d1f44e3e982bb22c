"""Causal FP8 paged prefill for gfx950."""
