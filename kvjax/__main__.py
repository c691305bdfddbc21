"""`python -m kvjax`."""

from .cli import main

main()
