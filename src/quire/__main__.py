"""The entry point of `python -m quire`, which is the same as the `quire` command."""

import sys

from quire.cli.main import main

sys.exit(main())
