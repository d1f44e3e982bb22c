"""Dense FP8 attention where the native kernel doesn't apply: pages are gathered in bounded pieces and attended
densely."""
