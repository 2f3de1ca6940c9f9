"""`python -m tests.fuzz`, from the root of the checkout."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where toys.py and this package are found
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

if __name__ == "__main__":
    from fuzz.command import main

    sys.exit(main())
