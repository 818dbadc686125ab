"""`python -m gspace` is the command `gspace`."""

import sys

from gspace.lab.cli import main

sys.exit(main())
