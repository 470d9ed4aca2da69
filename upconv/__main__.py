"""`python -m upconv`: the same as the `upconv` command."""

import sys

from .cli import main

sys.exit(main())
