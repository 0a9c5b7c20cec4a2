"""`python -m halfstep`, the same as the `halfstep` command."""

import sys

from halfstep.cli import main

sys.exit(main())
