"""`python -m rayfed` is `rayfed`."""

from rayfed.cli import main

main()
