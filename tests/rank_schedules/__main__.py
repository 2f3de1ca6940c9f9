"""`python -m tests.rank_schedules`, from the root of the checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where ranks.py and this package are found

if __name__ == "__main__":
    from rank_schedules.command import main

    sys.exit(main())
