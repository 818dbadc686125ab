"""`python -m gspace` is the command `gspace`."""

import sys

from gspace_command import main

sys.exit(main())
