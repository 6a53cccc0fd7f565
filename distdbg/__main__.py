"""`python -m distdbg` is the command `distdbg`."""

import sys

from distdbg.cli import main

sys.exit(main())
