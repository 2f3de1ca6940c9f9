"""`python -m piecewise_graph`: see cli.py."""

from piecewise_graph.cli import main

raise SystemExit(main())
