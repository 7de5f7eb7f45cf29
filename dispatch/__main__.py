"""`python -m gristmill` is the `gristmill` command."""

import sys

from gristmill.cli import main

sys.exit(main())
