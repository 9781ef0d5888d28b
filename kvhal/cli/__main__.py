"""``python -m kvhal.cli``: the `kvhal` program without its entry point installed."""

from kvhal.cli import main

main()
