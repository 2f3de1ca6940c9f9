"""`python -m piecewise_graph`: see cli/commands.py."""

from piecewise_graph.cli.commands import main

raise SystemExit(main())
