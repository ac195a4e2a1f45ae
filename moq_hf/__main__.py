"""`python -m moq_hf COMMAND` is `moq-hf COMMAND`."""

import sys

from .cli import main

sys.exit(main())
