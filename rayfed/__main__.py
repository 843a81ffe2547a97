"""Run the `rayfed` command as `python -m rayfed`."""

from rayfed.cli import main

main()
