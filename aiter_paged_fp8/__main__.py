"""``python -m aiter_paged_fp8 demo | doctor``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="aiter_paged_fp8", description="FP8 attention over paged KV caches")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo", help="attend a ragged batch over every cache layout and compare with the reference"
    )
    demo.add_argument("--seed", type=int, default=0, help="seed of the inputs (default 0)")
    commands.add_parser("doctor", help="versions, architecture, cache directory, and what would run here and why")
    args = parser.parse_args(argv)
    if args.command == "demo":
        from .demo import demo as run_demo

        return run_demo(args.seed)
    from .doctor import doctor as run_doctor

    return run_doctor()


if __name__ == "__main__":
    sys.exit(main())
